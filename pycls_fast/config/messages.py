"""Rewording pydantic's errors as one line per bad value: the key, what is wrong, what to do, where it was set."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from pycls_fast.config.suggestions import USUAL_KEYS, did_you_mean, known_keys, nearest, section_keys

Where = Callable[[str], str]


def lines(error: ValidationError, schema: type[BaseModel], where: Where, also: Iterable[str] = ()) -> list[str]:
    """One line per bad value, in the order of the schema. `also`: further keys that exist at the top level."""
    found = [_line(one, schema, where, tuple(also)) for one in error.errors(include_url=False)]
    # A list that is two items short gives the same line twice.
    return list(dict.fromkeys(found))


def _line(found: Mapping[str, Any], schema: type[BaseModel], where: Where, also: tuple[str, ...]) -> str:
    location, kind, value, context = found["loc"], found["type"], found["input"], found.get("ctx", {})
    if kind in ("missing", "too_long") and isinstance(value, list):
        location = tuple(part for part in location if isinstance(part, str))
        kind = "wrong_length"
    key, section = _key(location, schema)
    origin = where(key)
    if kind == "extra_forbidden":
        return f"{key}: {_unknown(key, section, schema, also, origin)} ({origin})"
    if kind == "missing":
        several = len(section_keys(schema).get(key, ())) > 1
        way_out = f"choose one of configs/{key}/ with {key}=NAME" if several else f"set it with {key}=VALUE"
        return f"{key}: missing; {way_out} ({origin})"
    if kind == "union_tag_not_found":
        tag = context["discriminator"].strip("'")
        return f"{key}.{tag}: missing; choose one of configs/{key}/ with {key}=NAME ({origin})"
    if kind == "union_tag_invalid":
        tag = context["discriminator"].strip("'")
        allowed = [word.strip(" '") for word in context["expected_tags"].split(",")]
        near_tag = did_you_mean(str(context["tag"]), allowed)
        origin = where(f"{key}.{tag}")
        return f"{key}.{tag}: must be one of {', '.join(allowed)}; got {context['tag']}{near_tag} ({origin})"
    if kind == "literal_error":
        allowed = _literals(context["expected"])
        # A number is not a misspelling of a different number.
        near_value = _hint(kind, key, value) or (did_you_mean(value, allowed) if isinstance(value, str) else "")
        return f"{key}: must be one of {', '.join(allowed)}; got {_shown(value)}{near_value} ({origin})"
    return f"{key}: {_wrong(kind, key, section, found)}; got {_shown(value)}{_hint(kind, key, value)} ({origin})"


def _unknown(
    key: str, section: type[BaseModel] | None, schema: type[BaseModel], also: tuple[str, ...], origin: str
) -> str:
    """The message for an unknown key, with the nearest one that exists."""
    parent, _, name = key.rpartition(".")
    kinds = section_keys(schema).get(parent, ())
    others = [_tag(kind) for kind in kinds if name in kind.model_fields]
    if section is not None and others:
        remedy = "" if "command line" in origin else f"; leave it out with ~{key}"
        # As in `optim.name=adamw or lion`.
        *first, last = (others[0], *(tag.partition("=")[2] for tag in others[1:]))
        owners = f"{', '.join(first)} or {last}" if first else last
        return f"unknown key for {parent}.{_tag(section)}; it belongs to {parent}.{owners}{remedy}"
    known = known_keys(schema)
    if key.replace("/", ".") in known:
        return f"unknown key; did you mean {key.replace('/', '.')}?"
    if USUAL_KEYS.get(name) in known:
        return f"unknown key; did you mean {USUAL_KEYS[name]}?"
    siblings = [*(section.model_fields if section is not None else ()), *(() if parent else also)]
    near = nearest(name, siblings)
    if near is not None:
        return f"unknown key; did you mean {f'{parent}.' if parent else ''}{near}?"
    # The key may exist under another group.
    elsewhere = [k for k in sorted(known) if k.rpartition(".")[2] == name and k != key]
    if elsewhere:
        return f"unknown key; did you mean {elsewhere[0]}?"
    return f"unknown key; {parent or 'the run'} has {', '.join(siblings)}"


_WORDING = {
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a whole number that is not so large",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "tuple_type": "must be a list",
    "model_type": "must be a group of keys",
    "model_attributes_type": "must be a group of keys",
    "dict_type": "must be a group of keys",
    "greater_than": "must be greater than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le:g}",
    "finite_number": "must be a finite number",
}


# Kinds of errors for which a text that reads like a number or a boolean was quoted by mistake, not misspelt.
_FROM_TEXT = ("int_type", "float_type", "bool_type", "literal_error", "or_auto", "loss_scale")
_NUMBER_OR_BOOL = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|true|false", re.IGNORECASE)


def _wrong(kind: str, key: str, section: type[BaseModel] | None, found: Mapping[str, Any]) -> str:
    if kind == "wrong_length":
        field = section.model_fields[key.rpartition(".")[2]] if section is not None else None
        count = len(typing.get_args(field.annotation)) if field is not None else "fewer"
        return f"must be a list of {count} values"
    if kind in _WORDING:
        return _WORDING[kind].format(**found.get("ctx", {}))
    message = str(found["msg"]).removeprefix("Value error, ").replace("Input should", "must").replace("Object", "value")
    return f"{message[0].lower()}{message[1:]}"


def _hint(kind: str, key: str, value: Any) -> str:
    if kind == "string_type" and isinstance(value, int | float):
        return f"; quotes within quotes make it text: '{key}=\"{value}\"'"
    if kind in _FROM_TEXT and "[" not in key and isinstance(value, str) and _NUMBER_OR_BOOL.fullmatch(value):
        return (
            f"; that is text: leave quotes out; for a variable of the shell '{key}=\"${{oc.decode:${{oc.env:NAME}}}}\"'"
        )
    if kind == "less_than_equal" and key.startswith(("data.mean[", "data.std[")):
        return f"; pixels are on the scale 0 to 1: divided by 255 it is {value / 255:.3g}"
    return ""


def _literals(expected: str) -> list[str]:
    """`'a', 'b' or 'c'` -> a, b, c."""
    return [word.strip(" '") for word in expected.replace(" or ", ",").split(",")]


def _shown(value: Any) -> str:
    # Not JSON's Infinity and NaN, but as written in YAML and on the command line.
    text = str(value) if isinstance(value, float) else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _key(location: tuple[int | str, ...], schema: type[BaseModel]) -> tuple[str, type[BaseModel] | None]:
    """The dotted key of a pydantic location, and the section that its last part belongs to.

    pydantic puts the tag of a tagged union into the location (`optim.adamw.lr`), which the user did not write.
    """
    parts: list[str] = []
    section: type[BaseModel] | None = schema
    rest = list(location)
    while rest:
        part = rest.pop(0)
        if isinstance(part, int):
            parts[-1] += f"[{part}]"
            continue
        parts.append(part)
        sections = section_keys(section).get(part, ()) if section is not None else ()
        if rest and len(sections) > 1:
            tag = rest.pop(0)
            section = next((s for s in sections if tag in _tags(s)), None)
        elif rest:
            section = sections[0] if sections else section
    return ".".join(parts), section


def _tags(section: type[BaseModel]) -> tuple[Any, ...]:
    for name in ("kind", "name"):
        if name in section.model_fields:
            return typing.get_args(section.model_fields[name].annotation)
    return ()


def _tag(section: type[BaseModel]) -> str:
    """The tag of a union's member, such as `name=sgd`."""
    name = next(name for name in ("kind", "name") if name in section.model_fields)
    return f"{name}={_tags(section)[0]}"
