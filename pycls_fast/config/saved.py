"""Saved configurations: in a run's folder, in its checkpoints, and in weights exported from it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pycls_fast.choice import FAMILIES
from pycls_fast.config.compose import import_modules_of, long_name, validate
from pycls_fast.config.keys import CONFIGS, key_of
from pycls_fast.config.of_weights import SavedConfig, saved_at
from pycls_fast.config.presets import groups
from pycls_fast.config.run import RunConfig
from pycls_fast.errors import UserError, refuse
from pycls_fast.files import user_path
from pycls_fast.reading import interpolation

SAVED = "saved_with_weights"
"""The name under which Hydra finds a saved configuration."""


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
    found = (saved_at(user_path(source)) for source in str(value).split(","))
    return next((saved for saved in found if saved is not None), None)


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


def own_places(saved: SavedConfig, given: Collection[str] = ()) -> Iterator[tuple[str, str]]:
    """Yield (key, what is wrong) for addresses, and places to write to, that only a saved configuration names: nothing
    is to be contacted and written there.

    Args:
        given: the keys on the command line.
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
            yield f"data.{key}", f"{place} is {what}, and only {saved.file} names it"


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
    places = own_places(saved, {key_of(override) for override in overrides})
    refuse(f"{key}: {what}; to allow it, give {key}" for key, what in places)
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
