"""Composing YAML groups and overrides with Hydra into a `RunConfig`. No DictConfig leaves this module."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import hydra
import yaml
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import ValidationError

from pycls_fast.choice import FAMILIES
from pycls_fast.config import messages
from pycls_fast.config.checks import Purpose, problems
from pycls_fast.config.explain import (
    COMPOSE_ERRORS,
    explain,
    unreadable,
    without_interpolation,
)
from pycls_fast.config.imports import import_modules_of
from pycls_fast.config.locations import CONFIGS, shown_path
from pycls_fast.config.model_names import OF_WEIGHTS, model_of_weights, timm_written_out
from pycls_fast.config.quoting import key_of, quote_value
from pycls_fast.config.schema import RunConfig, Section
from pycls_fast.errors import UserError

# Every rank would create Hydra's folders and log files; only rank 0 writes the run folder.
HYDRA_SETTINGS = (
    "hydra.run.dir=.",
    "hydra.output_subdir=null",
    "hydra/job_logging=disabled",
    "hydra/hydra_logging=disabled",
)

# The folder of the ledger's plans, which are not part of a configuration.
LADDERS = "ladder"

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

    @classmethod
    def from_hydra(cls, config: DictConfig, hydra_config: Any) -> Composed:
        """Resolve interpolations and convert to plain values.

        Raises:
            UserError: an interpolation cannot be resolved, or a value is left as `???`.
        """
        sources = [Path(s.path) for s in hydra_config.runtime.config_sources if s.schema == "file" and s.path]
        composed = cls(
            values={},
            config_name=str(hydra_config.job.config_name).removesuffix(".yaml"),
            overrides=typed_overrides(hydra_config),
            choices={str(k): str(v) for k, v in hydra_config.runtime.choices.items()},
            folders=tuple(sources),
        )
        values = composed.resolve(config)
        if composed.choices.get("model") == OF_WEIGHTS:
            values["model"] = model_of_weights(values, composed)
        return dataclasses.replace(composed, values=values)

    def resolve(self, config: Any) -> dict[str, Any]:
        """Plain values of an OmegaConf configuration, without Hydra's own.

        Raises:
            UserError: an interpolation cannot be resolved, or a value is left as `???`.
        """
        try:
            own = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
            values = OmegaConf.to_container(own, resolve=True, throw_on_missing=True)
        except MissingMandatoryValue as error:
            key = str(error.full_key)
            raise UserError(f"{key}: left open as ???; set it with {key}=VALUE ({self.where(key)})") from error
        except OmegaConfBaseException as error:
            key = str(error.full_key)
            what = without_interpolation(error)
            raise UserError(f"{key}: {what} ({self.where(key)})" if key else what) from error
        assert isinstance(values, dict)
        return {str(key): value for key, value in values.items()}

    def where(self, key: str) -> str:
        """What set the key, "the command line" or a YAML file; else where it can be set."""
        key = re.sub(r"\[\d+\]", "", key)
        for override in reversed(self.overrides):
            name, value = key_of(override), override.partition("=")[2]
            if name in self.choices and not value.startswith("{"):
                continue  # This override chose a file, which holds the value.
            if name == key or key.startswith(f"{name}.") or name.startswith(f"{key}."):
                return "deleted on the command line" if override.startswith("~") else "the command line"
        group, _, rest = key.partition(".")
        chosen = f"{group}/{self.choices[group]}" if group in self.choices else None
        if self.saved is not None and chosen is None:
            return str(self.saved)
        names = [] if self.saved is not None else [(name, key) for name in self.experiments(self.config_name)]
        if chosen is not None:
            names += [
                (f"{name}/{choice}", key) for name, choice in self.choices.items() if self._is_global(name, choice)
            ]
            names.append((chosen, rest))
        for name, key_there in names:
            file = self.file(name)
            if file is not None and _has_key(file, key_there):
                return shown_path(file)
        file = self.file(names[-1][0])
        return f"{shown_path(file)} or the command line" if file is not None else "the command line"

    def file(self, name: str) -> Path | None:
        """The YAML file of an experiment or of a `group/choice`; None if there is none."""
        files = (folder / f"{name}.yaml" for folder in self.folders)
        return next((file for file in files if file.is_file()), None)

    def _is_global(self, group: str, choice: str) -> bool:
        file = self.file(f"{group}/{choice}")
        return file is not None and is_global(file)

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


def check(composed: Composed, purpose: Purpose, *, also: Iterable[str] = ()) -> RunConfig:
    """Validate strictly, then check combinations of keys.

    Args:
        composed: from Hydra or a run.
        purpose: what it is used for.
        also: keys that exist besides those of a run, as suggestions for a misspelt one.

    Raises:
        UserError: one line per bad value, all at once.
    """
    if any(key_of(override) == "config_name" for override in composed.overrides):
        raise UserError(
            "config_name: the name of the experiment's file; choose it with --config-name (the command line)"
        )
    import_modules_of(composed.values)
    config = validate(RunConfig, {**composed.values, "config_name": composed.config_name}, composed, also)
    found = [f"{key}: {message} ({composed.where(key)})" for key, message in problems(config, purpose)]
    if found:
        raise UserError(*found)
    return config


def validate(schema: type[Options], values: Mapping[str, Any], composed: Composed, also: Iterable[str] = ()) -> Options:
    """Validate plain values as a section. They are validated as JSON text, so that a YAML list becomes a tuple.

    Raises:
        UserError: one line per bad value.
    """
    broken = [
        f"{key}: {text} is not valid UTF-8; rename it, or link to it and give the link ({composed.where(key)})"
        for key, text in _no_utf_8(values)
    ]
    if broken:
        raise UserError(*broken)
    try:
        return schema.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise UserError(*messages.lines(error, schema, composed.where, also)) from error
    except (TypeError, ValueError) as error:
        raise UserError(f"{composed.config_name}: a value is not plain data ({error})") from error


def _no_utf_8(values: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(key, text) of every value that is not valid UTF-8: paths need not be, JSON and YAML must be."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from _no_utf_8(value, f"{key}.{name}" if key else str(name))
    elif isinstance(values, list):
        for place, value in enumerate(values):
            yield from _no_utf_8(value, f"{key}[{place}]")
    elif isinstance(values, str) and values.encode(errors="ignore").decode() != values:
        yield key, values


def load_config(
    config_name: str = "vit_digits", overrides: Sequence[str] = (), *, folder: Path | None = None
) -> RunConfig:
    """Compose and check an experiment as the command line does; `data.eval_set`, which only scoring reads, is accepted.

    Args:
        config_name: a file of `configs/`, without `.yaml`.
        overrides: as on the command line, e.g. `["optim.lr=1e-3", "model=vit_s16"]`.
        folder: the folder of configurations, if not `configs/`.

    Raises:
        UserError: one line per mistake.
    """
    return check(compose(config_name, overrides, [folder or CONFIGS]), Purpose(scores_sets=True))


def compose(config_name: str, overrides: Sequence[str], folders: Sequence[Path]) -> Composed:
    """Compose an experiment from the files of some folders; see `load_config`.

    Args:
        folders: where files are looked for; those of the first folder win.

    Raises:
        UserError: no such folder or file, or an override that cannot be parsed.
    """
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder of configurations")
    with hydra.initialize_config_dir(str(folders[0].resolve()), version_base="1.3"):
        for folder in folders[1:]:
            _search_also(folder)
        try:
            config = hydra.compose(
                config_name, [*HYDRA_SETTINGS, *as_hydra_overrides(overrides, folders)], return_hydra_config=True
            )
        except COMPOSE_ERRORS as error:
            raise explain(error, folders) from error
        return Composed.from_hydra(config, config.hydra)


def _search_also(folder: Path) -> None:
    """Add a folder to Hydra's search path, as `--config-dir` does.

    The setting `hydra.searchpath` would not do: Hydra looks for the experiment before it reads the setting.
    """
    loader: Any = GlobalHydra.instance().config_loader()
    path = loader.get_search_path()
    path.prepend("command-line", f"file://{folder.resolve()}", SearchPathQuery(provider="schema"))
    loader.repository.initialize_sources(path)


def is_global(file: Path) -> bool:
    """Whether a group's file sets keys of the whole configuration (Hydra's `@package _global_`)."""
    with file.open(encoding="utf-8") as lines:
        return next(lines, "").replace(" ", "").startswith("#@package_global_")


def groups(folders: Sequence[Path]) -> set[str]:
    """The names of groups, which choose a file (`model=vit_b16`) rather than set a value."""
    return {file.parent.name for folder in folders for file in folder.glob("*/*.yaml")} - {LADDERS}


def as_hydra_overrides(overrides: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Turn `key=value` into `++key=value`, so that pydantic, not the YAML files, decides which keys exist.

    By default Hydra refuses every key that is not in the chosen files, and accepts any name after a `+`.

    Raises:
        UserError: a group is set to something other than a name.
    """
    names = groups(folders)
    written_out = [part for override in overrides for part in timm_written_out(override, folders)]
    written_out = [part for override in written_out for part in _class_written_out(override, folders)]
    return [_as_hydra_override(override, names, folders) for override in written_out]


# What YAML reads as something other than a name.
_VALUES = ("null", "true", "false", "nan", "inf")


def _class_written_out(override: str, folders: Sequence[Path]) -> list[str]:
    """`optim=NAME` without such a file as the class of this name with its defaults; else the override."""
    key, _, name = override.partition("=")
    is_name = name.isidentifier() and name.lower() not in _VALUES
    if key not in FAMILIES or not is_name or any((folder / key / f"{name}.yaml").is_file() for folder in folders):
        return [override]
    return [f"~{key}", f"{key}={{{FAMILIES[key].tag}: {name}}}"]


def _as_hydra_override(override: str, groups: set[str], folders: Sequence[Path]) -> str:
    name, separator, value = override.lstrip("+").partition("=")
    if not name:
        raise unreadable(override, folders)
    if name == LADDERS and separator and not value.startswith("{"):
        # Hydra treats every folder as a group and would compose the file; it leaves a mapping alone.
        return f"++{LADDERS}={{name: {value}}}"
    if name in groups and value.startswith("{") and not override.startswith("+"):
        # Sets keys of a group, does not choose its file.
        return f"++{override}"
    if name not in groups or not separator or value.startswith("{"):
        kept = override.startswith(("+", "~", "hydra.", "hydra/")) or name.partition("@")[0] in groups
        return override if kept else f"++{quote_value(override)}"
    # Hydra would merge a list of files, and does not name the key of a number or a truth value.
    if not re.match(r"[A-Za-z_]", value) or value.lower() in _VALUES:
        raise UserError(f"{override}: a group takes the name of a file in configs/{name}/")
    if override.startswith("++"):
        raise UserError(f"{override}: write {name}={value}; a ++ is for values")
    return override


def _has_key(file: Path, key: str) -> bool:
    node = yaml.safe_load(file.read_text(encoding="utf-8"))
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return False
        node = node[part]
    return True
