"""The user's own modules (`imports`), which register choices, and models with timm, before a configuration is read."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pycls_fast.errors import UserError, first_line


def import_modules(names: Iterable[str]) -> None:
    """Import modules by their names; the current folder is searched, too: first, unless PYTHONPATH has it.

    Raises:
        UserError: there is no such module, it fails, or its name is relative.
    """
    here = str(Path.cwd())
    for name in names:
        # torchrun and the tools put only the script's folder on the path. Workers that are not forked inherit the path.
        if here not in sys.path:
            sys.path.insert(0, here)
        if name.startswith("."):
            raise UserError(
                f"imports: {name} is relative, but to no package; write the whole name, without leading dots"
            )
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            raise UserError(f"imports: {_reason(name, error)}") from error


def import_modules_of(values: Mapping[str, Any]) -> None:
    """Import what a configuration's plain values name, before they are validated with what the modules register.

    Raises:
        UserError: see `import_modules`.
    """
    names = values.get("imports") or []
    # Values of other types are left to the validation.
    import_modules([names] if isinstance(names, str) else [name for name in names if isinstance(name, str)])


def _reason(name: str, error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
        return (
            f"there is no module {error.name} in {Path.cwd()} or where Python looks (PYTHONPATH); start in the folder "
            "that holds it, and write names as in Python's import, without .py"
        )
    if isinstance(error, SyntaxError):
        file, line = error.filename, error.lineno
    else:
        # Without Python's own frames of the import, which have no file.
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
        file, line = frames[-1].filename, frames[-1].lineno
    return f"{name} fails with {type(error).__name__}: {first_line(error)} ({file}, line {line}); correct it"
