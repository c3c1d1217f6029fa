"""Saved configurations: in a run's folder, in its checkpoints, and in weights exported from it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from pycls_fast.config import messages
from pycls_fast.config.compose import Composed, as_hydra_overrides, groups, is_global
from pycls_fast.config.explain import COMPOSE_ERRORS, explain, no_such_file, unreadable
from pycls_fast.config.imports import import_modules_of
from pycls_fast.config.locations import CONFIGS
from pycls_fast.config.schema import RunConfig
from pycls_fast.errors import UserError
from pycls_fast.files import STATE, best_first, our_config, user_path, weights_file


@dataclass(frozen=True)
class SavedConfig:
    """A saved configuration: plain values as written, and their file."""

    values: Mapping[str, Any]
    file: Path
    name: str
    """The experiment's name if the values do not hold it."""


def saved_with_weights(overrides: Sequence[str]) -> SavedConfig | None:
    """The configuration saved with what `weights=` names; None if there is none (files of other projects).

    Raises:
        UserError: the argument or the saved configuration cannot be read.
    """
    given = [override for override in overrides if override.lstrip("+").partition("=")[0] == "weights"]
    if not given:
        return None
    (parsed,) = _parsed(given[-1:])
    value = parsed.value()
    sources = [getattr(item, "text", item) for item in value.list] if isinstance(value, ChoiceSweep) else [value]
    found = (_saved_at(_resolved(str(source))) for source in sources)
    return next((saved for saved in found if saved is not None), None)


def _resolved(value: str) -> Path:
    try:
        return user_path(OmegaConf.create({"weights": value})["weights"])
    except OmegaConfBaseException as error:
        raise UserError(
            f"weights: {value} cannot be resolved before the configuration is found, which comes from there; write the "
            "path, or name an experiment with --config-name (the command line)"
        ) from error


def _saved_at(source: Path) -> SavedConfig | None:
    # Below, search both the link's target and its own folder: a link to another disk may be in the run folder.
    if not source.exists():
        return None  # A hub name, or an error that is reported when it is opened.
    path = source.resolve()
    file = path / "model.safetensors" if (path / "config.json").is_file() else weights_file(source)
    if file.suffix == ".safetensors" and file.is_file():
        values = _in_header(file)
        if values is not None:
            return SavedConfig(values, file, file.stem)
    if (path / "config.yaml").is_file():
        return saved_in_run(path)
    # A checkpoint; else the best or newest one in a folder of checkpoints.
    for checkpoint in (path, *best_first(path)):
        if (checkpoint / STATE).is_file():
            return SavedConfig(_in_state(checkpoint / STATE), checkpoint / STATE, checkpoint.name)
    # Any other file or folder in a run folder or in its checkpoints/.
    nearby = (folder for start in (source.absolute(), path) for folder in (start.parent, start.parent.parent))
    run_dir = next((folder for folder in nearby if (folder / "config.yaml").is_file()), None)
    return None if run_dir is None else saved_in_run(run_dir)


def _in_header(file: Path) -> dict[str, Any] | None:
    """The configuration in a safetensors header (8 bytes of length, then JSON text); None if there is none."""
    try:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        text = header.get("__metadata__", {}).get("config")
        values = None if text is None else json.loads(text)
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, MemoryError):
        return None  # Reported when the tensors are read.
    return our_config(values)


def _in_state(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))["config"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"weights: {file} cannot be read ({type(error).__name__}); take another checkpoint") from error
    assert isinstance(values, dict)
    return values


def saved_in_run(run_dir: Path) -> SavedConfig:
    """The configuration in a run folder's `config.yaml`.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    file = run_dir / "config.yaml"
    if not file.is_file():
        raise UserError(f"{run_dir}: not a run folder (it has no config.yaml)")
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{file}: cannot be read ({' '.join(str(error).split())})") from error
    if not isinstance(values, dict):
        raise UserError(f"{file}: holds no keys; it is not a run's configuration")
    return SavedConfig(values, file, run_dir.name)


def validate_saved(values: Mapping[str, Any], where: str) -> RunConfig:
    """A configuration from a checkpoint's or exported file's plain values; combinations of keys are not checked.

    Args:
        where: the file, for messages.

    Raises:
        UserError: one line per value that this version does not accept.
    """
    import_modules_of(values)
    try:
        return RunConfig.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise UserError(*messages.lines(error, RunConfig, lambda key: where)) from error


# What is taken from these sections; the rest depends on training, its machine and its number of ranks.
_KEPT = {"speed": ("preset",), "parallel": ("backend", "timeout_seconds")}


def compose_saved(saved: SavedConfig, overrides: Sequence[str]) -> Composed:
    """Apply overrides to a saved configuration: `group=name` and `key=value` replace, `~key` deletes.

    Only the preset of `speed` is taken: the file holds the switches as resolved for training on the run's device with
    its compiler, which may not be available here. Nothing of the strategy in `parallel` is taken, since the network is
    not wrapped for scoring and there may be another number of ranks.

    Raises:
        UserError: an override cannot be read.
    """
    values = dict(saved.values)
    config_name = str(values.pop("config_name", saved.name))
    for section, kept in _KEPT.items():
        if isinstance(values.get(section), dict):
            values[section] = {key: value for key, value in values[section].items() if key in kept}
    names = groups([CONFIGS])
    choices: dict[str, str] = {}
    changes: list[Override] = []
    for override in _parsed(overrides):
        name, value = override.key_or_group, override.value()
        if override.is_sweep_override():
            typed = str(override.input_line).removeprefix("++")
            way = f"""a path with commas as '{name}="..."'""" if "/" in typed else f"a list as {name}=[...]"
            raise UserError(f"{typed}: several values; write {way} (the command line)")
        if name not in names or isinstance(value, dict) or override.is_delete():
            changes.append(override)
            continue
        if not (CONFIGS / name / f"{value}.yaml").is_file():
            raise no_such_file(name, str(value), [CONFIGS])
        choices[name] = str(value)
    try:
        merged = _with_groups(values, choices)
        for override in changes:
            _change(merged, override)
    except COMPOSE_ERRORS as error:
        raise explain(error, [CONFIGS]) from error
    composed = Composed({}, config_name, tuple(overrides), choices, (CONFIGS,), saved=saved.file)
    return dataclasses.replace(composed, values=composed.resolve(merged))


def _parsed(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides with Hydra's grammar, so that values mean the same as when Hydra composes."""
    for override in overrides:
        if "=" not in override and not override.startswith("~"):
            raise unreadable(override, [])
    try:
        return OverridesParser.create().parse_overrides(as_hydra_overrides(overrides, [CONFIGS]))
    except COMPOSE_ERRORS as error:
        raise explain(error, []) from error


def _change(values: DictConfig, override: Override) -> None:
    key = override.key_or_group
    if not override.is_delete():
        OmegaConf.update(values, key, override.value(), merge=True, force_add=True)
        return
    parent, _, name = key.rpartition(".")
    section = OmegaConf.select(values, parent) if parent else values
    if not isinstance(section, DictConfig) or name not in section:
        raise UserError(f"~{key}: there is no {key} to delete")
    del section[name]


def _with_groups(values: Mapping[str, Any], choices: dict[str, str]) -> DictConfig:
    """Saved values with groups replaced by the chosen files; a file of the global package may choose further ones."""
    files = {name: CONFIGS / name / f"{choice}.yaml" for name, choice in choices.items()}
    contents = {name: _plain(name, file) for name, file in files.items()}
    whole = [contents.pop(name) for name, file in files.items() if is_global(file)]
    for content in whole:
        for entry in content.pop("defaults", []):
            for override, choice in entry.items():
                name = str(override).removeprefix("override ").lstrip("/")
                if name not in choices:
                    choices[name] = str(choice)
                    contents[name] = _plain(name, CONFIGS / name / f"{choice}.yaml")
    kept = {name: value for name, value in values.items() if name not in choices}
    merged = OmegaConf.merge(OmegaConf.create({**kept, **contents}), *whole)
    assert isinstance(merged, DictConfig)
    return merged


def _plain(group: str, file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise no_such_file(group, file.stem, [CONFIGS])
    content: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    assert isinstance(content, dict)
    return content
