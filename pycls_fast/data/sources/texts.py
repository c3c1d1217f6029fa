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
        """Each string's FNV-1a hash, uint64; computed one byte of many strings at a time, the longest first."""
        found_N = np.empty(len(self), np.uint64)
        starts_N = np.append(0, self.ends[:-1])
        for first in range(0, len(self), _HASHED_TOGETHER):
            own = slice(first, first + _HASHED_TOGETHER)
            lengths_N = self.ends[own] - starts_N[own]
            order_N = np.argsort(-lengths_N, kind="stable")
            places_N, values_N = starts_N[own][order_N], np.full(len(order_N), _FNV_START, np.uint64)
            # How many strings have a byte at each place.
            counts = np.searchsorted(-lengths_N[order_N], -np.arange(lengths_N.max()), side="left")
            for place, count in enumerate(counts.tolist()):
                values_N[:count] = (values_N[:count] ^ self.data[places_N[:count] + place]) * _FNV_PRIME
            found_N[own][order_N] = values_N
        return found_N
