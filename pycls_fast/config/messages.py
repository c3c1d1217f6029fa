"""Errors of Hydra, YAML and pydantic as one line each: the key, what is wrong, the way out, where it was set."""

from __future__ import annotations

import difflib
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from pycls_fast.choice import FAMILIES, Choice
from pycls_fast.config.keys import shown_path
from pycls_fast.config.presets import options
from pycls_fast.errors import UserError

# Raised by composing when a file or an override is wrong.
COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError)

Where = Callable[[str], str]

# Keys under the names of other projects, for which the nearest key by spelling would be wrong.
USUAL_KEYS = {
    "batch_size": "data.global_batch_size",
    "bs": "data.global_batch_size",
    "workers": "data.num_workers",
    "img_size": "data.image_size",
    "input_size": "data.image_size",
    "data_dir": "data.root",
    "data_path": "data.root",
    "learning_rate": "optim.lr",
    "wd": "optim.weight_decay",
    "auto_augment": "augment.policy",
    "trivial_augment": "augment.policy",
    "three_augment": "augment.policy",
    "clip_grad": "optim.clip_norm",
    "grad_clip": "optim.clip_norm",
    "num_epochs": "schedule.epochs",
    "max_epochs": "schedule.epochs",
    "amp": "precision",
    "pretrained": "weights",
    "checkpoint": "weights",
    "output_dir": "run_dir",
}
_USUAL_WORDS = {"gpu": "cuda", "ce": "cross_entropy", "float32": "fp32"}


def nearest(word: str, words: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The word that was probably meant: by its usual name, by its parts in a different order, or by spelling."""
    known = sorted(words)
    if _USUAL_WORDS.get(word) in known:
        return _USUAL_WORDS[word]
    reordered = next((other for other in known if _parts(other) == _parts(word)), None)
    near = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    return reordered or next(iter(near), None)


def _parts(word: str) -> list[str]:
    return sorted(re.split(r"[_-]", word.lower()))


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """`; did you mean X?` for the nearest of the words, or "" if none is near."""
    near = nearest(word, words)
    return f"; did you mean {near}?" if near is not None else ""


def section_keys(schema: type[BaseModel]) -> dict[str, tuple[type[BaseModel], ...]]:
    """Field name -> the section types that it may hold (none for a plain value, several for a tagged union)."""
    return {name: tuple(_sections(field.annotation)) for name, field in schema.model_fields.items()}


def _sections(annotation: Any) -> Iterable[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        family = next((family for family in FAMILIES.values() if family is annotation), None)
        yield from (annotation,) if family is None else family.choices().values()
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated, tuple):
        for part in typing.get_args(annotation):
            yield from _sections(part)


def known_keys(schema: type[BaseModel], prefix: str = "") -> set[str]:
    """Every dotted key that the schema accepts, including those of all members of a tagged union."""
    keys = set()
    for name, sections in section_keys(schema).items():
        keys.add(prefix + name)
        for section in sections:
            keys |= known_keys(section, f"{prefix}{name}.")
    return keys


def explain(error: Exception, folders: Sequence[Path]) -> UserError:
    """One line for an error of `COMPOSE_ERRORS`: Hydra's own words, and the nearest name that exists in `folders`."""
    if not str(error) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        missing = str(error.missing_cfg_file).removesuffix(".yaml")
        group, _, name = missing.rpartition("/")
        if str(error).startswith("Cannot find primary config"):
            return UserError(f"--config-name {missing or repr('')}: no such experiment{_near(name, '', folders)}")
        where = re.match(r"In '(.*?)'", str(error))
        if not group and where:
            return UserError(f"{name}: no such file in configs/{_near(name, '', folders)} (the defaults of {where[1]})")
        return UserError(f"{group}={name}: no such option{_near(name, group, folders)}")
    if isinstance(error, OverrideParseException):
        return unreadable(error.override.removeprefix("++"), folders)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return UserError(f"{shown_path(Path(mark.name))}: line {mark.line + 1} is not valid YAML: {error.problem}")
    if isinstance(error, UnicodeDecodeError):
        return UserError(f"a configuration file is not written in UTF-8 ({error}); save it as UTF-8")
    return UserError(_one_line(error))


def unreadable(override: str, folders: Sequence[Path]) -> UserError:
    """The error for an argument that is not a `key=value`."""
    if override in _available("", folders):
        return UserError(f"cannot read '{override}' on the command line; did you mean --config-name {override}?")
    return UserError(f"cannot read '{override}' on the command line; write key=value, quoting lists and spaces")


def _one_line(error: Exception) -> str:
    """An error's message on one line, without the `++` that we add to keys and OmegaConf's remarks about itself."""
    text = re.sub(r"(argument '|override )\+\+", r"\1", re.split(r"\n\s*full_key:", str(error))[0])
    inner = re.match(r"\w+ raised while resolving interpolation: (.*)", text, re.DOTALL)
    return " ".join((inner[1].strip("\"'") if inner else text).split()) or type(error).__name__


def interpolation_mistake(error: OmegaConfBaseException, where: Where) -> UserError:
    """One line for a value that refers to what is not there, or that a file leaves open (`???`)."""
    key, what = str(error.full_key or ""), _one_line(error)
    if "Missing mandatory value" in what:
        what = f"left open as ???; set it with {key}=VALUE"
    return UserError(f"{key}: {what} ({where(key)})" if key else what)


def _available(group: str, folders: Sequence[Path]) -> list[str]:
    # `base` is what experiments begin with.
    return [name for name in options(group, folders) if group or name != "base"]


def _near(name: str, group: str, folders: Sequence[Path]) -> str:
    available = _available(group, folders)
    near = nearest(Path(name).stem, available, cutoff=0.5)
    if near is not None:
        return f"; did you mean {near}?"
    return f"; there is {', '.join(available)}" if available else ""


def lines(error: ValidationError, schema: type[BaseModel], where: Where, also: Iterable[str] = ()) -> list[str]:
    """One line per bad value, in the order of the schema. `also`: further keys that exist at the top level."""
    found = [_line(one, schema, where, tuple(also)) for one in error.errors(include_url=False)]
    # A list that is two items short gives the same line twice.
    return list(dict.fromkeys(found))


def _line(found: Mapping[str, Any], schema: type[BaseModel], where: Where, also: tuple[str, ...]) -> str:
    location, kind, value, context = found["loc"], found["type"], found["input"], found.get("ctx", {})
    if kind == "json_invalid":
        return f"a value cannot be read ({context['error']}); paths must be valid UTF-8"
    short = kind in ("missing", "too_long") and isinstance(value, list)
    if short:
        location = tuple(part for part in location if isinstance(part, str))
    key, section = _key(location, schema)
    origin = where(key)
    if kind == "extra_forbidden":
        return f"{key}: {_unknown(key, section, schema, also, origin)} ({origin})"
    if kind == "missing" and not short:
        several = len(section_keys(schema).get(key, ())) > 1
        way_out = f"choose one with {key}=NAME, --help lists them" if several else f"set it with {key}=VALUE"
        return f"{key}: missing; {way_out} ({origin})"
    if kind == "union_tag_not_found":
        tag = context["discriminator"].strip("'")
        return f"{key}.{tag}: missing; choose one with {key}=NAME, --help lists them ({origin})"
    if kind == "union_tag_invalid":
        tag = context["discriminator"].strip("'")
        preset = nearest(str(context["tag"]), options(key, []), cutoff=0.7)
        if preset is not None:
            return f"{key}={context['tag']}: no such option; did you mean {preset}? ({where(f'{key}.{tag}')})"
        return f"{key}.{tag}: {_no_choice(context['tag'], context['expected_tags'])} ({where(f'{key}.{tag}')})"
    if kind == "literal_error":
        return f"{key}: {_no_choice(value, context['expected'])} ({origin})"
    wrong = _wrong(found)
    if short:
        field = section.model_fields[key.rpartition(".")[2]] if section is not None else None
        wrong = f"must be a list of {len(typing.get_args(field.annotation)) if field else 'fewer'} values"
    hint = ""
    if kind == "string_type" and isinstance(value, int | float):
        hint = f"; quotes within quotes make it text: '{key}=\"{value}\"'"
    return f"{key}: {wrong}; got {_shown(value)}{hint} ({origin})"


def _no_choice(value: Any, expected: str) -> str:
    """`must be one of ...`, from pydantic's `'a', 'b' or 'c'`."""
    allowed = [word.strip(" '") for word in expected.replace(" or ", ",").split(",")]
    # A number is not a misspelling of a different number.
    near = did_you_mean(value, allowed) if isinstance(value, str) else ""
    return f"must be one of {', '.join(allowed)}; got {_shown(value)}{near}"


# pydantic's words, and what they are to whoever writes YAML.
_WORDING = {
    "Input should be ": "must be ",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "true or false",
    "a valid string": "text",
    "a valid array": "a list",
    "an object": "a group of keys",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
}


def _wrong(found: Mapping[str, Any]) -> str:
    message = str(found["msg"]).removeprefix("Value error, ")
    if found["type"].startswith("int_from_float"):
        message = "must be a whole number"
    for theirs, ours in _WORDING.items():
        message = message.replace(theirs, ours)
    return f"{message[0].lower()}{message[1:]}"


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
    known, siblings = known_keys(schema), [*(section.model_fields if section is not None else ())]
    siblings += [] if parent else also
    near = nearest(name, siblings)
    # The key may have its name of another project, or exist under another group.
    elsewhere = [k for k in sorted(known) if k.rpartition(".")[2] == name and k != key]
    meant = [USUAL_KEYS.get(name), near and f"{parent}.{near}".lstrip("."), *elsewhere]
    found = next((each for each in meant if each in known or each in also), None)
    return (
        f"unknown key; did you mean {found}?"
        if found
        else f"unknown key; {parent or 'the run'} has " + ", ".join(siblings)
    )


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
    sections: tuple[type[BaseModel], ...] = ()
    rest = list(location)
    while rest:
        part = rest.pop(0)
        if isinstance(part, int):
            parts[-1] += f"[{part}]"
        else:
            parts.append(part)
            sections = section_keys(section).get(part, ()) if section is not None else ()
        if rest and isinstance(rest[0], int):
            continue
        if rest and (len(sections) > 1 or (sections and issubclass(sections[0], Choice))):
            tag = rest.pop(0)
            section = next((s for s in sections if tag in _tags(s)), None)
        elif rest:
            section = sections[0] if sections else section
    return ".".join(parts), section


def _tags(section: type[BaseModel]) -> tuple[Any, ...]:
    return typing.get_args(section.model_fields[section.tag].annotation) if issubclass(section, Choice) else ()


def _tag(section: type[BaseModel]) -> str:
    """The tag of a union's member, such as `name=sgd`."""
    assert issubclass(section, Choice)
    return f"{section.tag}={_tags(section)[0]}"
