"""Files at addresses (`s3://`, `gs://`, `https://` ...) through fsspec, and a folder with local copies of them."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pycls_fast.data.sources.texts import digest
from pycls_fast.errors import UserError, refusing
from pycls_fast.files import flush, locked

PAUSES = (0.5, 2.0, 8.0)
"""Seconds before each further attempt at what may be away for a moment."""
_BLOCK = 8 * 2**20

T = TypeVar("T")


def is_remote(place: str) -> bool:
    """Whether a place is an address (`s3://...`) and not a path."""
    return "://" in place


def file_system(address: str) -> tuple[Any, str]:
    """fsspec's file system for an address (one for each process and thread), and the path on it."""
    import fsspec

    with refusing(f"{address}: fsspec cannot read it", ImportError, ValueError):
        files, path = fsspec.core.url_to_fs(address)
    if "file" in files.protocol and files.exists(path) and not (files.isfile(path) or files.isdir(path)):
        raise OSError(errno.EINVAL, "is no ordinary file", path)
    return files, path


def attempt(what: str, action: Callable[[], T]) -> T:
    """Run a network operation, with retries after growing pauses.

    Raises:
        FileNotFoundError: at once.
        UserError: it failed every time, which is no damaged image.
    """
    pauses = iter(PAUSES)
    while True:
        try:
            return action()
        except (FileNotFoundError, UserError):
            raise
        except Exception as error:
            # File systems raise their own libraries' exceptions here.
            pause = next(pauses, None)
            if pause is None:
                text = " ".join(str(error).split()) or type(error).__name__
                raise UserError(f"{what} failed {len(PAUSES) + 1} times: {text}") from error
            time.sleep(pause)


def list_files(address: str) -> list[str]:
    """The addresses of all files below an address, or that match one with `*`; none if there is nothing."""
    files, path = file_system(address)
    try:
        found = attempt(f"listing {address}", lambda: files.glob(path) if "*" in path else files.find(path))
    except FileNotFoundError:
        found = []
    return sorted(files.unstrip_protocol(name) for name in found)


def stamp_of(place: str) -> list[Any]:
    """Path or address, size and version, as far as the file system has one: changes when the file does."""
    if not is_remote(place):
        status = Path(place).stat()
        return [place, status.st_size, status.st_mtime_ns]
    files, path = file_system(place)
    about = attempt(f"asking for {place}", lambda: files.info(path))
    versions = (about.get(key) for key in ("ETag", "etag", "md5Hash", "mtime", "LastModified", "created"))
    return [place, about.get("size"), next((str(version) for version in versions if version is not None), "")]


def open_whole(address: str) -> Any:
    files, path = file_system(address)
    return attempt(f"opening {address}", lambda: files.open(path, "rb", block_size=_BLOCK))


def read_range(address: str, start: int, size: int) -> bytes:
    files, path = file_system(address)
    return attempt(f"reading {address}", lambda: bytes(files.cat_file(path, start, start + size)))


# A partial copy has its final size in its name, so that others can leave room for it.
_DRAFT = re.compile(r"\.[0-9a-f]{16}-.+\.(\d+)\.part", re.DOTALL)
# A copy that was read or touched within this time is not evicted; a draft that did not grow for so long is removed.
_IN_USE_SECONDS, _STALE_SECONDS = 5.0, 60.0


class ShardCache:
    """A folder with copies of whole remote files, shared by all of a user's processes on a machine."""

    def __init__(self, folder: Path, limit: float, processes: int = 1) -> None:
        """
        Args:
            folder: may hold other files: copies lie in a subfolder of the user's.
            limit: total bytes of all copies, complete or not. Above it the least recently used copies are evicted.
            processes: how many copy shards on this machine, each within its share of the limit.
        """
        self.folder = folder / f"pycls_fast_shards_{os.getuid()}"
        self.limit = limit
        self.processes = processes
        self._lock = self.folder / ".room.lock"
        with refusing(f"data.shard_cache: {self.folder} cannot be written"):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.touch()

    def place(self, address: str, version: str) -> Path:
        """The path of a file's copy, whether it exists or not; each version has its own."""
        name = digest(f"{address}\0{version}")
        return self.folder / f"{name}-{address.rpartition('/')[2]}"

    def read_range(self, address: str, version: str, start: int, size: int) -> bytes:
        """Bytes of the local copy; of the remote file if there is no copy."""
        with suppress(OSError), self.place(address, version).open("rb", buffering=0) as file:
            os.utime(file.fileno())
            return os.pread(file.fileno(), size, start)
        return read_range(address, start, size)

    def touch(self, place: Path) -> bool:
        """Whether there is the copy, which then counts as used now."""
        with suppress(OSError):
            os.utime(place)
            return True
        return False

    def begin(self, place: Path, size: int) -> Path | None:
        """A new draft for which there is room; None if there is none, or another process is making this copy."""
        draft = place.with_name(f".{place.name}.{size}.part")
        with locked(self._lock):
            if not self._make_room(size) or draft.exists() or self.touch(place):
                return None
            draft.touch()
            return draft

    def download(self, address: str, place: Path, size: int, draft: Path) -> None:
        def fetch() -> None:
            files.get_file(path, str(draft))
            if draft.stat().st_size != size:
                raise OSError(f"{draft.stat().st_size:,} bytes arrived instead of {size:,}; was the file replaced?")

        try:
            files, path = file_system(address)
            attempt(f"fetching {address}", fetch)
            # A power cut must not leave a truncated copy under the final name.
            with draft.open("rb+") as written:
                flush(written)
            draft.rename(place)
        finally:
            draft.unlink(missing_ok=True)

    def _make_room(self, size: int) -> bool:
        held, idle, now = 0, [], time.time()
        for file in self.folder.iterdir():
            # Other processes give drafts up meanwhile.
            with suppress(OSError):
                about, draft = file.stat(), _DRAFT.fullmatch(file.name)
                if not draft and file.name.startswith("."):
                    continue
                if draft and about.st_mtime < now - _STALE_SECONDS:
                    file.unlink()
                    continue
                held += int(draft[1]) if draft else about.st_size
                if not draft and about.st_mtime < now - _IN_USE_SECONDS:
                    idle.append((about.st_mtime, about.st_size, file))
        for _, own, file in sorted(idle):
            if held + size <= self.limit:
                break
            file.unlink(missing_ok=True)
            held -= own
        return held + size <= self.limit
