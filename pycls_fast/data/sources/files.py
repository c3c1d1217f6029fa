"""Image files below a folder, with a given order and given labels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pycls_fast.data.sources.arrays import Mapped, Texts

EXTENSIONS = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
"""Extensions of image files, in any case."""
UNREAD_EXTENSIONS = (".heic", ".heif", ".avif", ".jp2", ".jxl", ".tga", ".dng", ".cr2", ".nef")
"""Extensions of image files in formats that are not read."""
SYSTEM_FOLDERS = frozenset(
    {"lost+found", "@eaDir", "#recycle", "__MACOSX", "$RECYCLE.BIN", "System Volume Information"}
)
"""Folders that file systems, network storage and archive programs create."""


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether the entry is a folder or a link to one that may hold data.

    Broken and circular links are not, nor folders that file systems, network storage (thumbnails in `@eaDir`) and
    archive programs create.
    """
    # Not `suppress`: it takes longer than everything else per entry, and there may be millions.
    try:
        return entry.is_dir() and entry.name not in SYSTEM_FOLDERS
    except OSError:
        return False


class FileSource(Mapped):
    """One file per image."""

    def __init__(self, root: Path, classes: Sequence[str], names: Texts, labels: np.ndarray) -> None:
        """
        Args:
            root: the folder that the names are relative to.
            classes: class names; the label is the position.
            names: paths of the files, absolute or relative to `root`.
            labels: int32, one per image.
        """
        self.root = root
        self.classes = tuple(classes)
        self.labels = labels
        self._names = names

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> tuple[bytes, int]:
        return Path(self.name(index)).read_bytes(), int(self.labels[index])

    def name(self, index: int) -> str:
        return str(self.root / self._names[index])

    def name_hashes(self) -> np.ndarray:
        return self._names.hashes()

    def describe(self) -> str:
        return f"{len(self):,} images of {len(self.classes):,} classes in {self.root}"
