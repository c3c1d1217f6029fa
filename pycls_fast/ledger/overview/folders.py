"""Finds run folders below the given folders."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from pycls_fast.errors import UserError
from pycls_fast.paths import user_path

# A folder with two of these is a run's: so damaged ones are found, and folders of other programs are not.
_FILES = {"config.yaml", "environment.json", "metrics.jsonl", "summary.json", "checkpoints"}
_NOT_SEARCHED = {"checkpoints", "tensorboard", "wandb"}
# Default name of a run folder (`paths.timestamp`); empty if the run was killed before it had built its parts.
_TIME_OF_START = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d(~\d+)?")


def find_runs(folders: Iterable[str]) -> list[Path]:
    """All run folders, nested ones included, each once and sorted by path.

    Raises:
        UserError: a folder does not exist, or none of them contains a run.
    """
    folders = list(folders)
    seen: set[Path] = set()
    found = [run for folder in folders for run in _below(_checked(folder), seen)]
    if not found:
        raise UserError(f"{', '.join(folders)}: no run folders found; give folders that training has written")
    return sorted(found)


def _checked(folder: str) -> Path:
    path = user_path(folder)
    if not path.is_dir():
        raise UserError(f"{folder}: no such folder; give run folders, or folders that contain some")
    return path


def _below(folder: Path, seen: set[Path]) -> Iterator[Path]:
    # Links may lead to a folder that was searched before, or form a loop.
    if folder.resolve() in seen:
        return
    seen.add(folder.resolve())
    try:
        with os.scandir(folder) as entries:
            is_folder = {entry.name: entry.is_dir() for entry in entries}
    except OSError:
        # It may be a run; reading it reports why it cannot be read.
        yield folder
        return
    is_run = len(_FILES & is_folder.keys()) > 1
    if is_run or (not is_folder and _TIME_OF_START.fullmatch(folder.resolve().name)):
        yield folder
    for name in sorted(is_folder):
        if is_folder[name] and not name.startswith(".") and not (is_run and name in _NOT_SEARCHED):
            yield from _below(folder / name, seen)
