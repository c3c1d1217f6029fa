"""Arrays in place of Python lists: shared by all workers of a machine, mapped from disk if they are large."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from tokenize import TokenError
from typing import Any, NamedTuple

import numpy as np

from pycls_fast.errors import UserError

# FNV-1a, 64 bits (Fowler, Noll and Vo).
_FNV_START, _FNV_PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)
# Hashed at a time, so that the arrays in between stay small.
_HASHED_TOGETHER = 1 << 16


class _Place(NamedTuple):
    """Where a mapped array lies on disk."""

    filename: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    stamp: tuple[int, int] | None
    """Of the file when it was mapped, if that was done by `map_array`."""


class Mapped:
    """Pickles file locations instead of memory-mapped arrays, which are mapped again on unpickling.

    Unpickling raises a UserError if another file has taken the place of one that `map_array` mapped.
    """

    def __getstate__(self) -> dict[str, Any]:
        return {name: _place(value) if isinstance(value, np.memmap) else value for name, value in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(
            {name: _map_again(value) if isinstance(value, _Place) else value for name, value in state.items()}
        )


class Texts(Mapped):
    """Many short byte strings, end to end in one array.

    1.28 million file names take about 60 MB, once: an array stays shared after a fork, whereas a list of strings would
    be copied into every worker.
    """

    def __init__(self, data: np.ndarray, ends: np.ndarray) -> None:
        """
        Args:
            data: uint8, the strings.
            ends: int64, where each of them ends in `data`.
        """
        self.data = data
        self.ends = ends

    @classmethod
    def of(cls, strings: Iterable[bytes]) -> Texts:
        """Pack strings."""
        held = list(strings)
        return cls(np.frombuffer(b"".join(held), np.uint8), np.cumsum([len(s) for s in held], dtype=np.int64))

    @classmethod
    def join(cls, parts: Iterable[Texts]) -> Texts:
        """Concatenate several of them."""
        held = [part for part in parts if len(part)]
        if not held:
            return cls.of([])
        starts = np.cumsum([0, *(len(part.data) for part in held[:-1])])
        ends = [part.ends + start for part, start in zip(held, starts.tolist(), strict=True)]
        return cls(np.concatenate([part.data for part in held]), np.concatenate(ends))

    def check(self) -> None:
        """Check arrays that come from files.

        Raises:
            ValueError: the ends do not fit the data.
        """
        ends = self.ends
        fits = self.data.dtype == np.uint8 and ends.dtype.kind == "i" and self.data.ndim == ends.ndim == 1
        if not fits or (len(ends) and (ends[0] < 0 or ends[-1] != len(self.data) or np.any(ends[1:] < ends[:-1]))):
            raise ValueError("the names do not end where they should")

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        start = self.ends[index - 1] if index > 0 else 0
        return os.fsdecode(self.data[start : self.ends[index]].tobytes())

    def hashes(self) -> np.ndarray:
        """Each string's FNV-1a hash, uint64."""
        found = np.full(len(self), _FNV_START, np.uint64)
        start = 0
        for first in range(0, len(self), _HASHED_TOGETHER):
            ends = self.ends[first : first + _HASHED_TOGETHER]
            _hash_into(found[first : first + len(ends)], self.data, np.append(start, ends[:-1]), ends)
            start = ends[-1]
        return found


def _hash_into(hashes_N: np.ndarray, data: np.ndarray, starts_N: np.ndarray, ends_N: np.ndarray) -> None:
    """Continue the hashes with the strings, one byte of all of them at a time."""
    longest_first = np.argsort(starts_N - ends_N, kind="stable")
    values_N, places_N = hashes_N[longest_first], starts_N[longest_first]
    lengths_N = (ends_N - starts_N)[longest_first]
    # How many strings have a byte at each place.
    counts = np.searchsorted(-lengths_N, -np.arange(lengths_N[0]), side="left")
    for place, count in enumerate(counts.tolist()):
        values_N[:count] = (values_N[:count] ^ data[places_N[:count] + place]) * _FNV_PRIME
    hashes_N[longest_first] = values_N


def _place(array: np.memmap) -> _Place | np.ndarray:
    # A slice of a mapped array has the file's name, but not its own offset.
    if array.filename is None or isinstance(array.base, np.ndarray):
        return np.array(array)
    return _Place(str(array.filename), array.dtype, array.shape, array.offset, vars(array).get("stamp"))


def _map_again(place: _Place) -> np.memmap:
    # Labels and order of another index do not belong to the positions and classes that this process was given.
    if place.stamp is not None and place.stamp != _stamp(Path(place.filename)):
        raise UserError(
            f"data.index_cache: {place.filename} was rebuilt by another process while this one used it; start again"
        )
    array = np.memmap(place.filename, place.dtype, "r", place.offset, place.shape)
    vars(array)["stamp"] = place.stamp
    return array


def _stamp(path: Path) -> tuple[int, int]:
    """What differs for a file that has taken the place of another: inode and time of change."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def map_array(path: Path) -> np.ndarray:
    """Map the array in a `.npy` file into memory, read-only.

    Raises:
        ValueError: the file does not hold such an array.
    """
    # Before mapping: if the file is replaced between the two, unpickling fails instead of taking the new one.
    stamp = _stamp(path)
    # An empty array cannot be mapped.
    try:
        array: np.ndarray = np.load(path, mmap_mode="r" if path.stat().st_size > 128 else None, allow_pickle=False)
    except (EOFError, SyntaxError, TokenError, OverflowError, MemoryError) as error:
        raise ValueError(f"{path} holds no array ({error})") from error
    if isinstance(array, np.memmap):
        vars(array)["stamp"] = stamp
    return array


# Of each source in each process. Processes may have 1,024 files open by default.
_MOST = 256


class OpenFiles:
    """Reads pieces of files and keeps those open that were read last.

    Reads give positions instead of moving one, so processes may share what was open before a fork. A pickled copy has
    no open files. A file that is replaced while it is open is still read as it was.
    """

    def __init__(self) -> None:
        self._file = lru_cache(_MOST)(_File)

    def read(self, path: str, start: int, size: int) -> bytes:
        """`size` bytes of a file from `start` on.

        Raises:
            OSError: it cannot be opened or read, or ends before that.
        """
        file = self._file(path)
        try:
            data = os.pread(file.descriptor, size, min(start, sys.maxsize))
            if len(data) < size:
                raise OSError(f"{path} ends before the image does; was it replaced?")
        except OSError:
            # After a fault a network disk may accept only a new descriptor.
            self._file.cache_clear()
            raise
        return data

    def __reduce__(self) -> tuple[type[OpenFiles], tuple[()]]:
        return OpenFiles, ()


class _File:
    """A file, open as long as this object lives: a thread may still read what another one's read pushed out."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
