"""Files that are written whole or not at all; the one of a tool's `output=` is seen to be writable before the work."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pycls_fast.errors import UserError
from pycls_fast.parallel import World
from pycls_fast.paths import user_path


@contextmanager
def whole(file: Path) -> Iterator[Path]:
    """A temporary file that takes the place of `file` at the end; of one that cannot be written nothing is left.

    Raises:
        OSError: the disk is full, say.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def finite(value: Any) -> Any:
    """The same with null, which JSON has, for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def output_file(output: str | Path, world: World | None = None) -> Path:
    """The path, its folders made; of a link the path that it leads to.

    Args:
        world: where several ranks run: the main one looks, all raise.

    Raises:
        UserError: nothing can be written there.
    """
    file = user_path(output)
    if file.is_symlink() and not is_open_elsewhere(file):
        # The link stays, and its target is written.
        file = Path(os.path.realpath(file))
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
        if is_open_elsewhere(file):
            return None if os.access(file, os.W_OK) else f"output: {file} cannot be written; give another path"
        file.parent.mkdir(parents=True, exist_ok=True)
        probe = file.with_name(f".{file.name}.{os.getpid()}.probe")
        probe.touch()
        probe.unlink()
    except OSError as error:
        return f"output: {file} cannot be written ({error.strerror}); give another path"
    return None


def is_open_elsewhere(file: Path) -> bool:
    """A pipe, a device or one of this process's own files (`/dev/stdout`): another file in its place serves nobody."""
    name = str(file.absolute())
    # What is kept in memory there are files like others.
    named = name.startswith(("/dev/", "/proc/")) and not name.startswith("/dev/shm/")
    return file.exists() and not file.is_dir() and (named or not file.is_file())


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    """Write values to a file that `output_file` gave; numbers that are not finite become null.

    Raises:
        UserError: the disk is full, say.
    """
    text = json.dumps(finite(values), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    # Bytes of a file's name that are no UTF-8 stay JSON's escapes.
    encoded = text.encode(errors="backslashreplace")
    try:
        if is_open_elsewhere(file):
            file.write_bytes(encoded)
        else:
            with whole(file) as temporary:
                temporary.write_bytes(encoded)
    except OSError as error:
        raise UserError(f"output: {file} could not be written ({error.strerror})") from error
