"""The file that a tool's `output=` names: found to be writable before time is spent, written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pycls_fast.errors import UserError
from pycls_fast.parallel import World


def output_file(output: str | Path, world: World | None = None) -> Path:
    """The path, its folders made.

    Args:
        world: where several ranks run: the main one looks, all raise.

    Raises:
        UserError: nothing can be written there.
    """
    file = Path(output).expanduser()
    problem = _problem(file) if world is None or world.is_main else None
    if world is not None:
        problem = world.from_main(problem)
    if problem is not None:
        raise UserError(problem)
    return file


def _problem(file: Path) -> str | None:
    if file.is_dir():
        return f"output: {file} is a folder; give the path of a file"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        probe = file.with_name(f".{file.name}.{os.getpid()}.probe")
        probe.touch()
        probe.unlink()
    except OSError as error:
        return f"output: {file} cannot be written ({error.strerror}); give another path"
    return None


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    """Write values to a file that `output_file` gave.

    Raises:
        UserError: the disk is full, say.
    """
    text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        # Bytes of a file's name that are no UTF-8 stay JSON's escapes.
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        temporary.replace(file)
    except OSError as error:
        raise UserError(f"output: {file} could not be written ({error.strerror})") from error
    finally:
        temporary.unlink(missing_ok=True)
