"""Labelled images by position: the base class of every layout, and a part of another source."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pycls_fast.data.sources.texts import Texts
from pycls_fast.errors import UserError, first_few


def checksum(integers: Any) -> str:
    """A CRC-32 of whole numbers, as 8 hexadecimal digits."""
    return f"{zlib.crc32(np.ascontiguousarray(integers, np.int64).tobytes()):08x}"


def number_groups(values: Sequence[object]) -> np.ndarray:
    """`Images.groups` for what the images share, numbered in the order of its text; int64."""
    return np.unique([str(value).strip() for value in values], return_inverse=True)[1]


class Labels(NamedTuple):
    """Labels as `Images` has them."""

    classes: tuple[str, ...]
    numbers: np.ndarray
    """int32, one per image."""
    sets: np.ndarray | None = None
    """`Images.label_sets`."""


class Images:
    """Labelled images by position.

    A source is copied or forked into every data worker: it pickles no open files and holds no long Python lists,
    whose reference counts would make each worker copy them page by page.

    Attributes:
        where: what to call the source in messages, such as its path.
        classes: class names; the label is the position.
        labels: one integer per image, -1 where there is none.
        label_sets: if images have several labels, bool (L, K): each label of `labels` is one of L sets of classes; None
            if it is a class.
        groups: an integer per image, equal for those that share their `data.group_by`; None if no column says it.
        drawn: whether a random split drew the images from a larger source.
        block_ends: int64, the end of each block of neighbouring images (a tar shard); None for a source that is
            equally fast in any order.
        prefers_blocks: whether reading in an order that jumps between blocks is slow, as it is over a network.
    """

    where = ""
    classes: tuple[str, ...]
    labels: np.ndarray
    label_sets: np.ndarray | None = None
    groups: np.ndarray | None = None
    drawn = False
    block_ends: np.ndarray | None = None
    prefers_blocks = False
    _texts: Texts | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def class_counts(self) -> np.ndarray:
        """The number of images of each class, (K,)."""
        if self.label_sets is not None:
            return np.bincount(self.labels, minlength=len(self.label_sets)) @ self.label_sets
        return np.bincount(self.labels, minlength=len(self.classes))

    def classes_of(self, index: int) -> frozenset[str]:
        """The names of the image's classes, any number if it has several labels."""
        label = int(self.labels[index])
        own = [label] if self.label_sets is None else np.flatnonzero(self.label_sets[label]).tolist()
        return frozenset(self.classes[k] for k in own)

    def read(self, index: int) -> bytes | np.ndarray:
        """The encoded image, or a decoded `uint8` array (height, width, 3).

        Raises:
            OSError: when the image cannot be read.
        """
        raise NotImplementedError

    def name(self, index: int) -> str:
        """What to call the image in messages, e.g. its path."""
        return f"{self.where}[{index}]"

    def own_name(self, index: int) -> str | None:
        """The image's name as `name_hashes` has it; None if images have only numbers."""
        return None if self._texts is None else self._texts[index]

    def describe(self) -> str:
        """One readable line: how much of what, from where."""
        place = f" in {self.where}" if self.where else ""
        return f"{len(self):,} images of {len(self.classes):,} classes{place}"

    def name_hashes(self) -> np.ndarray | None:
        """A hash of each image's name, uint64; None if images have only numbers.

        The name is the layout's: the path below the root, as a table writes it, or the key in a shard.
        """
        return None if self._texts is None else self._texts.hashes()

    def names_id(self) -> str:
        """Identifies the images' names in their order: "names-" and a checksum.

        "numbers-" if they have none, with the checksum of their positions if they are a part of a larger source. Takes
        2 s for 14 million images.
        """
        hashes = self.name_hashes()
        return f"numbers-{checksum(getattr(self, 'rows', ()))}" if hashes is None else f"names-{checksum(hashes)}"

    def origin(self, indices: np.ndarray) -> tuple[Images, np.ndarray]:
        """The source that stores the images, and their positions there."""
        return self, indices


class Subset(Images):
    """The images of a source at given positions, in that order, perhaps with other labels."""

    def __init__(
        self,
        source: Images,
        rows: np.ndarray | None = None,
        *,
        drawn: bool | None = None,
        classes: Sequence[str] | None = None,
        new_label: np.ndarray | None = None,
        label_sets: np.ndarray | None = None,
    ) -> None:
        """None is as in the source; `new_label` has the new label for each label of it."""
        rows = np.arange(len(source)) if rows is None else rows
        self.source = source
        self.drawn = source.drawn if drawn is None else drawn
        # Half the memory, and wide enough for four billion images.
        self.rows = rows.astype(np.uint32)
        self.classes = source.classes if classes is None else tuple(classes)
        labels = source.labels[self.rows]
        self.labels = labels if new_label is None else new_label[labels]
        self.label_sets = source.label_sets if label_sets is None else label_sets
        self.groups = None if source.groups is None else source.groups[self.rows]
        self.prefers_blocks = source.prefers_blocks
        ends = source.block_ends
        if ends is not None and not np.any(np.diff(rows.astype(np.int64)) < 0):
            inside = np.unique(np.searchsorted(self.rows, ends))
            self.block_ends = inside[inside > 0].astype(np.int64)

    def read(self, index: int) -> bytes | np.ndarray:
        return self.source.read(int(self.rows[index]))

    def name(self, index: int) -> str:
        return self.source.name(int(self.rows[index]))

    def own_name(self, index: int) -> str | None:
        return self.source.own_name(int(self.rows[index]))

    def name_hashes(self) -> np.ndarray | None:
        hashes = self.source.name_hashes()
        return None if hashes is None else hashes[self.rows]

    def origin(self, indices: np.ndarray) -> tuple[Images, np.ndarray]:
        return self.source.origin(self.rows[indices])

    def describe(self) -> str:
        whole = self.source.describe()
        return whole if len(self) == len(self.source) else f"{len(self):,} of {whole}"


def match_classes(source: Images, classes: Sequence[str], *, where: str, of: str) -> Images:
    """The source, relabelled by position in other `classes`.

    Args:
        where: the images' place, for messages.
        of: whose classes they are, for messages.

    Raises:
        UserError: there are images of a class that is not among them.
    """
    if source.classes == tuple(classes):
        return source
    # Purely numeric labels define all classes from 0 on, with images or without; in training they may be names.
    counts = source.class_counts()
    unknown = sorted({own for own, count in zip(source.classes, counts, strict=True) if count} - set(classes))
    if unknown:
        raise UserError(
            f"{where}: there are images of {first_few(unknown)}, but the classes of {of} are {first_few(classes)}; "
            "name the classes as there, or remove these images"
        )
    position = {name: label for label, name in enumerate(classes)}
    new_label = np.array([position.get(name, -1) for name in source.classes], dtype=np.int32)
    if source.label_sets is None:
        return Subset(source, classes=classes, new_label=new_label)
    moved = np.zeros((len(source.label_sets), len(classes)), dtype=bool)
    moved[:, new_label[new_label >= 0]] = source.label_sets[:, new_label >= 0]
    return Subset(source, classes=classes, label_sets=moved)
