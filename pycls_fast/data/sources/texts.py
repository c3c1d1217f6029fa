"""Many names in one array, and hashes of names."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable

import numpy as np

# FNV-1a, 64 bits (Fowler, Noll and Vo).
_FNV_START, _FNV_PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)
# Strings that are hashed at a time; the temporary arrays stay small.
_HASHED_TOGETHER = 1 << 16


def digest(text: str) -> str:
    """A hash of a text with names of files, as 16 hexadecimal digits."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


class Texts:
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
        held = list(strings)
        return cls(np.frombuffer(b"".join(held), np.uint8), np.cumsum([len(s) for s in held], dtype=np.int64))

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
