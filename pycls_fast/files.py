"""Files: paths as users type them, which files are ours, and writing that survives a power cut.

Functions that write raise an `OSError`, for example if the disk is full.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

EXPORTED = (".onnx", ".xml")
"""Ends of the files that hold a network as other programs run it (ONNX, OpenVINO), and that are data."""
PROGRAMS = (*EXPORTED, ".pt2")
"""The same, and torch.export's, which may run code when they are opened."""


def user_path(text: str | Path) -> Path:
    """The path with `~` expanded; unlike pathlib, a `~NAME` without a home folder is kept as an ordinary name."""
    return Path(os.path.expanduser(text))  # noqa: PTH111


def exists(path: Path) -> bool:
    """Whether there is such a file or folder; not, if the name is too long for one."""
    try:
        return path.exists()
    except OSError:
        return False


def weights_file(path: Path) -> Path:
    """A file of weights under the name whose suffix, and `config.json` in the same folder, describe it.

    A link's target, unless that has no suffix (as in the Hugging Face cache) or the link's own folder has a
    `config.json`.
    """
    target = path.resolve()
    has_own = path.parent.resolve() != target.parent and (path.parent / "config.json").is_file()
    return path.absolute() if path.suffix and (has_own or not target.suffix) else target


def cache_folder() -> Path:
    """The folder for reproducible files: below `XDG_CACHE_HOME`, else `~/.cache`, or `.cache` without a home."""
    general = user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    # Never make a folder called `~` in the working directory: somebody would remove it with `rm -r ~`.
    return (Path(".cache") if general.parts[0] == "~" else general) / "pycls_fast"


def timestamp() -> str:
    """The current local time as part of a path: `2026-11-21_15-23-13`."""
    return time.strftime("%Y-%m-%d_%H-%M-%S")


RUNS, LEDGERS = "runs", "ledgers"
"""The folders, in the current one, of runs without a `run_dir` and of ledgers without an `output`."""
BEST = "best"
"""In the folder of checkpoints, the link to the best one."""
STATE = "state.json"
"""In a checkpoint, everything that is not a tensor."""

_NAME = re.compile(r"step_(\d{9,})$")


def step_of(path: Path) -> int:
    match = _NAME.match(path.name)
    assert match is not None
    return int(match.group(1))


def checkpoints(folder: Path) -> Iterator[Path]:
    """Published checkpoints, the latest step first."""
    yield from sorted((path for path in folder.glob("step_*") if _NAME.match(path.name)), key=step_of, reverse=True)


def weights_at(path: Path) -> Path | None:
    """The file or checkpoint of weights that a path names: a file, a checkpoint, a timm model's folder (`config.json`
    beside `model.safetensors`), or the best, else the newest checkpoint of a run or of its folder of checkpoints; None
    if there is none."""
    if path.is_file():
        return weights_file(path)
    if any((path / name).is_file() for name in (".metadata", STATE)):
        return path.resolve()
    if (path / "config.json").is_file() and (path / "model.safetensors").is_file():
        return (path / "model.safetensors").absolute()
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    best_first = (folder / BEST, *checkpoints(folder))
    return next((found.resolve() for found in best_first if found.exists()), None)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Admit one process at a time; the file is made if it is not there."""
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def flush(*files: IO[Any]) -> None:
    """Flush the contents of open files to disk, one after the other."""
    for file in files:
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def atomic_write(file: Path) -> Iterator[Path]:
    """Write atomically: yields a temporary path that replaces `file` on success and is removed on failure."""
    # Nobody else writes to this name, nor has put a link there.
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def atomic_text(file: Path, text: str) -> None:
    """Write a text atomically and flush it: a power failure leaves the file as it was, or whole.

    Bytes of a file name that are not UTF-8 become escapes, which JSON has too.
    """
    with atomic_write(file) as temporary, temporary.open("w", encoding="utf-8", errors="backslashreplace") as stream:
        stream.write(text)
        flush(stream)


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder to disk, if the file system supports it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some refuse it for every folder (VirtualBox shares); PostgreSQL's `fsync_fname` ignores the first two as well.
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)
