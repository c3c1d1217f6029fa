"""Saved configurations: in a run's folder, in its checkpoints, and in weights exported from it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pycls_fast.choice import FAMILIES
from pycls_fast.config.compose import import_modules_of, long_name, validate
from pycls_fast.config.keys import CONFIGS, key_of
from pycls_fast.config.presets import groups
from pycls_fast.config.run import RunConfig
from pycls_fast.errors import UserError, refusing
from pycls_fast.files import STATE, best_first, our_config, user_path, weights_file
from pycls_fast.reading import TEXT_BYTES, SavedConfiguration, check, interpolation, parse_json, read_json, read_yaml

SAVED = "saved_with_weights"
"""The name under which Hydra finds a saved configuration."""


@dataclass(frozen=True)
class SavedConfig:
    """A saved configuration: plain values as written, and their file."""

    values: Mapping[str, Any]
    file: Path

    @property
    def name(self) -> str:
        """The experiment's name."""
        return str(self.values.get("config_name", self.file.stem))


def saved_with_weights(overrides: Sequence[str]) -> SavedConfig | None:
    """The configuration saved with what `weights=` names; None if there is none (files of other projects).

    Raises:
        UserError: the argument or the saved configuration cannot be read.
    """
    given = [override.partition("=")[2] for override in overrides if key_of(override) == "weights"]
    if not given:
        return None
    try:
        value = OmegaConf.create({"weights": given[-1].strip("'\"")})["weights"]
    except OmegaConfBaseException as error:
        raise UserError(
            f"weights: {given[-1]} cannot be resolved before the configuration is found, which comes from there; write "
            "the path, or name an experiment with --config-name (the command line)"
        ) from error
    # A sweep may name several, which are of one configuration.
    found = (_saved_at(user_path(source)) for source in str(value).split(","))
    return next((saved for saved in found if saved is not None), None)


def _saved_at(source: Path) -> SavedConfig | None:
    # Below, search both the link's target and its own folder: a link to another disk may be in the run folder.
    if not source.exists():
        return None  # A hub name, or an error that is reported when it is opened.
    path = source.resolve()
    file = path / "model.safetensors" if (path / "config.json").is_file() else weights_file(source)
    if file.suffix == ".safetensors" and file.is_file() and (values := _in_header(file)) is not None:
        return SavedConfig(values, file)
    # A checkpoint; else the best or newest one in a folder of checkpoints; else any file or folder in that of a run.
    states = [] if (path / "config.yaml").is_file() else [folder / STATE for folder in (path, *best_first(path))]
    state = next((state for state in states if state.is_file()), None)
    if state is not None:
        return SavedConfig(_read(lambda file: read_json(file)["config"], state), state)
    nearby = (path, *source.absolute().parents[:2], *path.parents[:2])
    run_dir = next((folder for folder in nearby if (folder / "config.yaml").is_file()), None)
    return None if run_dir is None else saved_in_run(run_dir)


def _in_header(file: Path) -> dict[str, Any] | None:
    """The configuration in a safetensors header (8 bytes of length, then JSON text); None if there is none."""
    try:
        with file.open("rb") as stream:
            header = parse_json(stream.read(min(int.from_bytes(stream.read(8), "little"), TEXT_BYTES)))
        text = header.get("__metadata__", {}).get("config")
        values = None if text is None else parse_json(text)
    except (OSError, ValueError, TypeError, AttributeError):
        return None  # Reported when the tensors are read.
    return our_config(values)


def _read(read: Callable[[Path], Any], file: Path) -> dict[str, Any]:
    with refusing(f"{file}: is not a run's configuration", OSError, ValueError, LookupError, TypeError):
        values = read(file)
        check(SavedConfiguration, values)
        return dict(values)


def saved_in_run(run_dir: Path) -> SavedConfig:
    """The configuration in a run folder's `config.yaml`.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    file = run_dir / "config.yaml"
    return SavedConfig(_read(read_yaml, file), file)


def validate_saved(values: Mapping[str, Any], where: str) -> RunConfig:
    """A configuration from a checkpoint's or exported file's plain values; combinations of keys are not checked.

    Args:
        values: as saved.
        where: the file, for messages.

    Raises:
        UserError: one line per value that this version does not accept.
    """
    import_modules_of(values)
    return validate(RunConfig, values, lambda key: where)


def _refuse_places(saved: SavedConfig, given: Collection[str]) -> None:
    """Contact no address, and write nowhere, that only a saved configuration names.

    Args:
        given: the keys on the command line.

    Raises:
        UserError: it names one.
    """
    data = saved.values.get("data")
    if "data" in given or not isinstance(data, Mapping):
        return
    for key in ("root", "train", "val"):
        place = str(data.get(key) or "")
        outside = user_path(place).is_absolute() or ".." in place
        written = key == "root" and data.get("source") == "digits" and outside and not user_path(place).is_dir()
        if f"data.{key}" not in given and ("://" in place or written):
            what = "no folder, so the digits would be written there" if written else "an address"
            raise UserError(
                f"data.{key}: {place} is {what}, and only {saved.file} names it; to allow it, give data.{key}"
            )


# What is taken from these sections; the rest depends on training, its machine and its number of ranks.
_KEPT = {"speed": ("preset",), "parallel": ("backend", "timeout_seconds")}


def register(saved: SavedConfig, overrides: Sequence[str]) -> None:
    """Give Hydra a saved configuration as the file `SAVED`; `overrides` are those that it will be composed with.

    A group that they choose replaces the saved one; where they change its name (`data.source=packed`), the keys stay
    that all its members have. Only the preset of `speed` is taken: the file holds the switches as resolved for training
    on the run's device with its compiler, which may not be available here. Nothing of the strategy in `parallel` is
    taken, since the network is not wrapped for scoring and there may be another number of ranks.

    Raises:
        UserError: there are values that Hydra would resolve, keys of its own, or an address.
    """
    key = interpolation(saved.values) or next((key for key in ("defaults", "hydra") if key in saved.values), None)
    if key is not None:
        raise UserError(f"{saved.file}: {key}: is resolved by nobody in a saved configuration; write its plain value")
    overrides = [long_name(override, [CONFIGS]) for override in overrides]
    _refuse_places(saved, {key_of(override) for override in overrides})
    # speed comes last: its file meta2022 chooses those of other groups.
    names = sorted(groups([CONFIGS]), key=lambda name: name == "speed")
    given = {key: value for key, _, value in (override.partition("=") for override in overrides)}
    chosen = {key for key, value in given.items() if not value.startswith("{")}
    values: dict[str, Any] = {"defaults": ["_self_", *({name: None} for name in names)]}
    for key, value in saved.values.items():
        if key != "config_name" and not (key in names and key in chosen):
            kept = _KEPT.get(key) if isinstance(value, dict) else None
            tag = FAMILIES[key].tag if key in FAMILIES and isinstance(value, dict) else None
            if tag is not None and given.get(f"{key}.{tag}", value.get(tag)) != value.get(tag):
                kept = tuple(FAMILIES[key].model_fields)
            values[key] = value if kept is None else {name: value[name] for name in kept if name in value}
    ConfigStore.instance().store(SAVED, values)
