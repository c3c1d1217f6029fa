"""Files at addresses (`s3://`, `gs://`, `https://` ...) through fsspec, and a local cache of whole files."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pycls_fast.errors import UserError

_ATTEMPTS = 4
_FIRST_PAUSE = 0.5
_BLOCK = 8 * 2**20
_FOLDER = "pycls_fast_shards"
_COPY = re.compile(r"[0-9a-f]{16}-.+", re.DOTALL)
_DRAFT = re.compile(r"\.[0-9a-f]{16}-.+\.part", re.DOTALL)

T = TypeVar("T")

# A file system's connections and threads do not survive a fork: each process makes its own.
_file_systems: dict[tuple[int, str], Any] = {}


def file_system(address: str) -> tuple[Any, str]:
    """fsspec's file system for an address, and the path on it.

    Raises:
        UserError: an unknown protocol, or one whose package is not installed.
    """
    import fsspec

    protocol, _, rest = address.partition("://")
    # Of sftp://one/ and sftp://two/ each has its own.
    key = (os.getpid(), f"{protocol}://{rest.partition('/')[0]}")
    try:
        if key not in _file_systems:
            _file_systems[key] = fsspec.core.url_to_fs(address, skip_instance_cache=True)[0]
        return _file_systems[key], fsspec.core.strip_protocol(address)
    except ImportError as error:
        raise UserError(f"{address}: {error}") from error
    except ValueError as error:
        raise UserError(f"{address}: fsspec does not know {protocol}:// ({error})") from error


def attempt(what: str, action: Callable[[], T], pause: float = _FIRST_PAUSE) -> T:
    """Run a network operation, with retries after growing pauses.

    Raises:
        FileNotFoundError: at once.
        UserError: it failed every time. Never counted as a damaged image.
    """
    for number in range(_ATTEMPTS):
        try:
            return action()
        except (FileNotFoundError, UserError):
            raise
        except Exception as error:
            # File systems raise their own libraries' exceptions here.
            if number == _ATTEMPTS - 1:
                text = " ".join(str(error).split()) or type(error).__name__
                raise UserError(f"{what} failed {_ATTEMPTS} times: {text}") from error
            time.sleep(pause * 4**number)
    raise AssertionError("unreachable")


def list_files(address: str) -> list[str]:
    """The addresses of all files below an address, or that match one with `*`.

    Raises:
        UserError: nothing can be listed there.
    """
    files, path = file_system(address)
    try:
        found = attempt(f"listing {address}", lambda: files.glob(path) if "*" in path else files.find(path))
    except FileNotFoundError:
        found = []
    return sorted(files.unstrip_protocol(name) for name in found)


def stamp_of(address: str) -> list[Any]:
    """Address, size and version, as far as the file system has one: changes when the file does.

    Raises:
        UserError: there is no such file.
    """
    files, path = file_system(address)
    try:
        about = attempt(f"asking for {address}", lambda: files.info(path))
    except FileNotFoundError:
        raise UserError(f"there is no file {address}") from None
    versions = (about.get(key) for key in ("ETag", "etag", "md5Hash", "mtime", "LastModified", "created"))
    return [address, about.get("size"), next((str(version) for version in versions if version is not None), "")]


def open_whole(address: str) -> Any:
    """A file object for reading an address from its beginning to its end."""
    files, path = file_system(address)
    return attempt(f"opening {address}", lambda: files.open(path, "rb", block_size=_BLOCK))


def read_range(address: str, start: int, size: int) -> bytes:
    """`size` bytes of a file from `start` on.

    Raises:
        FileNotFoundError: it is gone.
        UserError: it cannot be reached.
    """
    files, path = file_system(address)
    return attempt(f"reading {address}", lambda: bytes(files.cat_file(path, start, start + size)))


def size_of(version: str) -> int | None:
    """The size in bytes of a file whose `stamp_of` is `version` as JSON, if its file system told it."""
    size = json.loads(version)[1]
    return size if isinstance(size, int) else None


def _has_size(file: Path, size: int | None) -> bool:
    """Whether a file is there, and of the given size if that is known."""
    return file.is_file() and size in (None, file.stat().st_size)


def _download(files: Any, path: str, draft: Path, size: int | None) -> None:
    files.get_file(path, str(draft))
    if not _has_size(draft, size):
        raise OSError(f"{draft.stat().st_size:,} bytes arrived instead of {size:,}; was the file replaced?")
    with draft.open("rb") as file:
        # A power cut must not leave a truncated copy under the final name.
        os.fsync(file.fileno())


class FileCache:
    """A folder with copies of whole remote files, shared by all processes of a machine.

    A file is fetched once, by whoever needs it first. Above `limit` bytes the least recently used are evicted.
    """

    def __init__(self, folder: Path, limit: int | None) -> None:
        """
        Args:
            folder: may hold other files: copies lie in a subfolder.
            limit: total bytes of all copies; None for no limit.
        """
        self.folder = folder / _FOLDER
        self.limit = limit

    def read_range(self, address: str, version: str, start: int, size: int) -> bytes:
        """Bytes of the local copy, which is fetched first if needed.

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
                if len(data) == size or _has_size(place, whole_size):
                    return data
                # A power cut truncated the copy.
                self._fetch(address, place, whole_size)
            except FileNotFoundError:
                # Not fetched yet, or evicted between two reads.
                self._fetch(address, place, whole_size)
            except PermissionError as error:
                raise UserError(f"data.shard_cache: {place} cannot be read ({error.strerror})") from error
        raise UserError(f"{self.folder}: shards are evicted as fast as they are fetched; raise data.shard_cache_gib")

    def place(self, address: str, version: str) -> Path:
        """The path of a file's copy, whether it exists or not."""
        name = hashlib.sha256(f"{address}\0{version}".encode()).hexdigest()[:16]
        return self.folder / f"{name}-{address.rpartition('/')[2]}"

    def _fetch(self, address: str, place: Path, size: int | None) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / f".{place.name}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not _has_size(place, size):
                    self._remove_left_drafts()
                    draft = place.with_name(f".{place.name}.part")
                    files, path = file_system(address)
                    try:
                        attempt(f"fetching {address}", lambda: _download(files, path, draft, size))
                        self._make_room(draft.stat().st_size)
                        draft.rename(place)
                    finally:
                        draft.unlink(missing_ok=True)
        except FileNotFoundError:
            raise
        except OSError as error:
            free = shutil.disk_usage(self.folder).free if self.folder.is_dir() else 0
            raise UserError(
                f"data.shard_cache: {self.folder} cannot be written ({error.strerror or error}; "
                f"{free / 2**30:.1f} GiB free); choose another folder or a data.shard_cache_gib that fits"
            ) from error

    def _remove_left_drafts(self) -> None:
        """Remove partial files of killed processes: nobody holds their locks any more."""
        for draft in self.folder.iterdir():
            # Other processes fetch and remove files too, and some may belong to another user.
            with suppress(OSError):
                if _DRAFT.fullmatch(draft.name):
                    with draft.with_suffix(".lock").open("w") as lock:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        draft.unlink()

    def _make_room(self, size: int) -> None:
        if self.limit is None:
            return
        held = sorted(self._copies())
        total = size + sum(own for _, own, _ in held)
        for _, own, file in held:
            if total <= self.limit:
                return
            file.unlink(missing_ok=True)
            total -= own

    def _copies(self) -> Iterator[tuple[float, int, Path]]:
        """Time of the last use, bytes and path of each copy; ignores any other files."""
        for file in self.folder.iterdir():
            # Other processes evict files too.
            with suppress(FileNotFoundError):
                about = file.lstat()
                if _COPY.fullmatch(file.name) and stat.S_ISREG(about.st_mode):
                    yield about.st_mtime, about.st_size, file
