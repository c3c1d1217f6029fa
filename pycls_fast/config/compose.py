"""Hydra -> `RunConfig`: YAML groups and overrides, and where a value was set. No DictConfig leaves this module."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from pycls_fast.choice import FAMILIES, Section
from pycls_fast.config import messages
from pycls_fast.config.conflicts import Purpose, problems
from pycls_fast.config.keys import CONFIGS, as_typed, key_of, quoted, shown_path, typed_values
from pycls_fast.config.of_weights import OF_WEIGHTS, of_weights
from pycls_fast.config.run import PRESETS, RunConfig, groups, options
from pycls_fast.errors import UserError, did_you_mean, first_line, refuse
from pycls_fast.files import exists, user_path
from pycls_fast.precision import LEVELS

# Every rank would create Hydra's folders and log files; only rank 0 writes the run folder.
HYDRA_SETTINGS = (
    "hydra.run.dir=.",
    "hydra.output_subdir=null",
    "hydra/job_logging=disabled",
    "hydra/hydra_logging=disabled",
)

Options = TypeVar("Options", bound=Section)


@dataclass(frozen=True)
class Composed:
    """Hydra's result: plain values, and what is needed to tell where a value was set."""

    values: Mapping[str, Any]
    config_name: str
    overrides: tuple[str, ...]
    choices: Mapping[str, str]
    folders: tuple[Path, ...]
    saved: Path | None = None
    """The file that holds every key, if the values come from a run."""
    typed: str = "the command line"
    """Where the overrides are, for messages."""

    @classmethod
    def from_hydra(cls, config: DictConfig, hydra_config: Any) -> Composed:
        """Plain values, interpolations resolved; a `UserError` for what cannot be resolved, or is left as `???`."""
        runtime = hydra_config.runtime
        composed = cls(
            values={},
            config_name=str(hydra_config.job.config_name).removesuffix(".yaml"),
            overrides=typed_overrides(hydra_config),
            choices={str(group): str(choice) for group, choice in runtime.choices.items() if choice is not None},
            folders=tuple(Path(s.path) for s in runtime.config_sources if s.schema == "file" and s.path),
        )
        try:
            own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
            found: Any = OmegaConf.to_container(own, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            raise messages.interpolation_mistake(error, composed.where) from error
        values = {str(key): value for key, value in found.items()}
        if composed.choices.get("model") == OF_WEIGHTS and isinstance(values.get("model"), dict):
            # What is typed, and what an experiment's file adds to the option.
            kept = {key for key, value in values["model"].items() if value != PRESETS["model"][OF_WEIGHTS].get(key)}
            kept |= {key.removeprefix("model.") for key in typed_values(composed.overrides)}
            values["model"], size = of_weights(values, kept)
            if size is not None and isinstance(data := values.setdefault("data", {}), dict):
                data.setdefault("image_size", size)
        return dataclasses.replace(composed, values=values)

    def where(self, key: str) -> str:
        """What set the key, `typed` or a YAML file; else where it can be set."""
        key = re.sub(r"\[\d+\]", "", key)
        for override in reversed(self.overrides):
            name, _, value = override.lstrip("+~").partition("=")
            # What chooses a file does not set the values in it.
            sets_values = name not in self.choices or value.startswith("{")
            if sets_values and (name == key or key.startswith(f"{name}.") or name.startswith(f"{key}.")):
                return f"deleted on {self.typed}" if override.startswith("~") else self.typed
        group, _, rest = key.partition(".")
        if self.saved is not None and group not in self.choices:
            return str(self.saved)
        places = [] if self.saved is not None else [(name, key) for name in self.experiments(self.config_name)]
        if group in self.choices:
            # A file of any group may set keys of the whole configuration.
            chosen = [f"{name}/{choice}" for name, choice in self.choices.items()]
            places += [(name, key) for name in chosen if (file := self.file(name)) is not None and is_global(file)]
            places.append((f"{group}/{self.choices[group]}", rest))
        files = ((self.file(name), there) for name, there in places)
        found = next((file for file, there in files if file is not None and _has_key(file, there)), None)
        return self._place_of_default(group) if found is None else shown_path(found)

    def _place_of_default(self, group: str) -> str:
        """Where a key can be set that no file has."""
        choice = self.choices.get(group)
        file = self.file(self.config_name if choice is None else f"{group}/{choice}")
        if file is not None:
            return f"{shown_path(file)} or {self.typed}"
        return f"{group}={choice} or {self.typed}" if choice in PRESETS.get(group, ()) else self.typed

    def file(self, name: str) -> Path | None:
        """The YAML file of an experiment or of a `group/choice`; None if there is none."""
        files = (folder / f"{name}.yaml" for folder in self.folders)
        return next((file for file in files if file.is_file()), None)

    def experiments(self, name: str) -> Iterator[str]:
        """The experiment and those in its defaults list, recursively, later ones first."""
        yield name
        file = self.file(name)
        values = yaml.safe_load(file.read_text(encoding="utf-8")) if file is not None else None
        for entry in reversed(values.get("defaults", [])) if isinstance(values, dict) else []:
            if isinstance(entry, str) and entry != "_self_":
                yield from self.experiments(entry.lstrip("/").removesuffix(".yaml"))


def typed_overrides(hydra_config: Any) -> tuple[str, ...]:
    """The command line's overrides as they were typed, with interpolations unresolved."""
    typed: Any = OmegaConf.to_container(hydra_config.overrides.task, resolve=False)
    return tuple(typed)


def check(composed: Composed, purpose: Purpose, options: type[Section] = Section) -> RunConfig:
    """Validate strictly, then check combinations of keys; a `UserError` has one line per bad value.

    `options` are a tool's own keys, which are no part of the configuration.
    """
    refuse(
        "config_name: the name of the experiment's file; choose it with --config-name (the command line)"
        for override in composed.overrides
        if key_of(override) == "config_name"
    )
    import_modules(module_names(composed.values))
    values = {key: _fitting(composed, key) for key in composed.values if key not in options.model_fields}
    values["config_name"] = composed.config_name
    config = validate(RunConfig, values, composed.where, {**ALIASES, **options.model_fields})
    refuse(f"{key}: {message} ({composed.where(key)})" for key, message in problems(config, purpose))
    return config


def _fitting(composed: Composed, group: str) -> Any:
    """The values of a group; if its choice was typed, without those that an experiment's files have for others only."""
    values, typed = composed.values[group], typed_values(composed.overrides)
    chosen = any(override.startswith(f"{group}=") for override in composed.overrides)
    if group not in FAMILIES or not chosen or not isinstance(values, dict):
        return values
    choices = FAMILIES[group].choices()
    own = choices.get(str(values.get(FAMILIES[group].tag)), Section).model_fields
    of_others = {key for each in choices.values() for key in each.model_fields if own and key not in own}
    return {key: value for key, value in values.items() if key not in of_others or f"{group}.{key}" in typed}


def import_modules(names: Iterable[str]) -> None:
    """Import modules by name; a `UserError` for one that is not there or fails. The current folder is searched first,
    unless it is on the path already."""
    # torchrun and the tools put only the script's folder on the path. Workers that are not forked inherit the path.
    here = str(Path.cwd())
    for name in names:
        if here not in sys.path:
            sys.path.insert(0, here)
        try:
            __import__(name)
        except (Exception, SystemExit) as error:
            # Python's own frames of the import have no file.
            frames = [each for each in traceback.extract_tb(error.__traceback__) if Path(each.filename).is_file()]
            at = f"({frames[-1].filename}, line {frames[-1].lineno})" if len(frames) > 1 else f"({here}, PYTHONPATH)"
            module = name.removesuffix(".py").replace("/", ".")
            meant = f"; did you mean {module}?" if module != name else ""
            raise UserError(f"imports: {name}: {type(error).__name__}: {first_line(error)} {at}{meant}") from error


def module_names(values: Mapping[str, Any]) -> list[str]:
    """What a configuration's plain values import; it is validated with what the modules register."""
    names = values.get("imports")
    # Values of other types are left to the validation.
    listed = names if isinstance(names, list | tuple) else [names]
    return [name for name in listed if isinstance(name, str)]


def validate(
    schema: type[Options], values: Mapping[str, Any], where: messages.Where, also: Iterable[str] = ()
) -> Options:
    """Validate plain values as a section, as JSON text, so that a YAML list becomes a tuple; a `UserError` has one line
    per bad value."""
    try:
        return schema.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise UserError(*messages.lines(error, schema, where, also)) from error


def load_config(
    config_name: str = "vit_digits", overrides: Sequence[str] = (), *, needs_data: bool = True
) -> RunConfig:
    """Compose and check an experiment as the command line does; `data.eval_set`, which only scoring reads, is accepted.

    Args:
        config_name: a file of `configs/`, without `.yaml`.
        overrides: as on the command line, e.g. `["optim.lr=1e-3", "model=vit_s16"]`.
        needs_data: `data.root` must be set where the source needs one.
    """
    return check(compose(config_name, overrides, [CONFIGS]), Purpose(needs_data=needs_data, scores_sets=True))


def compose(config_name: str, overrides: Sequence[str], folders: Sequence[Path]) -> Composed:
    """Compose an experiment (see `load_config`) from folders of files; those of the folder that holds it win."""
    require_folders(folders)
    main = main_folder(config_name, folders)
    others = ",".join(quoted(f"file://{folder.resolve()}") for folder in folders if folder is not main)
    with hydra.initialize_config_dir(str(main.resolve()), version_base="1.3"):
        settings = [*HYDRA_SETTINGS, f"hydra.searchpath=[{others}]", *as_hydra_overrides(overrides, folders)]
        return compose_here(config_name, settings, folders)


def main_folder(config_name: str, folders: Sequence[Path]) -> Path:
    """The last of the folders that hold an experiment, which the user named after ours; else the first."""
    file = f"{config_name.removesuffix('.yaml')}.yaml"
    return next((folder for folder in reversed(folders) if (folder / file).is_file()), folders[0])


def compose_here(config_name: str, overrides: Sequence[str], folders: Sequence[Path]) -> Composed:
    """Compose from Hydra's overrides where Hydra is initialized."""
    with messages.explaining(folders):
        config = hydra.compose(config_name, list(overrides), return_hydra_config=True)
    return Composed.from_hydra(config, config.hydra)


def require_folders(folders: Iterable[Path]) -> None:
    refuse(f"{folder}: no such folder of configurations" for folder in folders if not folder.is_dir())


def is_global(file: Path) -> bool:
    """Whether a group's file sets keys of the whole configuration (Hydra's `@package _global_`)."""
    with file.open(encoding="utf-8") as lines:
        return next(lines, "").replace(" ", "").startswith("#@package_global_")


ALIASES = {
    "batch_size": "data.global_batch_size",
    "device": "runtime.device",
    "epochs": "schedule.epochs",
    "image_size": "data.image_size",
    "lr": "optim.lr",
}
"""Short names of keys, on the command line and from Python."""


def with_long_key(override: str) -> str:
    """`epochs=3` -> `schedule.epochs=3`."""
    key, separator, value = override.partition("=")
    return f"{ALIASES.get(key, key)}{separator}{value}"


def long_name(override: str, folders: Sequence[Path], *, is_sourced: bool = False) -> str:
    """`epochs=3` -> `schedule.epochs=3`, and `data=FOLDER` -> `data.root=FOLDER` unless it names an option of data.

    `is_sourced`: `data.source` is typed, too, so `data=NAME` is a folder, even one that is not there."""
    # No name has a slash or a dot: a folder or a table that is not there is told as one.
    key, separator, value = override.partition("=")
    is_other = f"{key}{separator}" != "data=" or value.startswith("{") or value in options("data", folders)
    if not is_other and (is_sourced or {"/", "."} & set(value) or exists(user_path(value))):
        return f"data.root={value}"
    return with_long_key(override)


def long_names(overrides: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """All that is typed, with long names."""
    is_sourced = any(override.startswith("data.source=") for override in overrides)
    return [long_name(override, folders, is_sourced=is_sourced) for override in overrides]


# One's own images, weights or (from Python) module.
_OWN = re.compile(r"(weights|data[.](root|train|dataset)|model[.]module)=|data={")


def default_experiment(overrides: Sequence[str], folders: Sequence[Path]) -> str:
    """The experiment if none is named: `finetune` for one's own images or weights, else the digits."""
    own = any(_OWN.match(override.lstrip("+")) for override in long_names(overrides, folders))
    return "finetune" if own else "vit_digits"


def as_hydra_overrides(overrides: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Turn `key=value` into `++key=value`, so that pydantic, not the YAML files, decides which keys exist: by default
    Hydra refuses every key that is not in the chosen files, and accepts any name after a `+`."""
    names = groups(folders)
    written_out = (part for override in long_names(overrides, folders) for part in _written_out(override, folders))
    return [_as_hydra_override(override, names, folders) for override in written_out]


# What YAML reads as something other than a name.
_VALUES = ("null", "true", "false", "nan", "inf")


def _written_out(override: str, folders: Sequence[Path]) -> list[str]:
    """What a short override stands for (`model=NAME`: timm's model), else the override itself; the name of a class
    without a file (`optim=NAME`) becomes an option."""
    key, _, name = override.partition("=")
    named = options(key, folders)
    is_name = name.replace("_", "").replace(".", "").isalnum() and name.lower() not in _VALUES
    if key not in FAMILIES or not named or name in named or not is_name:
        return [override]
    if key == "model":
        # Takes a second to import; a mistyped name of ours may take it, too.
        import timm

        if timm.is_model(name):
            return ["model=timm", f"model.name={name}"]
    is_of_classes = set(named) <= FAMILIES[key].choices().keys()
    if not name.isidentifier() or (not is_of_classes and did_you_mean(name, named)):
        # There are more options than classes (`model=vit_s16`), and one of them was meant.
        return [override]
    # Like one with a file, it takes the place of another choice, and another choice its place.
    ConfigStore.instance().store(name, {FAMILIES[key].tag: name}, group=key)
    return [override]


def _as_hydra_override(override: str, groups: set[str], folders: Sequence[Path]) -> str:
    name, separator, value = override.lstrip("+").partition("=")
    if not name or not (separator or override.startswith("~")):
        raise UserError(messages.unreadable(override, folders))
    if name.partition("@")[0] in groups and not value.startswith("{"):
        # A number or a truth value is no name of a file, and Hydra would not say of which group.
        is_name = re.match(r"[A-Za-z_]", value) and value.lower() not in _VALUES
        return override if is_name or not separator else override.removesuffix(value) + quoted(value)
    if override.startswith(("+", "~", "hydra.", "hydra/")):
        return override
    return f"++{readable(override)}"


def readable(override: str) -> str:
    """`data.root=/photos (2024)` -> `data.root="/photos (2024)"`: what Hydra's grammar cannot read is one text."""
    key, _, value = override.partition("=")
    for written in (override, f"{key}={quoted(value)}"):
        try:
            OverridesParser.create().parse_overrides([written])
        except OverrideParseException:
            continue
        return written
    return override


def _unread(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Beginnings of keys that nothing reads, each with the key whose value is the reason."""
    name, optim = config.precision.name, config.optim
    # `auto` may become a level that scales, on an older GPU.
    if name != "auto" and not LEVELS[name].scaled:
        yield "precision.loss_scale", "precision.name"
    if not LEVELS[name].float8:
        yield "precision.fp8_", "precision.name"
    if optim.ema_decay is None:
        yield "optim.ema_", "optim.ema_decay"
    if optim.layer_decay is None:
        yield "optim.layer_decay", "optim.layer_decay"


def notes(config: RunConfig, composed: Composed) -> Iterator[str]:
    """Yield a line for each typed key that nothing reads, and for what an experiment keeps of a group chosen anew.

    No errors: one run of a sweep, or one variant of a ladder, may switch off what the others use. A learning rate meant
    for a different optimizer may train nothing, and `augment=none` would still mix images, without an error.
    """
    for override in composed.overrides:
        key, typed = key_of(override), override.lstrip("+")
        for prefix, on in _unread(config):
            if key.startswith(prefix) and key != on and "=" in typed:
                yield f"{typed} has no effect with {on}={as_typed(functools.reduce(getattr, on.split('.'), config))}"
    names = [] if composed.saved is not None else composed.experiments(composed.config_name)
    files = {shown_path(file) for file in map(composed.file, names) if file is not None}
    for group in ("optim", "augment"):
        chosen = [override for override in composed.overrides if override.startswith(f"{group}=")]
        read = getattr(config, group).model_fields_set if chosen else ()
        kept = [
            key for key in composed.values.get(group, ()) if key in read and composed.where(f"{group}.{key}") in files
        ]
        if kept:
            yield (
                f"{chosen[-1]}: {', '.join(kept)}: the experiment's own, which win; change them with {group}.KEY=VALUE"
            )


def _has_key(file: Path, key: str) -> bool:
    node = yaml.safe_load(file.read_text(encoding="utf-8"))
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return False
        node = node[part]
    return True
