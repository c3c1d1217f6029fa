"""The packed format: the images of a split end to end in a few files, and a table of where each one is.

    ROOT/train/00000.bin ...  the images: encoded files, or (raw) uint8 pixels, rows of columns of RGB
    ROOT/train/table.npy      one `ENTRY` per image, shard after shard
    ROOT/train/names.npy      the images' original names, UTF-8, end to end
    ROOT/train/name_ends.npy  int64, where each name ends
    ROOT/train/about.json     format and version, class names, images of each shard, how it was made

An image is one `pread`. The small files are mapped into memory; the images are not: the page tables of every worker
would grow with them, a fault reads far more around a single image, and a disk's error would end the process.
`pycls-fast prepare pack` writes it (`pycls_fast/data/pack.py`).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt

from pycls_fast.data.source import Opening, Source
from pycls_fast.data.sources.arrays import Mapped, OpenFiles, Texts, map_array
from pycls_fast.data.sources.base import Images
from pycls_fast.data.sources.splits import as_splits
from pycls_fast.errors import UserError
from pycls_fast.files import flush
from pycls_fast.reading import check, read_json

FORMAT, VERSION = "pycls_fast packed images", 2
TABLE, NAMES, NAME_ENDS, ABOUT = "table.npy", "names.npy", "name_ends.npy", "about.json"

ENTRY = np.dtype(
    [
        ("offset", "<u8"),
        ("size", "<u4"),
        ("crc32", "<u4"),
        ("label", "<i4"),
        # Size of raw images, else 0.
        ("height", "<u2"),
        ("width", "<u2"),
    ]
)
"""An entry of the table: 24 bytes."""

RAW = "raw"


def shard_file(folder: Path, number: int) -> Path:
    """The file with the images of a shard."""
    return folder / f"{number:05d}.bin"


class PackedImages(Images, Mapped):
    """The images of one packed split."""

    def __init__(self, folder: Path, about: dict[str, Any], table: np.ndarray, names: Texts) -> None:
        """
        Args:
            table: array of dtype `ENTRY`.
        """
        self.folder = folder
        self.about = about
        self.classes: tuple[str, ...] = tuple(about["classes"])
        self.labels = np.array(table["label"])
        self._is_raw = about["store"] == RAW
        self._table = table
        self._names = names
        self._ends = np.cumsum(about["shards"])
        self._files = OpenFiles()

    def read(self, index: int) -> tuple[bytes | np.ndarray, int]:
        offset, size, _, label, height, width = self._table[index].item()
        stored = self._files.read(self._shard(index), offset, size)
        if self._is_raw:
            if size != height * width * 3:
                raise OSError(f"{size:,} bytes are no {height} x {width} pixels")
            return np.frombuffer(stored, np.uint8).reshape(height, width, 3), label
        return stored, label

    def checksum_holds(self, index: int) -> bool:
        """Whether the stored bytes are those that were packed."""
        offset, size, crc32, *_ = self._table[index].item()
        return zlib.crc32(self._files.read(self._shard(index), offset, size)) == crc32

    def _shard(self, index: int) -> str:
        return str(shard_file(self.folder, int(np.searchsorted(self._ends, index, side="right"))))

    def name(self, index: int) -> str:
        return f"{self.folder}[{index}: {self._names[index]}]"

    def name_hashes(self) -> np.ndarray:
        return self._names.hashes()

    def describe(self) -> str:
        what = f"{len(self):,} packed images of {len(self.classes):,} classes"
        size = int(self._table["size"].sum(dtype=np.int64))
        return f"{what} ({self.about['how']}, {size / 2**30:.2f} GiB) in {self.folder}"


def is_packed(folder: Path) -> bool:
    """Whether a folder holds a packed split."""
    return (folder / ABOUT).is_file() and (folder / TABLE).is_file()


def open_packed(root: str | Path, data: Source, how: Opening) -> dict[str, Images]:
    """The packed splits below a folder: `train/` and `val/` (and `test/`), or only one, which is split at random.

    Raises:
        UserError: no packed split there, a half-written or damaged one.
    """
    root = Path(root)
    folders = {split: root / split for split in ("train", "val", "test", "all") if is_packed(root / split)}
    if not folders:
        raise UserError(
            f"{root} is no folder above packed splits; make them with pycls-fast prepare pack, which resumes an "
            "unfinished one (data/README.md)"
        )
    opened: dict[str, Images] = {split: open_packed_split(folder) for split, folder in folders.items()}
    return as_splits(opened, data, how, where=str(root))


class _About(BaseModel):
    """What is read of `ABOUT`."""

    model_config = ConfigDict(strict=True)
    classes: list[str]
    count: PositiveInt
    shards: list[NonNegativeInt]
    how: str
    store: str


def open_packed_split(folder: Path) -> PackedImages:
    """Open one packed split.

    Raises:
        UserError: files that are missing, of another version, or cut off.
    """
    try:
        about = read_json(folder / ABOUT)
        if about["format"] != FORMAT or about["version"] != VERSION:
            raise ValueError(f"{about['format']!r} version {about['version']} instead of {VERSION}")
        check(_About, about)
        table = map_array(folder / TABLE)
        names = Texts(map_array(folder / NAMES), map_array(folder / NAME_ENDS))
        counts = {len(table), len(names), about["count"], sum(about["shards"])}
        if table.dtype != ENTRY or len(counts) > 1 or not len(table):
            raise ValueError(f"{TABLE} does not fit {ABOUT}")
        names.check()
        if table["label"].min() < -1 or table["label"].max() >= len(about["classes"]):
            raise ValueError(f"{TABLE} has labels of no class")
        for number, end in enumerate(np.cumsum(about["shards"]).tolist()):
            file, last = shard_file(folder, number), table[end - 1]
            needed = int(last["offset"]) + int(last["size"]) if about["shards"][number] else 0
            if file.stat().st_size != needed:
                raise ValueError(f"{file.name} should have {needed:,} bytes")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder} is not a complete packed split ({error}); copy or pack it again") from error
    return PackedImages(folder, about, table, names)


def write_about(file: Path, *, classes: Sequence[str], count: int, how: str, settings: dict[str, Any]) -> None:
    """Write the last file of a split: under its final name, `ABOUT`, it marks the split as complete."""
    about = {
        "format": FORMAT,
        "version": VERSION,
        "count": count,
        "how": how,
        **settings,
        "classes": list(classes),
    }
    # Bytes of names that are not valid UTF-8 become JSON escapes, and are read back unchanged.
    with file.open("w", encoding="utf-8", errors="backslashreplace") as written:
        written.write(json.dumps(about, indent=1, ensure_ascii=False) + "\n")
        flush(written)
