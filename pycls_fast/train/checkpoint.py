"""Checkpoints: written whole or not at all, checked before they are believed.

A file holds everything that the next step depends on. What is a pure function of the step (learning rate, sample
order, augmentation, drop-path) is not in it: the step is.
"""

from __future__ import annotations

import importlib
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from pycls_fast.errors import UserError

FORMAT = 1
State = dict[str, Any]


def save(state: State, folder: Path, step: int, *, keep: int) -> Path:
    """Write `step_N.pt` under a temporary name, flush it to the disk, rename it; then drop the oldest beyond `keep`.

    Raises:
        UserError: the disk is full or the folder cannot be written to; the checkpoints before it are as they were.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:09d}.pt"
    temporary = folder / f".{path.name}.{os.getpid()}.tmp"
    try:
        with temporary.open("wb") as file:
            torch.save({"format": FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _flush_folder(folder)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"{path}: the checkpoint could not be written ({error}); those before it are kept") from error
    for old in list(checkpoints(folder))[keep:]:
        old.unlink(missing_ok=True)
    for leftover in folder.glob(".*.tmp"):
        leftover.unlink(missing_ok=True)
    return path


def keep_as_best(path: Path) -> None:
    """Make `best.pt` the same file as this checkpoint, at once."""
    best = path.with_name("best.pt")
    temporary = path.with_name(f".best.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(path, temporary)
    except OSError:
        # Some file systems have no hard links.
        import shutil

        shutil.copyfile(path, temporary)
    temporary.replace(best)
    _flush_folder(path.parent)


def checkpoints(folder: Path) -> Iterator[Path]:
    """`step_N.pt` files, the newest step first."""
    found = [(int(match.group(1)), path) for path in folder.glob("step_*.pt") if (match := _NAME.match(path.name))]
    for _, path in sorted(found, reverse=True):
        yield path


_NAME = re.compile(r"step_(\d+)\.pt$")


def load(path: Path) -> State:
    """Read a checkpoint onto the CPU, without running code from it.

    Raises:
        UserError: no such file, a damaged or truncated one, or one that is not ours.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint")
    reason = damage(path)
    if reason is not None:
        raise UserError(f"{path}: the checkpoint is damaged ({reason})")
    try:
        state = _read(path)
    except Exception as error:  # torch raises many kinds for a file that is not its own
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path}: not a checkpoint that can be read ({first_line})") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise UserError(f"{path}: not a checkpoint of pycls_fast")
    return state


def _read(path: Path) -> State:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "torchao" not in str(error):
            raise
        # Its import makes the 8-bit state of optim=adamw8bit known to torch.
        importlib.import_module("torchao.optim")
        return torch.load(path, map_location="cpu", weights_only=True)


def newest(folder: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is whole; `warn` is told of each one passed over."""
    for path in checkpoints(folder):
        reason = damage(path)
        if reason is None:
            return path
        warn(f"{path}: the checkpoint is damaged ({reason}); taking the one before it")
    return None


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint's archive (every member's checksum is read), or None."""
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        return str(error)
    return None if bad is None else f"{bad} does not match its checksum"


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
