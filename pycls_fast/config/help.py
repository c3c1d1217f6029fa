"""The `--help` page of a tool, `--help KEY`, with types, ranges, defaults and descriptions, and Tab completion."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.plugins import Plugins
from hydra.plugins.completion_plugin import CompletionPlugin
from pydantic.fields import FieldInfo

from pycls_fast.choice import FAMILIES, Choice, Section
from pycls_fast.config.compose import ALIASES
from pycls_fast.config.keys import CONFIGS, as_typed
from pycls_fast.config.messages import known_keys, meant, section_keys
from pycls_fast.config.run import LADDERS, PRESETS, RunConfig, groups, options
from pycls_fast.errors import DONE, UserError, did_you_mean, one_of
from pycls_fast.values import Wording, WordOr

Key = tuple[str, type[Section]]
"""A dotted key, and the section that has it."""


def help_text(own: type[Section], folders: Sequence[Path] = (), words: Sequence[str] = ()) -> str:
    """The `--help` page, or of `--help WORD ...` what the words mean.

    Args:
        own: the tool: its docstring and its own keys.
        folders: the folders of configurations; none for a tool that takes no configuration.
        words: keys, groups, their options and experiments to describe instead; a `UserError` for one that is none.
    """
    width = min(shutil.get_terminal_size((120, 24)).columns, 120)
    experiments = {file.stem: file for folder in folders for file in sorted(folder.glob("*.yaml"))}
    experiments.pop("base", None)  # What they begin with.
    if not words:
        return "\n".join(_page(own, folders, experiments, width))
    texts: list[str] = []
    found = {f"{file.parent.name}={file.stem}": file for folder in folders for file in folder.glob("*/*.yaml")}
    found |= {f"ladder={file.stem}": file for folder in folders for file in (folder / LADDERS).glob("*.yaml")}
    for word in words:
        if word in experiments:
            texts.append(_header(experiments[word]))
        elif word in found and not _is_class(word):
            texts.append(f"{found[word]}:\n{found[word].read_text(encoding='utf-8').rstrip()}")
        else:
            texts.append(help_of_key(word, own, width))
    if not set(words) <= experiments.keys():
        texts.append("key=default, which experiments and groups may change: --cfg job prints their values")
    return "\n\n".join(texts)


def _page(own: type[Section], folders: Sequence[Path], experiments: Iterable[str], width: int) -> Iterator[str]:
    yield inspect.getdoc(own) or ""
    if folders:
        yield "\nexperiments, --config-name NAME (--help NAME describes one):"
        yield _filled(", ".join(experiments), width, "  ", "  ")
        yield "\ngroups, GROUP=NAME (--help GROUP, GROUP=NAME or GROUP.KEY describes one):"
        there = {group: options(group, folders) for group in groups(folders)}
        if "ladder" in own.model_fields:
            there["ladder"] = options("ladder", folders)
        for group, names in sorted(there.items()):
            yield _filled(", ".join(names), width, f"  {group:<10} ", " " * 13)
        yield "\nof every run: GROUP.KEY=VALUE run_dir=PATH seed=N resume=auto|never|PATH"
        yield "              weights=RUN|CHECKPOINT|FILE|timm:NAME|torchvision:NAME|hf:ORG/NAME[@REVISION]"
        yield "--cfg job prints the configuration; --multirun all combinations of key=a,b; --config-dir adds a folder"
    if own.model_fields:
        yield "\nkeys of this tool:"
    for name, field in own.model_fields.items():
        choices = typing.get_args(field.annotation) if typing.get_origin(field.annotation) is typing.Literal else ()
        allowed = f"  (one of {', '.join(choices)})" if choices else ""
        default = "" if field.is_required() else as_typed(field.default)
        yield _filled(f"{name}={default}  {descriptions(own)[name]}{allowed}", width, "  ", " " * 6)


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


def _is_class(word: str) -> bool:
    """Whether `optim=sgd` is a class, whose keys say more than the file that sets some of them."""
    group, _, name = word.partition("=")
    return group in FAMILIES and name in FAMILIES[group].choices()


def _header(file: Path) -> str:
    """The comment at the beginning of an experiment's file."""
    lines = takewhile(lambda line: line.startswith("#"), file.read_text(encoding="utf-8").splitlines())
    return "\n".join([f"{file}:", *(line.removeprefix("#").removeprefix(" ") for line in lines)])


def help_of_key(word: str, own: type[Section], width: int) -> str:
    """Describe a key (`optim.lr`), the keys with this last part (`lr`), a group (`optim`), or one choice (`optim=sgd`);
    a `UserError` if there is none of these."""
    keys = [*_keys(own), *_keys(RunConfig)]
    word, _, choice = ALIASES.get(word, word).partition("=")
    if choice and word in FAMILIES:
        members = FAMILIES[word].choices()
        # The name of sizes stands for their family.
        choice = PRESETS.get(word, {}).get(choice, {}).get(FAMILIES[word].tag, choice)
        one_of(word, choice, members)
        keys = [(key, section) for key, section in keys if section is members[choice]]
    elif choice:
        one_of(word, choice, options(word, [CONFIGS]))
    named = [key for key in keys if key[0] == word] or [key for key in keys if key[0].rpartition(".")[2] == word]
    group = [key for key in keys if key[0].startswith(f"{word}.")]
    if not named and not group:
        names = {name for name, _ in keys}
        near = f"; did you mean {', '.join(found)}?" if (found := meant(word, names)) else did_you_mean(word, names)
        raise UserError(f"--help {word}: unknown key{near or '; --help without a key lists the groups'}")
    # A key that several kinds of a group (`optim=sgd`) share is described once.
    entries: dict[tuple[str, str], list[type[Section]]] = {}
    for name, section in [*named, *group]:
        entry = _line(name, section), descriptions(section)[name.rpartition(".")[2]]
        entries.setdefault(entry, []).append(section)
    lines: list[str] = []
    for (line, text), sections in entries.items():
        lines.append(line if choice else f"{line}{_only(sections)}")
        lines += [_filled(text, width, "  ", "  ")] if text else []
    return "\n\n".join([*(_filled(text, width) for text in _docs(group)), "\n".join(lines)])


def _filled(text: str, width: int, first: str = "", rest: str = "") -> str:
    """The text in lines of at most `width` characters, indented by `first` and `rest`; no word is broken."""
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def _keys(schema: type[Section], prefix: str = "") -> Iterator[Key]:
    """Every key, those of all kinds of a group included."""
    for name, sections in section_keys(schema).items():
        if not sections or types.NoneType in typing.get_args(schema.model_fields[name].annotation):
            yield prefix + name, schema
        for section in sections:
            yield from _keys(section, f"{prefix}{name}.")


def _docs(keys: Sequence[Key]) -> list[str]:
    """The docstrings of these keys' sections, by paragraph; a choice's begins with what chooses it."""
    bases = (base for _, section in keys for base in section.__mro__ if issubclass(base, Section))
    sections = [base for base in dict.fromkeys(bases) if base not in (Section, Choice)]
    docs = (f"{_chosen_by(section)}{inspect.cleandoc(section.__doc__ or '')}" for section in sections)
    paragraphs = [text for doc in docs for text in re.split(r"\n\n+", doc) if not text.startswith("Attributes:")]
    return [" ".join(text.replace("`", "").split()) for text in paragraphs]


def _chosen_by(section: type[Section]) -> str:
    return f"{section.key}={section.member}: " if issubclass(section, Choice) and section.member else ""


def _only(sections: Sequence[type[Section]]) -> str:
    """Which kinds of a group have a key, if not all have it."""
    kinds = [section for section in sections if issubclass(section, Choice)]
    some = kinds and len(kinds) < len(kinds[0].choices())
    return f"  (only {', '.join(kind.member for kind in kinds)})" if some else ""


def _line(name: str, section: type[Section]) -> str:
    """`optim.lr  number greater than 0`, or with its default as it is typed."""
    field = section.model_fields[name.rpartition(".")[2]]
    if issubclass(section, Choice) and name == f"{section.key}.{section.tag}":
        return f"{name}  one of {', '.join(section.choices())}"
    what = _type(field.annotation, field.metadata)
    return f"{name}  {what}" if field.is_required() else f"{name}={as_typed(field.default)}  {what}"


def _type(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """The type of a value in words, with its range."""
    for part in metadata:
        if isinstance(part, Wording | WordOr):
            return part.text
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        limits = (part.metadata if isinstance(part, FieldInfo) else [part] for part in parts[1:])
        return _type(parts[0], [*metadata, *(limit for several in limits for limit in several)])
    if origin is typing.Literal:
        return f"one of {', '.join(map(as_typed, parts))}"
    if origin in (typing.Union, types.UnionType):
        return ", or ".join(_type(part, () if part is types.NoneType else metadata) for part in parts)
    if origin is tuple and parts[-1] is Ellipsis:
        return f"list of: {_type(parts[0])}"
    if origin is tuple:
        return f"list of {len(parts)}: {', then '.join(dict.fromkeys(map(_type, parts)))}"
    return " ".join((_NAMES.get(annotation, "group of keys"), *filter(None, [_range(metadata)])))


_NAMES: dict[Any, str] = {
    int: "whole number",
    float: "number",
    bool: "true or false",
    str: "text",
    types.NoneType: "null",
}
_LIMITS = {"ge": "at least", "gt": "greater than", "le": "at most", "lt": "less than"}


def _range(metadata: Iterable[Any]) -> str:
    """`at least 0 and less than 1`; "" without limits."""
    found = [
        (words, getattr(limit, name)) for limit in metadata for name, words in _LIMITS.items() if hasattr(limit, name)
    ]
    return " and ".join(f"{words} {as_typed(value).removesuffix('.0')}" for words, value in found)


FLAGS = {"--cfg", "--config-dir", "--config-name", "--help", "--multirun"}


def shell_completion(
    arguments: Sequence[str], verbs: Iterable[str], find: Callable[[str], type[Section]], verb: str | None = None
) -> int:
    """Print the script of a shell (`install=bash`), which then asks what may be typed (`query=bash`)."""
    word = next(iter(arguments), "nothing")
    asked, _, shell = word.partition("=")
    if asked == "query":
        words = os.environ.get("COMP_LINE", "").split(" ")
        words = words[2 if words[0].rpartition("/")[2].startswith("python") else 1 :]
        print(*_completions([word for word in words[:-1] if word] + words[-1:], verbs, find, verb), sep="\n")
        return DONE
    plugins = Plugins.instance().discover(CompletionPlugin)
    shells = {plugin.provides(): plugin for plugin in plugins if issubclass(plugin, CompletionPlugin)}
    one_of("-sc", word, [f"{way}={name}" for way in ("install", "uninstall") for name in sorted(shells)])
    plugin = shells[shell](ConfigLoaderImpl(create_config_search_path(None)))
    (plugin.install if asked == "install" else plugin.uninstall)()
    return DONE


def _completions(
    words: Sequence[str], verbs: Iterable[str], find: Callable[[str], type[Section]], verb: str | None
) -> Iterator[str]:
    """What the last word may become: a verb, an experiment, `group=name`, a key with its values."""
    *before, word = words or [""]
    if verb is None and not before:
        yield from (each for each in verbs if each.startswith(word))
        return
    if before and before[-1] == "--config-name":
        found = {file.stem for file in CONFIGS.glob("*.yaml")}
    elif "=" in word:
        group = word.partition("=")[0]
        found = {f"{group}={name}" for name in options(group, [CONFIGS])}
    else:
        verb = verb or before[0]
        own = find(verb).model_fields if verb in verbs else ()
        keys = [f"{key}=" for key in {*ALIASES, *own, *groups([CONFIGS]), *known_keys(RunConfig)}]
        dots = word.count(".") + 1
        # `optim.` stands for all its keys until it is typed.
        found = {key if key.count(".") < dots else ".".join([*key.split(".")[:dots], ""]) for key in keys} | FLAGS
    yield from sorted(each for each in found if each.startswith(word))
