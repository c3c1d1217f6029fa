"""Arrays in place of Python lists: shared by all workers of a machine, mapped from disk if they are large."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class _Place(NamedTuple):
    """Where a mapped array lies on disk."""

    filename: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int


class Mapped:
    """Pickles file locations instead of memory-mapped arrays, which are mapped again on unpickling."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: _place(value) if isinstance(value, np.memmap) else value for name, value in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(
            {
                name: np.memmap(value.filename, value.dtype, "r", value.offset, value.shape)
                if isinstance(value, _Place)
                else value
                for name, value in state.items()
            }
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

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        start = self.ends[index - 1] if index > 0 else 0
        return os.fsdecode(self.data[start : self.ends[index]].tobytes())


def _place(array: np.memmap) -> _Place | np.ndarray:
    # A slice of a mapped array has the file's name, but not its own offset.
    if array.filename is None or isinstance(array.base, np.ndarray):
        return np.array(array)
    return _Place(str(array.filename), array.dtype, array.shape, array.offset)


def map_array(path: Path) -> np.ndarray:
    """Map the array in a `.npy` file into memory, read-only.

    Raises:
        ValueError: the file does not hold such an array.
    """
    # An empty array cannot be mapped.
    try:
        return np.load(path, mmap_mode="r" if path.stat().st_size > 128 else None, allow_pickle=False)
    except EOFError as error:
        raise ValueError(f"{path} is empty") from error
