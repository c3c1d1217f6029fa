"""The files of a split that is being packed: its plan, its lock, and what is whole after a kill."""

from __future__ import annotations

import fcntl
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from pycls_fast.data.packing.stored_image import PackSettings
from pycls_fast.data.sources.base import Source
from pycls_fast.data.sources.packed import ENTRY, IMAGES
from pycls_fast.durable import flush
from pycls_fast.errors import UserError

PLAN, LOCK = "plan.json", "lock.part"
DRAFT_IMAGES, DRAFT_TABLE, DAMAGED = f"{IMAGES}.part", "table.part", "damaged.part"
_DRAFT_PLAN = "plan.draft"
DURABLE_EVERY = 4096
"""After so many images everything is forced to disk."""


def plan_of(source: Source, settings: PackSettings) -> dict[str, Any]:
    """What is packed and how; only the same plan can be resumed. Takes some seconds for a million images."""
    digest = hashlib.sha256()
    for index in range(len(source)):
        digest.update(source.name(index).encode("utf-8", "surrogateescape") + b"\0")
    labels = getattr(source, "labels", None)
    if labels is not None:
        digest.update(np.asarray(labels, dtype="<i8").tobytes())
    digest.update(json.dumps([len(source), list(source.classes), asdict(settings)]).encode())
    return {"settings": asdict(settings), "digest": digest.hexdigest(), "source": source.describe()}


@contextmanager
def only_process(folder: Path) -> Iterator[None]:
    """Keep other processes from packing into the folder; a kill leaves no lock.

    Raises:
        UserError: another process is packing into it.
    """
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise UserError(f"output: another process is packing into {folder}; wait until it has finished") from error
        except OSError:
            # A file system without locks.
            pass
        yield


def check_empty(folder: Path) -> None:
    """Check that the folder holds nothing but possibly the beginning of a packing.

    Raises:
        UserError: it holds something else.
    """
    names = {entry.name for entry in folder.iterdir()}
    is_ours = _is_plan(folder / PLAN) if PLAN in names else not names - {_DRAFT_PLAN, LOCK}
    if not is_ours:
        raise UserError(f"output: {folder} is not empty and holds no packed images; choose another output")


def _is_plan(file: Path) -> bool:
    try:
        plan = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return True  # Another process has finished since the folder was listed.
    except ValueError:
        return False
    return isinstance(plan, dict) and {"digest", "source", "settings"} <= plan.keys()


def begin(folder: Path, plan: dict[str, Any]) -> None:
    """Write the plan and the empty files of a new packing, or check that the one begun here has this plan.

    Raises:
        UserError: the folder holds the beginning of another packing.
    """
    path = folder / PLAN
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        if before["digest"] != plan["digest"]:
            raise UserError(
                f"output: {folder} holds the beginning of another packing ({before['source']}, {before['settings']}): "
                "names, labels or settings differ; remove it, or choose another output"
            )
    else:
        # First, so that a full disk or a kill leaves a folder in which the same command can start again.
        draft = folder / _DRAFT_PLAN
        with draft.open("w", encoding="utf-8") as written:
            written.write(json.dumps(plan))
            flush(written)
        draft.rename(path)
    images = folder / DRAFT_IMAGES
    if not images.exists() and (folder / IMAGES).exists():
        # The last run was killed between the last two renames.
        (folder / IMAGES).rename(images)
    for file in (images, folder / DRAFT_TABLE):
        file.touch()


def whole_entries(images: Path, table: Path, damaged: Mapping[int, object]) -> tuple[int, int]:
    """The number of entries of a possibly truncated table whose images are stored, and where these end.

    Args:
        damaged: the positions of the entries without an image.
    """
    entries = np.fromfile(table, dtype=ENTRY, count=table.stat().st_size // ENTRY.itemsize)
    sizes = entries["size"].astype(np.int64)
    ends = np.cumsum(sizes)
    has_image = sizes > 0
    has_image[[index for index in damaged if index < len(entries)]] = True
    is_whole = has_image & (entries["offset"] == ends - sizes) & (ends <= images.stat().st_size)
    count = len(entries) if is_whole.all() else int(np.argmin(is_whole))
    # After a power cut a file may have its length, but not its content, from the last `flush` on.
    first = max(count - 1, 0) // DURABLE_EVERY * DURABLE_EVERY
    with images.open("rb") as file:
        file.seek(int(ends[first] - sizes[first]) if count else 0)
        for done in range(first, count):
            if zlib.crc32(file.read(int(sizes[done]))) != int(entries[done]["crc32"]):
                count = done
                break
    return count, int(ends[count - 1]) if count else 0


def damaged_line(index: int, name: str, reason: str) -> str:
    """One line of the log that `read_damaged` reads."""
    return json.dumps([index, name, reason]) + "\n"


def read_damaged(log: Path) -> dict[int, tuple[str, str]]:
    """Name and reason of each damaged image by position; truncated lines are left out."""
    damaged: dict[int, tuple[str, str]] = {}
    for line in log.read_bytes().splitlines() if log.is_file() else ():
        with suppress(ValueError, TypeError):
            index, name, reason = json.loads(line)
            damaged[index] = (name, reason)
    return damaged
