"""How keys, values and files of a configuration are written: on the command line, in notes and in messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException

from pycls_fast.choice import Section


def _configs() -> Path:
    """The folder `configs/`: beside the package in a clone or its editable install, else inside the package."""
    # Hydra is given folders without symbolic links, and those of the user are told from this one.
    package = Path(__file__).resolve().parents[1]
    beside = package.parent / "configs"
    # In site-packages another package may have a folder of that name.
    return beside if (beside / "vit_digits.yaml").is_file() else package / "configs"


CONFIGS = _configs()

PATHS = (
    "run_dir",
    "weights",
    "data.root",
    "data.train",
    "data.val",
    "data.index_cache",
    "data.shard_cache",
    "data.eval_root",
    "data.wnids",
    "distill.teacher",
)
"""Keys whose values may be paths on a machine: the same files may lie elsewhere on another."""


def shown_path(file: Path) -> str:
    """A file of our `configs/` as `configs/...`, any other path unchanged."""
    try:
        return str(Path("configs") / file.resolve().relative_to(CONFIGS))
    except ValueError:
        return str(file)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by their dotted keys (`optim.lr`), in order."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def key_of(override: str) -> str:
    """`++data.root=/photos` -> `data.root`; `~weights` -> `weights`."""
    return override.lstrip("+~").partition("=")[0]


def typed_values(overrides: Iterable[str]) -> dict[str, Any]:
    """The values of overrides by key, without deletions; those in a dictionary (`data={root: x}`) by theirs, too."""
    found: dict[str, Any] = {}
    for override in overrides:
        key, separator, value = override.lstrip("+").partition("=")
        if separator and not key.startswith("~"):
            found[key] = value
        if value.startswith("{"):
            # What cannot be read is told when it is composed.
            with suppress(OverrideParseException):
                (parsed,) = OverridesParser.create().parse_overrides([override])
                found |= {} if parsed.is_sweep_override() else flat({key: parsed.value()})
    return found


def as_typed(value: Any) -> str:
    """Format a plain value, or a class's object, for the command line: `null`, `true`, `[0.1,1.0]`, `{name:value}`."""
    if isinstance(value, Section):
        value = value.model_dump(mode="json")
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_inside(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_inside, value)) + "]"
    return str(value)


# What Hydra reads as this text inside of brackets.
_PLAIN = re.compile(r"(?!(null|true|false|inf|nan)\Z)[a-z_/][a-z0-9_/.*-]*", re.IGNORECASE)


def _inside(value: Any) -> str:
    """The same inside of brackets, where a text that is no plain name or path needs quotes."""
    text = as_typed(value)
    return quoted(text) if isinstance(value, str | Path) and not _PLAIN.fullmatch(text) else text


def text_override(key: str, text: str) -> str:
    """An override with a text that is one value; Hydra would take one with commas for several."""
    return f"{key}={quoted(text) if ',' in text else text}"


def quoted(text: str) -> str:
    """A text in quotes, as Hydra's grammar reads it."""
    # To Hydra a backslash escapes only if a quote follows, so one at the end, before our quote, is doubled too.
    return '"' + re.sub(r'(\\*)("|\Z)', lambda found: 2 * found[1] + found[2].replace('"', '\\"'), text) + '"'
