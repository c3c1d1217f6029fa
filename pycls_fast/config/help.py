"""The `--help` page of a tool, and `--help KEY`: types, ranges, defaults and descriptions, read from the schema."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from pycls_fast.choice import FAMILIES, Choice
from pycls_fast.config.keys import as_typed
from pycls_fast.config.messages import USUAL_KEYS, did_you_mean, section_keys
from pycls_fast.config.presets import PRESETS
from pycls_fast.config.presets import options as options_of
from pycls_fast.config.run import RunConfig, Section
from pycls_fast.errors import UserError, one_of
from pycls_fast.values import Wording


def help_text(
    about: str,
    options: type[Section],
    folders: Sequence[Path] = (),
    words: Sequence[str] = (),
    width: int | None = None,
) -> str:
    """The `--help` page, or of `--help WORD ...` what the words mean.

    Args:
        about: what the tool does.
        options: the tool's own keys.
        folders: the folders of configurations; none for a tool that takes no configuration.
        words: keys, groups and experiments to describe instead.
        width: in characters; None for that of the terminal, up to 120.

    Raises:
        UserError: one line per word that is nothing of these.
    """
    width = min(shutil.get_terminal_size((120, 24)).columns, 120) if width is None else width
    experiments = {file.stem: file for folder in folders for file in sorted(folder.glob("*.yaml"))}
    experiments.pop("base", None)  # What they begin with.
    if not words:
        return "\n".join(_page(about, options, folders, experiments, width))
    texts: list[str] = []
    mistakes: list[str] = []
    for word in words:
        try:
            texts.append(_header(experiments[word]) if word in experiments else help_of_key(word, options, width))
        except UserError as error:
            mistakes += error.lines
    if mistakes:
        raise UserError(*mistakes)
    if not set(words) <= experiments.keys():
        texts.append("key=default, which experiments and groups may change: --cfg job prints their values")
    return "\n\n".join(texts)


def _page(
    about: str, options: type[Section], folders: Sequence[Path], experiments: Iterable[str], width: int
) -> Iterator[str]:
    yield inspect.cleandoc(about)
    if folders:
        yield "\nexperiments, --config-name NAME (--help NAME describes one):"
        yield filled(", ".join(experiments), width, "  ", "  ")
        yield "\ngroups, GROUP=NAME (--help GROUP or --help GROUP.KEY describes keys):"
        found = {*PRESETS, *(file.parent.name for folder in folders for file in folder.glob("*/*.yaml"))}
        for group in sorted(found):
            yield filled(", ".join(options_of(group, folders)), width, f"  {group:<10} ", " " * 13)
        yield "\nof every run: GROUP.KEY=VALUE run_dir=PATH seed=N resume=auto|never|PATH"
        yield "              weights=RUN|CHECKPOINT|FILE|timm:NAME|torchvision:NAME|hf:ORG/NAME[@REVISION]"
        yield "--cfg job prints the configuration; --multirun all combinations of key=a,b; --config-dir adds a folder"
    if options.model_fields:
        yield "\nkeys of this tool:"
    for name, field in options.model_fields.items():
        choices = typing.get_args(field.annotation) if typing.get_origin(field.annotation) is typing.Literal else ()
        one_of = f"  (one of {', '.join(choices)})" if choices else ""
        default = "" if field.is_required() else as_typed(field.default)
        yield filled(f"{name}={default}  {descriptions(options)[name]}{one_of}", width, "  ", " " * 6)


@functools.cache
def descriptions(section: type[Section]) -> dict[str, str]:
    """The string after each key, in one line, with those of the classes that it is derived from."""
    found = dict.fromkeys(section.model_fields, "")
    for cls in reversed([cls for cls in section.__mro__ if issubclass(cls, Section) and cls is not Section]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(tree, ast.ClassDef)
        for key, text in pairwise(tree.body):
            if isinstance(key, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[ast.unparse(key.target)] = " ".join(str(text.value.value).replace("`", "").split())
    return found


def _header(file: Path) -> str:
    """The comment at the beginning of an experiment's file."""
    lines = [f"{file}:"]
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" "))
    return "\n".join(lines)


@dataclass(frozen=True)
class _Key:
    """A key of a section. Kinds of a group (`optim=sgd`) may share it."""

    name: str
    field: FieldInfo
    section: type[Section]


def help_of_key(word: str, options: type[Section], width: int) -> str:
    """Describe a key (`optim.lr`), the keys with this last part (`lr`), a group (`optim`), or one choice (`optim=sgd`).

    Args:
        word: what was typed.
        options: the tool's own keys.
        width: of the terminal, in characters.

    Raises:
        UserError: there is no such key.
    """
    keys = [*_keys(options), *_keys(RunConfig)]
    word, _, choice = word.partition("=")
    if choice:
        members = FAMILIES[word].choices()
        one_of(word, choice, members)
        keys = [key for key in keys if key.name.startswith(f"{word}.") and key.section is members[choice]]
    named = [key for key in keys if key.name == word] or [key for key in keys if key.name.rpartition(".")[2] == word]
    group = [key for key in keys if key.name.startswith(f"{word}.")]
    if not named and not group:
        names = {key.name for key in keys}
        usual = f"; did you mean {USUAL_KEYS[word]}?" if USUAL_KEYS.get(word) in names else ""
        near = usual or did_you_mean(word, names) or "; --help without a key lists the groups"
        raise UserError(f"--help {word}: unknown key{near}")
    lines: dict[str, list[str]] = {}
    meanings: dict[str, dict[str, None]] = {}
    for key in [*named, *group]:
        lines.setdefault(_line(key), []).extend(_kind(key))
        meanings.setdefault(_line(key), {})[descriptions(key.section)[key.name.rpartition(".")[2]]] = None
    entries: list[str] = []
    for line, kinds in lines.items():
        entries.append(f"{line}{'' if choice else _restriction(line, kinds)}")
        entries += [filled(text, width, "  ", "  ") for text in meanings[line] if text]
    return "\n\n".join([*(filled(text, width) for text in _texts(group)), "\n".join(entries)])


def filled(text: str, width: int, first: str = "", rest: str = "") -> str:
    """The text in lines of at most so many characters, indented by `first` and `rest`; no word is broken."""
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def _keys(schema: type[Section], prefix: str = "") -> Iterator[_Key]:
    """Every key, those of all kinds of a group included."""
    sections = section_keys(schema)
    for name, field in schema.model_fields.items():
        if not sections[name] or types.NoneType in typing.get_args(field.annotation):
            yield _Key(prefix + name, field, schema)
        for section in sections[name]:
            yield from _keys(typing.cast(type[Section], section), f"{prefix}{name}.")


def _texts(keys: Sequence[_Key]) -> list[str]:
    """The docstrings of these keys' sections, by paragraph; a choice's begins with what chooses it."""
    bases = (base for key in keys for base in key.section.__mro__ if issubclass(base, Section))
    sections = [base for base in dict.fromkeys(bases) if base not in (Section, Choice)]
    named: dict[type[Section], str] = {
        member: f"{family}={name}: " for family, of in FAMILIES.items() for name, member in of.choices().items()
    }
    docs = (f"{named.get(section, '')}{inspect.cleandoc(section.__doc__ or '')}" for section in sections)
    texts = [text for doc in docs for text in re.split(r"\n\n+", doc)]
    return [" ".join(text.replace("`", "").split()) for text in texts]


def _tag(key: _Key) -> str | None:
    """The key that chooses between the kinds of the key's group (`optim.name`); None for a group of one kind."""
    return f"{key.section.key}.{key.section.tag}" if issubclass(key.section, Choice) else None


def _sections_of(name: str) -> tuple[type[Any], ...]:
    """The kinds of the group that a key belongs to."""
    family = next((family for key, family in FAMILIES.items() if name.startswith(f"{key}.")), None)
    return section_keys(RunConfig).get(name.partition(".")[0], ()) if family is None else (*family.choices().values(),)


def _kind(key: _Key) -> list[str]:
    """The kind of a group that the key belongs to, such as `sgd`, if there are several."""
    tag = _tag(key)
    return [] if tag is None else _choices(key.section, tag)


def _choices(section: type[Any], tag: str) -> list[str]:
    return list(typing.get_args(section.model_fields[tag.rpartition(".")[2]].annotation))


def _restriction(line: str, kinds: Sequence[str]) -> str:
    return f"  (only {', '.join(kinds)})" if 0 < len(kinds) < len(_sections_of(line)) else ""


def _line(key: _Key) -> str:
    """`optim.lr  number greater than 0`, or with its default as it is typed."""
    if key.name == _tag(key):
        kinds = [kind for section in _sections_of(key.name) for kind in _choices(section, key.name)]
        return f"{key.name}  one of {', '.join(kinds)}"
    what = _type(key.field.annotation, key.field.metadata)
    return f"{key.name}  {what}" if key.field.is_required() else f"{key.name}={as_typed(key.field.default)}  {what}"


def _type(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """The type of a value in words, with its range."""
    for part in metadata:
        if isinstance(part, Wording):
            return part.text
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(parts[0], [*metadata, *(limit for part in parts[1:] for limit in _limits_of(part))])
    if origin is typing.Literal:
        return f"one of {', '.join(map(as_typed, parts))}"
    if origin in (typing.Union, types.UnionType):
        return ", or ".join(_type(part, () if part is types.NoneType else metadata) for part in parts)
    if origin is tuple and parts[-1] is Ellipsis:
        return f"list of: {_type(parts[0])}"
    if origin is tuple:
        inner = dict.fromkeys(map(_type, parts))
        return f"list of {len(parts)}: {', then '.join(inner)}"
    return " ".join((_NAMES.get(annotation, "group of keys"), *filter(None, [_range(metadata)])))


_NAMES: dict[Any, str] = {
    int: "whole number",
    float: "number",
    bool: "true or false",
    str: "text",
    types.NoneType: "null",
}
_LIMITS = {"ge": "at least", "gt": "greater than", "le": "at most", "lt": "less than"}


def _limits_of(part: Any) -> Sequence[Any]:
    return part.metadata if isinstance(part, FieldInfo) else [part]


def _range(metadata: Iterable[Any]) -> str:
    """`at least 0 and less than 1`; "" without limits."""
    found = [
        (words, getattr(limit, name)) for limit in metadata for name, words in _LIMITS.items() if hasattr(limit, name)
    ]
    return " and ".join(f"{words} {as_typed(value).removesuffix('.0')}" for words, value in found)
