"""Files at addresses (`s3://`, `gs://`, `https://` ...) through fsspec."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

from pycls_fast.errors import UserError

_ATTEMPTS = 4
_FIRST_PAUSE = 0.5
_BLOCK = 8 * 2**20

T = TypeVar("T")

# A file system's connections and threads do not survive a fork: each process makes its own.
_file_systems: dict[tuple[int, str], Any] = {}


def is_remote(place: str) -> bool:
    """Whether a place is an address (`s3://...`) and not a path."""
    return "://" in place


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
    except (ImportError, ValueError) as error:
        raise UserError(f"{address}: fsspec cannot read {protocol}:// ({error})") from error


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
