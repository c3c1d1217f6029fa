"""Quoting of overrides: adds the quotes that Hydra's grammar requires to keys and values as typed."""

from __future__ import annotations

import re
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException

_QUOTES = ("'", '"')


def quote_items(argument: str) -> str:
    """`key=[a=1 b=2,c=3]` -> `key=["a=1 b=2","c=3"]`: Hydra accepts an `=` within a value only in quotes."""
    key, separator, value = argument.partition("=")
    if not separator or not (value.startswith("[") and value.endswith("]")) or "=" not in value:
        return argument
    items = [item.strip() for item in _split(value[1:-1])]
    return f"{key}=[{','.join(item if item[:1] in _QUOTES else _quoted(item) for item in items)}]"


def quote_value(override: str) -> str:
    """`data.root=/photos (2024)` -> `data.root="/photos (2024)"`; unchanged if Hydra can parse it."""
    key, separator, value = override.partition("=")
    if not separator or value[:1] in ("[", "{", *_QUOTES) or _is_read(override):
        return override
    quoted = f"{key}={_quoted(value)}"
    return quoted if _is_read(quoted) else override


def text_override(key: str, text: str) -> str:
    """An override with a text that is one value; Hydra would take one with commas for several."""
    return f"{key}={_quoted(text) if ',' in text else text}"


def key_of(override: str) -> str:
    """`++data.root=/photos` -> `data.root`; `~weights` -> `weights`."""
    return override.lstrip("+~").partition("=")[0]


def as_typed(value: Any) -> str:
    """Format a plain value for the command line: `null`, `true`, `[0.1,1.0]`, `{name:value}`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{as_typed(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(as_typed, value)) + "]"
    return str(value)


def _is_read(override: str) -> bool:
    try:
        OverridesParser.create().parse_overrides([override])
    except OverrideParseException:
        return False
    return True


def _quoted(item: str) -> str:
    # To Hydra a backslash escapes only if a quote follows, so one at the end, before our quote, is doubled too.
    return '"' + re.sub(r'(\\*)("|\Z)', lambda found: 2 * found[1] + found[2].replace('"', '\\"'), item) + '"'


def _split(text: str) -> list[str]:
    """Split at commas outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in _QUOTES:
            quote = character
        elif character in "[{(":
            depth += 1
        elif character in "]})":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append("")
            continue
        parts[-1] += character
    return parts
