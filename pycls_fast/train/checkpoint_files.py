"""The folder of a checkpoint: published whole or not at all, checked before it is believed.

    checkpoints/step_000000123/   what torch.distributed.checkpoint writes: a file per rank, and `.metadata`
                     state.json   everything that is no tensor: step, configuration, classes, ...
                     files.json   size and SHA-256 of every other file, written last
    checkpoints/best              a link to one of them; a copy where there are no links, or a program copied the run so

All of it is written into `.step_*.tmp`, flushed to the disk, and renamed when every rank is done. So a name without the
dot is a whole checkpoint, whenever the processes are killed; what happens to its bytes later, `damage` finds.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FORMAT = 2
BEST = "best"
STATE, FILES = "state.json", "files.json"

_NAME = re.compile(r"step_(\d{9,})$")
_ASIDE = "set_aside_"

Listing = dict[str, dict[str, Any]]
"""File name -> size in bytes and SHA-256."""


def step_of(path: Path) -> int:
    """The step that a checkpoint's name says."""
    match = _NAME.match(path.name)
    assert match is not None
    return int(match.group(1))


def checkpoints(folder: Path) -> Iterator[Path]:
    """Published checkpoints, the newest step first."""
    yield from sorted((path for path in folder.glob("step_*") if _NAME.match(path.name)), key=step_of, reverse=True)


def begin(folder: Path, step: int) -> Path:
    """A new temporary folder for a checkpoint; what earlier processes left of theirs is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in (*folder.glob(".step_*.tmp"), *folder.glob(f".{BEST}.*.tmp")):
        _remove(leftover)
    # A name of its own: a process of a run that was restarted meanwhile may still be writing.
    temporary = folder / f".step_{step:09d}.{secrets.token_hex(4)}.tmp"
    temporary.mkdir()
    return temporary


def list_files(folder: Path, names: Iterator[Path]) -> Listing:
    """Size and checksum of files, as they can be read back."""
    return {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(names)}


def publish(temporary: Path, values: dict[str, Any], listing: Listing) -> Path:
    """Write `state.json`, then `files.json`, and give the folder its name.

    Args:
        temporary: from `begin`, with the files of all ranks, flushed.
        values: what `state.json` holds.
        listing: of the files of all ranks.
    """
    _write_json(temporary / STATE, values)
    listing = listing | list_files(temporary, iter([temporary / STATE]))
    _write_json(temporary / FILES, {"format": FORMAT, "files": listing})
    flush_folder(temporary)
    path = temporary.with_name(temporary.name.split(".")[1])
    if path.exists():
        # Left by an abandoned continuation of this run, or damaged: renamed, never overwritten.
        path.rename(_free_name(path))
    temporary.rename(path)
    flush_folder(path.parent)
    return path


def discard(temporary: Path) -> None:
    """Remove what could not be finished."""
    shutil.rmtree(temporary, ignore_errors=True)


def retire(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints and the one that `best` links to."""
    best = (folder / BEST).resolve()
    for old in list(checkpoints(folder))[keep:]:
        if old.resolve() != best:
            # First the name, so that half a checkpoint never carries one.
            hidden = old.with_name(f".{old.name}.{secrets.token_hex(4)}.tmp")
            old.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)


def set_aside(folder: Path, after_step: int) -> list[Path]:
    """Rename the checkpoints of later steps, which a run that goes on from an earlier one has left behind."""
    moved = []
    for path in list(checkpoints(folder)):
        if step_of(path) > after_step:
            moved.append(path.rename(_free_name(path)))
    best = folder / BEST
    if best.is_symlink():
        if not best.exists():
            best.unlink()
    elif best.is_dir() and _step_in(best) > after_step:
        # A copy, perhaps of one that is gone.
        moved.append(best.rename(_free_name(best)))
    return moved


def keep_as_best(path: Path) -> None:
    """Make `best` a link to this checkpoint, at once; a copy of it where the file system has no links."""
    best = path.with_name(BEST)
    temporary, former = (path.with_name(f".{BEST}.{secrets.token_hex(4)}.tmp") for _ in range(2))
    try:
        try:
            temporary.symlink_to(path.name, target_is_directory=True)
        except OSError:
            # exFAT, SMB, Google Drive. Where the reason is another one (a full disk), copying fails for it as well.
            _copy(path, temporary)
        if not (temporary.is_symlink() and best.is_symlink()) and (best.is_symlink() or best.exists()):
            # No folder takes the place of another, or of a link, in one step. Without a best one the newest stands for
            # it, which this one is.
            best.rename(former)
        temporary.replace(best)
        flush_folder(path.parent)
        _remove(former)
    finally:
        _remove(temporary)


def damage(path: Path, rank: int = 0, ranks: int = 1) -> str | None:
    """What is wrong with a checkpoint, or None.

    Args:
        path: the checkpoint's folder.
        rank: of `ranks` that share the files among them; each hears about its own only.
        ranks: how many look.
    """
    try:
        written = json.loads((path / FILES).read_text(encoding="utf-8"))
        listing: Listing = written["files"]
        for name in sorted(listing)[rank::ranks]:
            file, entry = path / name, listing[name]
            if not file.is_file():
                return f"{name} is missing"
            size = file.stat().st_size
            if size != entry["bytes"]:
                return f"{name} has {size:,} bytes instead of {entry['bytes']:,}"
            if _sha256(file) != entry["sha256"]:
                return f"{name} does not match its checksum"
    except FileNotFoundError:
        return f"{FILES} is missing"
    except (OSError, UnicodeDecodeError) as error:
        return str(error)
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{FILES} cannot be read"
    return None


def flush_folder(folder: Path) -> None:
    """Make the names in a folder as durable as the files' contents, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some refuse it for any folder (shared folders of VirtualBox); PostgreSQL's `fsync_fname` lets these two pass.
        if error.errno not in (errno.EINVAL, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """A folder, a link or a file, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _copy(checkpoint: Path, target: Path) -> None:
    """The files alone, flushed: modes and times are what such a file system may refuse."""
    target.mkdir()
    for file in checkpoint.iterdir():
        with file.open("rb") as source, (target / file.name).open("xb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
            copy.flush()
            os.fsync(copy.fileno())
    flush_folder(target)


def _step_in(checkpoint: Path) -> int:
    """The step that a checkpoint's values say; 0 where they cannot be read."""
    try:
        return int(json.loads((checkpoint / STATE).read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _free_name(path: Path) -> Path:
    """`set_aside_NAME`, with a number where that is taken."""
    free, number = path.with_name(_ASIDE + path.name), 1
    while free.exists():
        number += 1
        free = path.with_name(f"{_ASIDE}{path.name}~{number}")
    return free


def _write_json(path: Path, values: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(values, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
