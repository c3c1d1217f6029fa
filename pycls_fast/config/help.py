"""The `--help` page: what a tool does, the available experiments, and what can be set."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path

from pycls_fast.config.quoting import as_typed
from pycls_fast.config.schema import Section


def help_text(description: str, options: type[Section], folders: Sequence[Path]) -> str:
    """The `--help` page.

    Args:
        description: the tool's docstring.
        options: the tool's own keys.
        folders: the folders of configurations.
    """
    return "\n".join(_lines(description, options, folders))


def _lines(description: str, options: type[Section], folders: Sequence[Path]) -> Iterator[str]:
    yield description.strip()
    if options.model_fields:
        yield f"\n{inspect.cleandoc(options.__doc__ or '').replace('`', '')}"
        for name, field in options.model_fields.items():
            choices = typing.get_args(field.annotation) if typing.get_origin(field.annotation) is typing.Literal else ()
            yield f"  {name}={as_typed(field.default)}" + (f"  one of {', '.join(choices)}" if choices else "")
    yield "\nexperiments, --config-name NAME:"
    experiments = {file.stem: file for folder in folders for file in sorted(folder.glob("*.yaml"))}
    for name, file in experiments.items():
        first = file.read_text(encoding="utf-8").partition("\n")[0]
        yield f"  {name:<15} {first.removeprefix('#').strip()}"
    yield "\ngroups, GROUP=NAME:"
    groups = sorted({entry for folder in folders if folder.is_dir() for entry in folder.iterdir() if entry.is_dir()})
    for group in groups:
        names = [file.stem for file in sorted(group.glob("*.yaml"))]
        if names:
            yield f"  {group.name:<15} {', '.join(names)}"
    yield "\nsingle values: GROUP.KEY=VALUE; keys, types and ranges are in pycls_fast/config/schema.py"
    yield "of every run: run_dir=PATH seed=N resume=auto|never|PATH"
    yield "              weights=RUN|CHECKPOINT|FILE|timm:NAME|torchvision:NAME|hf:ORG/NAME[@REVISION]"
    yield "--cfg job prints what was composed; --multirun runs every combination of key=a,b; --config-dir adds a folder"
