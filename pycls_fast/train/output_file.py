"""Atomic file writing, and the check that a tool's `output=` is writable before the work starts."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pycls_fast.errors import UserError
from pycls_fast.files import user_path
from pycls_fast.parallel import World


@contextmanager
def atomic_write(file: Path) -> Iterator[Path]:
    """Write atomically: yields a temporary path that replaces `file` on success and is removed on failure.

    Raises:
        OSError: for example, the disk is full.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def nan_to_none(value: Any) -> Any:
    """A copy of `value` in which NaN and infinities are None, because JSON has no NaN."""
    if isinstance(value, Mapping):
        return {key: nan_to_none(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [nan_to_none(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def output_file(output: str | Path, world: World | None = None, *, key: str = "output") -> Path:
    """The path to write to, with its folders made and a link resolved.

    Args:
        world: needed if several ranks run: the main one checks, all raise.
        key: the tool's key that named it, for the error.

    Raises:
        UserError: it cannot be written.
    """
    if output == "":
        # As of `output=$FILE` without such a variable; pathlib would take it for the current folder.
        raise UserError(f"{key}: is empty; give the path of a file, or leave {key}= out")
    file = user_path(output)
    # Not `Path.is_symlink`, which raises for a name that is too long; `_problem` reports it.
    if os.path.islink(file) and not is_special_file(file):  # noqa: PTH114
        # Keep the link and write its target.
        file = Path(os.path.realpath(file))
    problem = _problem(file) if world is None or world.is_main else None
    if world is not None:
        problem = world.from_main(problem)
    if problem is not None:
        raise UserError(f"{key}: {problem}")
    return file


def _problem(file: Path) -> str | None:
    try:
        if file.is_dir():
            return f"{file} is a folder; give the path of a file"
        if is_special_file(file):
            return None if os.access(file, os.W_OK) else f"{file} cannot be written; give another path"
        file.parent.mkdir(parents=True, exist_ok=True)
        probe = file.with_name(f".{file.name}.{os.getpid()}.probe")
        probe.touch()
        probe.unlink()
    except OSError as error:
        return f"{file} cannot be written ({error.strerror}); give another path"
    return None


def is_special_file(file: Path) -> bool:
    """Whether `file` is a pipe, a device or an open file of this process (`/dev/stdout`): it must not be replaced."""
    name = str(file.absolute())
    # Files in shared memory are ordinary files.
    named = name.startswith(("/dev/", "/proc/")) and not name.startswith("/dev/shm/")
    return file.exists() and not file.is_dir() and (named or not file.is_file())


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    """Write values to a path from `output_file`; numbers that are not finite become null.

    Raises:
        UserError: for example, the disk is full.
    """
    write_text(file, json.dumps(nan_to_none(values), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(file: Path, text: str, *, key: str = "output") -> None:
    """Write a text to a path from `output_file`, with the same `key`.

    Raises:
        UserError: for example, the disk is full.
    """
    # Bytes of a file name that are not UTF-8 are written as escapes, which JSON has too.
    encoded = text.encode(errors="backslashreplace")
    try:
        if is_special_file(file):
            file.write_bytes(encoded)
        else:
            with atomic_write(file) as temporary:
                temporary.write_bytes(encoded)
    except OSError as error:
        raise UserError(f"{key}: {file} could not be written ({error.strerror})") from error
