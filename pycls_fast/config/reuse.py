"""What a command takes from a saved configuration, and what one that may be a stranger's must not do."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pycls_fast.choice import FAMILIES
from pycls_fast.config.compose import long_names, module_names, validate
from pycls_fast.config.keys import CONFIGS, key_of, typed_values
from pycls_fast.config.run import RunConfig, groups
from pycls_fast.config.saved import SavedConfig, saved_at
from pycls_fast.errors import UserError, refuse, refusing
from pycls_fast.files import user_path

SAVED = "saved_with_weights"
"""The name under which Hydra finds a saved configuration."""


def saved_with_weights(overrides: Sequence[str]) -> SavedConfig | None:
    """The configuration saved with what `weights=` names; None if there is none (files of other projects)."""
    given = [override.partition("=")[2] for override in overrides if key_of(override) == "weights"]
    if not given:
        return None
    # Quotes around the whole belong to Hydra's grammar, one at the end alone to the name.
    path = re.sub(r"""^(['"])(.*)\1$""", r"\2", given[-1])
    what = f"weights: {given[-1]} cannot be resolved before the configuration is found, which comes from there"
    way_out = "write the path, or name an experiment with --config-name (the command line)"
    with refusing(what, OmegaConfBaseException, use=way_out):
        value = str(OmegaConf.create({"weights": path})["weights"])
    # A comma is a part of a name, or a sweep has several, which are of one configuration.
    found = (saved_at(user_path(source)) for source in (value, *value.split(",")))
    return next((saved for saved in found if saved is not None), None)


def validate_saved(values: Mapping[str, Any], where: str) -> RunConfig:
    """A configuration from the plain values of a checkpoint or an exported file, `where`; combinations are not checked.
    A `UserError` has one line per value that this version does not accept."""
    try:
        return validate(RunConfig, {**values, "imports": []}, lambda key: where)
    except UserError as error:
        raise UserError(*error.lines, *_not_imported(values, where)) from error


def as_data(saved: SavedConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a saved configuration, which may be a stranger's, without those that are used only if they are
    typed: modules to import, and folders of caches.

    `given` are the values on the command line by key. A `UserError` if the file alone names modules that nobody has
    imported, an address, or a folder to write to.
    """
    lines = [] if "imports" in given else list(_not_imported(saved.values, str(saved.file)))
    values = {key: value for key, value in saved.values.items() if key != "imports"}
    data = values.get("data")
    # A dictionary is merged into what was saved; only a name takes its place.
    if isinstance(data, Mapping) and given.get("data", "{").startswith("{"):
        values["data"] = {key: value for key, value in data.items() if key not in _CACHES or value == "off"}
        source = given.get("data.source", data.get("source"))
        for key in ("root", "train", "val"):
            place = str(data.get(key) or "")
            if f"data.{key}" not in given and _does_more_than_read(place, str(source), is_root=key == "root"):
                lines.append(
                    f"data.{key}: {place} would be downloaded or written, and only {saved.file} names it; to allow it, "
                    f"give data.{key}"
                )
    refuse(lines)
    return values


_CACHES = ("index_cache", "shard_cache", "shard_cache_gib")


def _does_more_than_read(place: str, source: str, *, is_root: bool) -> bool:
    """Whether using a place in `data` downloads files or writes some."""
    if not is_root or not place:
        return "://" in place
    is_of_hub = source == "hub" and not user_path(place).is_dir()
    # Half a folder of digits is completed.
    is_written = source == "digits" and not (user_path(place) / "9").is_dir()
    return "://" in place or is_of_hub or is_written


def _not_imported(values: Mapping[str, Any], where: str) -> Iterator[str]:
    """A line if saved values name modules that this process has not imported; importing others runs no further code."""
    names = [name for name in module_names(values) if name not in sys.modules]
    if names:
        yield (
            f"imports: {where} names {', '.join(names)}, which may be a stranger's code; to run it, add "
            f"imports=[{','.join(names)}] (in Python: import it first)"
        )


# What is taken from these sections; the rest depends on training, its machine and its number of ranks.
_KEPT = {"speed": ("preset",), "parallel": ("backend", "timeout_seconds")}


def register(saved: SavedConfig, overrides: Sequence[str]) -> None:
    """Give Hydra a saved configuration as the file `SAVED`; `overrides` are those that it will be composed with.

    A group that they choose replaces the saved one; where they change its name (`data.source=packed`), the keys stay
    that all its members have. Only the preset of `speed` is taken: the file holds the switches as resolved for training
    on the run's device with its compiler, which may not be available here. Nothing of the strategy in `parallel` is
    taken, since the network is not wrapped for scoring and there may be another number of ranks. A `UserError` for
    values that Hydra would resolve, keys of its own, and as in `as_data`.
    """
    if "${" in json.dumps(saved.values) or {"defaults", "hydra"} & {*saved.values}:
        raise UserError(
            f"{saved.file}: ${{...}}, defaults and hydra are not for saved configurations; write plain values"
        )
    given = typed_values(long_names(overrides, [CONFIGS]))
    found = as_data(saved, given)
    # speed comes last: its file meta2022 chooses those of other groups.
    names = sorted(groups([CONFIGS]), key=lambda name: name == "speed")
    chosen = {name for name in names if not given.get(name, "{").startswith("{")}
    values: dict[str, Any] = {"defaults": ["_self_", *({name: None} for name in names)]}
    for key, value in found.items():
        if key != "config_name" and key not in chosen:
            kept = _KEPT.get(key) if isinstance(value, dict) else None
            tag = FAMILIES[key].tag if key in FAMILIES and isinstance(value, dict) else None
            if tag is not None and given.get(f"{key}.{tag}", value.get(tag)) != value.get(tag):
                kept = tuple(FAMILIES[key].model_fields)
            values[key] = value if kept is None else {name: value[name] for name in kept if name in value}
    ConfigStore.instance().store(SAVED, values)
