"""From what pydantic found to one line per bad value: the key, what is wrong, where it was set, the way out."""

from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

Where = Callable[[str], str]


def section_keys(schema: type[BaseModel]) -> dict[str, tuple[type[BaseModel], ...]]:
    """Field name -> the section types it may hold (none for a plain value, several for a union by kind)."""
    return {name: tuple(_sections(field.annotation)) for name, field in schema.model_fields.items()}


def _sections(annotation: Any) -> Iterable[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        for part in typing.get_args(annotation):
            yield from _sections(part)


def known_keys(schema: type[BaseModel], prefix: str = "") -> set[str]:
    """Every dotted key that the schema accepts, those of all kinds of a union included."""
    keys = set()
    for name, sections in section_keys(schema).items():
        keys.add(prefix + name)
        for section in sections:
            keys |= known_keys(section, f"{prefix}{name}.")
    return keys


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """`; did you mean X?` for the nearest of the words, or nothing when none is near."""
    near = difflib.get_close_matches(word, sorted(words), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def lines(error: ValidationError, schema: type[BaseModel], where: Where) -> list[str]:
    """One line per bad value, in the order of the schema."""
    return [_line(found, schema, where) for found in error.errors(include_url=False)]


def _line(found: Mapping[str, Any], schema: type[BaseModel], where: Where) -> str:
    key, section = _key(found["loc"], schema)
    kind, value, context = found["type"], found["input"], found.get("ctx", {})
    origin = where(key)
    if kind == "extra_forbidden":
        parent, _, name = key.rpartition(".")
        siblings = section.model_fields if section is not None else ()
        near = difflib.get_close_matches(name, list(siblings), n=1, cutoff=0.6)
        if near:
            return f"{key}: unknown key; did you mean {f'{parent}.' if parent else ''}{near[0]}? ({origin})"
        # The key may exist under another group, or belong to another kind of the same group.
        elsewhere = [k for k in sorted(known_keys(schema)) if k.rpartition(".")[2] == name and k != key]
        hint = f"; did you mean {elsewhere[0]}?" if elsewhere else f"; {parent or 'the run'} has {', '.join(siblings)}"
        return f"{key}: unknown key{hint} ({origin})"
    if kind == "missing":
        return f"{key}: missing; set it in a file of configs/ or on the command line ({origin})"
    if kind == "union_tag_not_found":
        tag = context["discriminator"].strip("'")
        return f"{key}.{tag}: missing; choose a {key} with {key}=NAME from configs/{key}/ ({origin})"
    if kind == "union_tag_invalid":
        tag = context["discriminator"].strip("'")
        allowed = [word.strip(" '") for word in context["expected_tags"].split(",")]
        near_tag = did_you_mean(str(context["tag"]), allowed)
        return f"{key}.{tag}: must be one of {', '.join(allowed)}; got {context['tag']}{near_tag} ({where(f'{key}.{tag}')})"
    if kind == "literal_error":
        near_value = did_you_mean(str(value), _literals(context["expected"]))
        return f"{key}: must be one of {', '.join(_literals(context['expected']))}; got {_shown(value)}{near_value} ({origin})"
    message = found["msg"].replace("Input should", "must").replace("Object", "value")
    return f"{key}: {message[0].lower()}{message[1:]}; got {_shown(value)} ({origin})"


def _literals(expected: str) -> list[str]:
    """`'a', 'b' or 'c'` -> a, b, c."""
    return [word.strip(" '") for word in expected.replace(" or ", ",").split(",")]


def _shown(value: Any) -> str:
    text = json.dumps(value) if not isinstance(value, BaseModel) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _key(location: tuple[int | str, ...], schema: type[BaseModel]) -> tuple[str, type[BaseModel] | None]:
    """The dotted key of a pydantic location, and the section that the last part belongs to.

    pydantic puts the tag of a union by kind into the location (`optim.adamw.lr`); the user never wrote it.
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
