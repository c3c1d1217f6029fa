"""The interface of datasets of every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from pycls_fast.data.sources.shards import CopiedShards


class Source(Protocol):
    """Encoded images with labels, by position.

    A source is copied or forked into every data worker: it pickles no open files and holds no long Python lists,
    whose reference counts would make each worker copy them page by page.
    """

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names; the label is the position."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[bytes | np.ndarray, int]:
        """The encoded image, or a decoded `uint8` array (height, width, 3), and its label.

        Raises:
            OSError: when the image cannot be read.
        """

    def name(self, index: int) -> str:
        """What to call the image in messages, e.g. its path."""

    def describe(self) -> str:
        """One readable line: how much of what, from where."""


class LabelledSource(Source, Protocol):
    """A source that knows all its labels without reading an image."""

    @property
    def labels(self) -> np.ndarray:
        """One integer per image."""


def name_hashes(source: Source) -> np.ndarray | None:
    """A hash of each image's name, uint64; None if images have only numbers.

    The name is the layout's: the path below the root, as a table writes it, or the key in a shard.
    """
    hashes: Callable[[], np.ndarray | None] | None = getattr(source, "name_hashes", None)
    return None if hashes is None else hashes()


def is_drawn(source: Source) -> bool:
    """Whether a random split drew these images from a larger source."""
    return bool(getattr(source, "drawn", False))


def block_ends(source: Source) -> np.ndarray | None:
    """The end of each block of neighbouring images (a tar shard), int64.

    None for a source that is equally fast in any order.
    """
    return getattr(source, "block_ends", None)


def copied_shards(source: Source) -> CopiedShards | None:
    """The remote shards that local copies are kept of; None if there are none."""
    return getattr(source, "copied_shards", None)


def checksum_holds(source: Source, index: int) -> bool:
    """Whether the stored image is the one that was packed; also True for a source without checksums.

    Raises:
        OSError: when the image cannot be read.
    """
    holds = getattr(source, "checksum_holds", None)
    return holds is None or bool(holds(index))


def prefers_blocks(source: Source) -> bool:
    """Whether reading in an order that jumps between blocks is slow, as it is over a network."""
    return bool(getattr(source, "prefers_blocks", False))
