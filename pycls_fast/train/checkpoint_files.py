"""The folder of a checkpoint: published atomically, and verified before it is used.

    checkpoints/step_000000123/   what torch.distributed.checkpoint writes: a file per rank, and `.metadata`
                     state.json   everything that is not a tensor: step, configuration, classes, ...
                     files.json   size and SHA-256 of every other file, written last
    checkpoints/best              a link to one of them; a copy if links are not supported or were not preserved

Everything is written into `.step_*.tmp`, flushed to disk, and renamed when every rank is done. So a name without the
leading dot is a complete checkpoint, whenever the processes are killed; later corruption is found by `damage`.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pycls_fast.files import BEST, STATE, checkpoints, flush, flush_folder, step_of

FORMAT = 3
FILES = "files.json"

_ASIDE = "set_aside_"

Listing = dict[str, dict[str, Any]]
"""File name -> size in bytes and SHA-256."""


def begin(folder: Path, step: int) -> Path:
    """Make a new temporary folder for a checkpoint, and remove those that earlier processes left."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in (*folder.glob(".step_*.tmp"), *folder.glob(f".{BEST}.*.tmp")):
        _remove(leftover)
    # A unique name: an old process of a run that was restarted meanwhile may still be writing.
    temporary = folder / f".step_{step:09d}.{secrets.token_hex(4)}.tmp"
    temporary.mkdir()
    return temporary


def list_checksums(files: Sequence[Path]) -> Listing:
    """Size and checksum of each file, read back from it."""
    return {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(files)}


def publish(temporary: Path, values: dict[str, Any], listing: Listing) -> Path:
    """Write `state.json`, then `files.json`, and give the folder its name.

    Args:
        temporary: from `begin`, with the files of all ranks, flushed.
        values: what `state.json` holds.
        listing: the files of all ranks.
    """
    _write_json(temporary / STATE, values)
    listing = listing | list_checksums([temporary / STATE])
    _write_json(temporary / FILES, {"format": FORMAT, "files": listing})
    flush_folder(temporary)
    path = temporary.with_name(temporary.name.split(".")[1])
    if path.exists():
        # Damaged, or left by a continuation of this run that was abandoned: renamed, never overwritten.
        path.rename(_free_name(path))
    temporary.rename(path)
    flush_folder(path.parent)
    return path


def discard(temporary: Path) -> None:
    """Remove an unfinished checkpoint."""
    shutil.rmtree(temporary, ignore_errors=True)


def retire(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints and the one that `best` links to."""
    best = (folder / BEST).resolve()
    for old in list(checkpoints(folder))[keep:]:
        if old.resolve() != best:
            # Rename first, so that a partly deleted checkpoint never has a valid name.
            hidden = old.with_name(f".{old.name}.{secrets.token_hex(4)}.tmp")
            old.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)


def set_aside(folder: Path, after_step: int) -> list[Path]:
    """Rename the checkpoints of later steps, which a run that resumes from an earlier one has abandoned."""
    moved = []
    for path in list(checkpoints(folder)):
        if step_of(path) > after_step:
            moved.append(path.rename(_free_name(path)))
    best = folder / BEST
    if best.is_symlink():
        if not best.exists():
            best.unlink()
    elif best.is_dir() and _step_in(best) > after_step:
        # A copy, perhaps of a checkpoint that no longer exists.
        moved.append(best.rename(_free_name(best)))
    return moved


def keep_as_best(path: Path) -> None:
    """Make `best` a link to this checkpoint, atomically; a copy if the file system has no links."""
    best = path.with_name(BEST)
    temporary, former = (path.with_name(f".{BEST}.{secrets.token_hex(4)}.tmp") for _ in range(2))
    try:
        try:
            temporary.symlink_to(path.name, target_is_directory=True)
        except OSError:
            # exFAT, SMB, Google Drive. If the reason is a different one (a full disk), copying fails too.
            _copy(path, temporary)
        if not (temporary.is_symlink() and best.is_symlink()) and (best.is_symlink() or best.exists()):
            # A folder cannot replace another folder, or a link, atomically. While `best` is missing the newest
            # checkpoint is used instead, which is this one.
            best.rename(former)
        try:
            temporary.replace(best)
        except OSError:
            if former.is_symlink() or former.exists():
                former.rename(best)
            raise
        flush_folder(path.parent)
        _remove(former)
    finally:
        _remove(temporary)


def damage(path: Path, rank: int = 0, ranks: int = 1) -> str | None:
    """What is wrong with a checkpoint, or None.

    Args:
        path: the checkpoint's folder.
        rank: which of the `ranks` this is; each checks its own part of the files and reports only those.
        ranks: how many ranks divide the files among themselves.
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


def _remove(path: Path) -> None:
    """Remove a folder, a link or a file, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _copy(checkpoint: Path, target: Path) -> None:
    """Copy the files' contents only, flushed: such a file system may refuse modes and times."""
    target.mkdir()
    for file in checkpoint.iterdir():
        with file.open("rb") as source, (target / file.name).open("xb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
            flush(copy)
    flush_folder(target)


def _step_in(checkpoint: Path) -> int:
    """The step in a checkpoint's `state.json`; 0 if it cannot be read."""
    try:
        return int(json.loads((checkpoint / STATE).read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _free_name(path: Path) -> Path:
    """`set_aside_NAME`, with a number if that is taken."""
    free, number = path.with_name(_ASIDE + path.name), 1
    while free.exists():
        number += 1
        free = path.with_name(f"{_ASIDE}{path.name}~{number}")
    return free


def _write_json(path: Path, values: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(values, file, indent=1)
        flush(file)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
