"""Rewording errors of Hydra, OmegaConf and YAML as one line each, with what to write instead."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from pycls_fast.config.locations import shown_path
from pycls_fast.config.suggestions import nearest
from pycls_fast.errors import UserError, first_line

# Raised by composing when a file or an override is wrong.
COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError)

# Patterns for the beginnings of Hydra's messages, and their replacements, which the patterns' groups fill.
_REWORDED = (
    (
        r"Could not append to config\. An item is already at '(.*)'",
        "{0}: is set already; write {0}=VALUE, without the +",
    ),
    (
        r"Multiple values for (\S+?)\. ",
        "{0}: chosen twice; write {0}=NAME without a +, or 'override {0}: NAME' in a file's defaults",
    ),
    (r"Could not delete from config\. '(.*)' does not exist", "~{0}: there is no {0} to delete"),
    (
        r"Could not delete from config\. The value of '(.*)' is (\S+) and not",
        "~{0}: write ~{0} alone; its value is {1}",
    ),
    (r"Could not delete\. No match for '(.*)' in the defaults list", "~{0}: no file of configs/{0}/ is chosen"),
    (
        r"Ambiguous value for argument '(?:\+\+)?(.*?)=(.*/.*)'",
        "{0}={1}: several values; write a path with commas as '{0}=\"{1}\"', or add --multirun for several runs",
    ),
    (
        r"Ambiguous value for argument '(?:\+\+)?(.*?)=(.*)'",
        "{0}={1}: several values; write a list as {0}=[{1}], or add --multirun to run one after another",
    ),
    (r"primary config '(.*)' must be a DictConfig", "{0}.yaml: holds a list; a configuration is made of key: value"),
    (r"Error merging override (?:\+\+)?(.*?)=(\{.*)", "{0}: must be a list; got {1}"),
    (r"Error merging override (?:\+\+)?(.*?)=(\[.*)", "{0}: must be a group of keys; got {1}"),
    (r"Could not override '(.*)'", "{0}: unknown key; Hydra has no such setting"),
)


def explain(error: Exception, folders: Sequence[Path]) -> UserError:
    """One line for an error of `COMPOSE_ERRORS`; `folders` are searched for similar names."""
    if not str(error) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    text = str(error)
    if isinstance(error, UnicodeDecodeError):
        return UserError(f"{_not_utf8(folders)}: not written in UTF-8; save it as UTF-8")
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        group, _, name = str(error.missing_cfg_file).removesuffix(".yaml").rpartition("/")
        if text.startswith("Cannot find primary config"):
            return no_such_experiment(str(error.missing_cfg_file), folders)
        named_in = re.match(r"In '(.*?)'", text)
        if not group and named_in:
            return UserError(
                f"{name}: no such file in configs/{_near(name, '', folders)} (the defaults of {named_in[1]})"
            )
        return no_such_file(group, name, folders)
    if isinstance(error, OverrideParseException):
        return unreadable(error.override.removeprefix("++"), folders)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return UserError(f"{shown_path(Path(mark.name))}: line {mark.line + 1} is not valid YAML: {error.problem}")
    for pattern, wording in _REWORDED:
        found = re.match(pattern, text)
        if found:
            return UserError(wording.format(*found.groups()))
    return UserError(without_interpolation(error))


def no_such_experiment(name: str, folders: Sequence[Path]) -> UserError:
    """The error for a `--config-name` that does not exist."""
    return UserError(f"--config-name {name or chr(34) * 2}: no such experiment{_near(Path(name).stem, '', folders)}")


def no_such_file(group: str, name: str, folders: Sequence[Path]) -> UserError:
    """The error for a `group=name` that does not exist."""
    return UserError(f"{group}={name}: no such file in configs/{group}{_near(name, group, folders)}")


def unreadable(override: str, folders: Sequence[Path]) -> UserError:
    """The error for an argument that is not a `key=value`."""
    if override in _available("", folders):
        return UserError(f"cannot read '{override}' on the command line; did you mean --config-name {override}?")
    return UserError(f"cannot read '{override}' on the command line; write key=value, quoting lists and spaces")


def without_interpolation(error: Exception) -> str:
    """The first line of an error's message, without OmegaConf's prefix about interpolations."""
    message = first_line(error).strip()
    inner = re.match(r"\w+ raised while resolving interpolation: (.*)", message)
    return inner[1].strip("\"'") if inner else message


def _available(group: str, folders: Sequence[Path]) -> list[str]:
    return sorted({file.stem for folder in folders for file in (folder / group).glob("*.yaml")})


def _not_utf8(folders: Sequence[Path]) -> str:
    for file in (file for folder in folders for file in sorted(folder.rglob("*.yaml"))):
        try:
            file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            return shown_path(file)
    return "a configuration file"


def _near(name: str, group: str, folders: Sequence[Path]) -> str:
    available = _available(group, folders)
    near = nearest(name, available, cutoff=0.5)
    if near is not None:
        return f"; did you mean {near}?"
    return f"; there is {', '.join(available)}" if available else ""
