"""The `--help` page: what a tool does, the available experiments, and what can be set."""

from __future__ import annotations

import inspect
import shutil
import typing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pycls_fast.config.help_keys import filled, help_of_key
from pycls_fast.config.quoting import as_typed
from pycls_fast.config.schema import Section
from pycls_fast.errors import UserError


def help_text(
    description: str,
    options: type[Section],
    folders: Sequence[Path],
    words: Sequence[str] = (),
    width: int | None = None,
) -> str:
    """The `--help` page, or of `--help WORD ...` what the words mean.

    Args:
        description: the tool's docstring.
        options: the tool's own keys.
        folders: the folders of configurations.
        words: keys, groups and experiments to describe instead.
        width: in characters; None for that of the terminal, up to 120.

    Raises:
        UserError: one line per word that is nothing of these.
    """
    width = min(shutil.get_terminal_size((120, 24)).columns, 120) if width is None else width
    if words:
        return _of_words(words, options, folders, width)
    return "\n".join(_lines(description, options, folders, width))


def _of_words(words: Sequence[str], options: type[Section], folders: Sequence[Path], width: int) -> str:
    texts: list[str] = []
    mistakes: list[str] = []
    experiments = _experiments(folders)
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


def _experiments(folders: Sequence[Path]) -> dict[str, Path]:
    return {file.stem: file for folder in folders for file in sorted(folder.glob("*.yaml"))}


def _header(file: Path) -> str:
    """The comment at the beginning of an experiment's file."""
    lines = [f"{file}:"]
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" "))
    return "\n".join(lines)


def _lines(description: str, options: type[Section], folders: Sequence[Path], width: int) -> Iterator[str]:
    yield description.strip()
    yield "\nexperiments, --config-name NAME (--help NAME describes one):"
    yield _paragraph(_experiments(folders), width, "  ", "  ")
    yield "\ngroups, GROUP=NAME (--help GROUP or --help GROUP.KEY describes keys):"
    groups = sorted({entry for folder in folders if folder.is_dir() for entry in folder.iterdir() if entry.is_dir()})
    for group in groups:
        names = [file.stem for file in sorted(group.glob("*.yaml"))]
        if names:
            yield _paragraph(names, width, f"  {group.name:<10} ", " " * 13)
    yield "\nof every run: GROUP.KEY=VALUE run_dir=PATH seed=N resume=auto|never|PATH"
    yield "              weights=RUN|CHECKPOINT|FILE|timm:NAME|torchvision:NAME|hf:ORG/NAME[@REVISION]"
    yield "--cfg job prints what was composed; --multirun runs every combination of key=a,b; --config-dir adds a folder"
    if options.model_fields:
        yield f"\n{inspect.cleandoc(options.__doc__ or '').replace('`', '')}"
        for name, field in options.model_fields.items():
            choices = typing.get_args(field.annotation) if typing.get_origin(field.annotation) is typing.Literal else ()
            one_of = f"  (one of {', '.join(choices)})" if choices else ""
            yield filled(f"{name}={as_typed(field.default)}  {field.description or ''}{one_of}", width, "  ", " " * 6)


def _paragraph(names: Iterable[str], width: int, first: str, rest: str) -> str:
    return filled(", ".join(names), width, first, rest)
