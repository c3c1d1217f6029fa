"""A local cache of whole remote files, shared by all processes of a machine."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from pycls_fast.data.sources.arrays import Texts
from pycls_fast.data.sources.remote import attempt, file_system, read_range, size_of
from pycls_fast.durable import flush
from pycls_fast.errors import UserError

_ATTEMPTS = 4
_FOLDER = "pycls_fast_shards"
_COPY = re.compile(r"[0-9a-f]{16}-.+", re.DOTALL)
# A partial copy has its final size in its name, so that others can leave room for it.
_DRAFT = re.compile(r"\.([0-9a-f]{16}-.+)\.(\d+)\.part", re.DOTALL)
# A copy that was read or touched within this time is not evicted for one that is fetched ahead.
_IN_USE_SECONDS = 5.0


class FileCache:
    """A folder with copies of whole remote files, shared by all processes of a machine.

    Whoever holds a copy's lock fetches it; the others read what they need of that file over the network until it is
    there. Above `limit` bytes the least recently used copies are evicted.
    """

    def __init__(self, folder: Path, limit: int | None, processes: int = 1) -> None:
        """
        Args:
            folder: may hold other files: copies lie in a subfolder.
            limit: total bytes of all copies, complete or not; None for no limit. Only a file that is larger by itself
                exceeds it.
            processes: how many fetch ahead on this machine, each within its share of the limit.
        """
        self.folder = folder / _FOLDER
        self.limit = limit
        self.processes = processes

    def read_range(self, address: str, version: str, start: int, size: int) -> bytes:
        """Bytes of the local copy, which is fetched first if no other process is fetching it.

        Args:
            version: `stamp_of` as JSON; each version has its own copy.

        Raises:
            FileNotFoundError: the remote file is gone.
            UserError: it cannot be reached, or the folder cannot be written or read.
        """
        place, whole_size = self.place(address, version), size_of(version)
        for _ in range(_ATTEMPTS):
            try:
                with place.open("rb", buffering=0) as file:
                    # Another user's copy can be read, but not touched.
                    with suppress(OSError):
                        os.utime(file.fileno())
                    data = os.pread(file.fileno(), size, start)
                # A power cut may have truncated the copy.
                if len(data) == size or _has_size(place, whole_size):
                    return data
            except FileNotFoundError:
                # Not fetched yet, or evicted between two reads.
                pass
            except PermissionError as error:
                raise UserError(f"data.shard_cache: {place} cannot be read ({error.strerror})") from error
            if not self._fetch(address, place, whole_size):
                return read_range(address, start, size)
        raise UserError(f"{self.folder}: shards are evicted as fast as they are fetched; raise data.shard_cache_gib")

    def place(self, address: str, version: str) -> Path:
        """The path of a file's copy, whether it exists or not."""
        name = hashlib.sha256(f"{address}\0{version}".encode()).hexdigest()[:16]
        return self.folder / f"{name}-{address.rpartition('/')[2]}"

    def touch(self, place: Path, size: int | None) -> bool:
        """Whether the copy is complete. If it is, it counts as used now."""
        if not _has_size(place, size):
            return False
        with suppress(OSError):
            os.utime(place)
        return True

    def claim(self, place: Path) -> IO[str] | None:
        """The lock of a copy, which closing releases; None if it is held.

        Raises:
            OSError: the folder cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = (self.folder / f".{place.name}.lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            if not isinstance(error, BlockingIOError):
                raise
            return None
        return lock

    def reserve(self, place: Path, size: int | None, *, ahead: bool = False) -> bool:
        """Make room for a copy whose lock the caller holds, and count it from now on; False if there is not enough.

        Args:
            ahead: nobody waits for it yet, so copies that are in use stay.

        Raises:
            OSError: the folder cannot be written.
        """
        with self._folder_lock():
            self._remove_left_drafts()
            if not self._make_room(place, size or 0, ahead=ahead):
                return False
            self._draft(place, size).touch()
        return True

    def download(self, address: str, place: Path, size: int | None) -> None:
        """Fetch a copy whose lock the caller holds and for which room is reserved.

        Raises:
            FileNotFoundError: the remote file is gone.
            UserError: it cannot be reached.
            OSError: the copy cannot be written.
        """
        draft = self._draft(place, size)
        try:
            files, path = file_system(address)
            attempt(f"fetching {address}", lambda: _download(files, path, draft, size))
            if size is None:
                with self._folder_lock():
                    self._make_room(place, draft.stat().st_size, ahead=False)
            draft.rename(place)
        finally:
            draft.unlink(missing_ok=True)

    def discard(self, place: Path, size: int | None) -> None:
        """Remove what has arrived of a copy whose lock the caller holds."""
        self._draft(place, size).unlink(missing_ok=True)

    def _fetch(self, address: str, place: Path, size: int | None) -> bool:
        """Fetch a copy; False if another process is fetching it, or if others take all the room."""
        try:
            lock = self.claim(place)
            if lock is None:
                return False
            with lock:
                if not _has_size(place, size):
                    if not self.reserve(place, size):
                        return False
                    self.download(address, place, size)
            return True
        except FileNotFoundError:
            raise
        except OSError as error:
            free = shutil.disk_usage(self.folder).free if self.folder.is_dir() else 0
            raise UserError(
                f"data.shard_cache: {self.folder} cannot be written ({error.strerror or error}; "
                f"{free / 2**30:.1f} GiB free); choose another folder or a data.shard_cache_gib that fits"
            ) from error

    def _draft(self, place: Path, size: int | None) -> Path:
        return place.with_name(f".{place.name}.{size or 0}.part")

    @contextmanager
    def _folder_lock(self) -> Iterator[None]:
        """Exclude this user's other processes while room is made."""
        # Another user's lock could not be opened.
        with (self.folder / f".room-{os.getuid()}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _remove_left_drafts(self) -> None:
        """Remove partial files of killed processes: nobody holds their locks any more."""
        for draft, name, _ in self._drafts():
            # Other processes fetch and remove files too, and some may belong to another user.
            with suppress(OSError), (self.folder / f".{name}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                draft.unlink()

    def _make_room(self, place: Path, size: int, *, ahead: bool) -> bool:
        """Evict copies until another one fits. If that is not enough, none is evicted."""
        if self.limit is None:
            return True
        drafts = sum(own for _, name, own in self._drafts() if name != place.name)
        copies = sorted(self._copies())
        excess = size + drafts + sum(own for _, own, _ in copies) - self.limit
        newest = time.time() - _IN_USE_SECONDS if ahead else float("inf")
        evicted = []
        for used, own, file in copies:
            if excess <= 0 or used > newest:
                break
            evicted.append(file)
            excess -= own
        if excess > 0 and (ahead or drafts):
            return False
        for file in evicted:
            file.unlink(missing_ok=True)
        return True

    def _copies(self) -> Iterator[tuple[float, int, Path]]:
        """Time of the last use, bytes and path of each copy; ignores any other files."""
        for file in self.folder.iterdir():
            # Other processes evict files too.
            with suppress(FileNotFoundError):
                about = file.lstat()
                if _COPY.fullmatch(file.name) and stat.S_ISREG(about.st_mode):
                    yield about.st_mtime, about.st_size, file

    def _drafts(self) -> Iterator[tuple[Path, str, int]]:
        """Path, name of the copy and final bytes of each partial copy."""
        for file in self.folder.iterdir():
            found = _DRAFT.fullmatch(file.name)
            if found:
                yield file, found[1], int(found[2])


def _has_size(file: Path, size: int | None) -> bool:
    """Whether a file is there, and of the given size if that is known."""
    try:
        about = file.stat()
    except OSError:
        return False
    return stat.S_ISREG(about.st_mode) and size in (None, about.st_size)


def _download(files: Any, path: str, draft: Path, size: int | None) -> None:
    files.get_file(path, str(draft))
    if not _has_size(draft, size):
        raise OSError(f"{draft.stat().st_size:,} bytes arrived instead of {size:,}; was the file replaced?")
    with draft.open("rb") as file:
        # A power cut must not leave a truncated copy under the final name.
        flush(file)


@dataclass(frozen=True)
class CopiedShards:
    """The remote shards of a source that keeps copies of them.

    Args:
        addresses, versions: each shard's, as `FileCache` takes them.
        ends: int64, the number of images up to the end of each shard.
        rows: the places, in all shards together, of the images of a part of them; None for all images.
    """

    cache: FileCache
    addresses: Texts
    versions: Texts
    ends: np.ndarray
    rows: np.ndarray | None = None

    @property
    def sizes(self) -> list[int | None]:
        """Bytes of each shard, as far as its file system told them."""
        return [size_of(self.versions[number]) for number in range(len(self.versions))]

    def part(self, rows: np.ndarray) -> CopiedShards:
        """The same shards for the images at some positions only."""
        return replace(self, rows=rows if self.rows is None else self.rows[rows])

    def numbers(self, indices: np.ndarray) -> np.ndarray:
        """The number of each image's shard, int64."""
        rows = indices if self.rows is None else self.rows[indices]
        return np.searchsorted(self.ends, rows, side="right")
