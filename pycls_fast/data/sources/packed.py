"""The packed format: the images of a split end to end in a few files, and a table of where each one is.

    ROOT/train/00000.bin ...  the images: encoded files, or (raw) uint8 pixels, rows of columns of RGB
    ROOT/train/index.npz      `table`, one `ENTRY` per image, shard after shard; `names` and `name_ends`, the images'
                              original names; `sets`, if labels are sets of classes (`Images.label_sets`);
                              `about`, JSON: class names, images of each shard, how it was made

An image is one `pread`. The images are not mapped into memory: the page tables of every worker would grow with them, a
fault reads far more around a single image, and a disk's error would end the process. `pycls-fast prepare pack` writes
it (`pycls_fast/data/pack.py`).
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path

import numpy as np

from pycls_fast.data.sources.base import Images
from pycls_fast.data.sources.files import OpenFiles
from pycls_fast.data.sources.index import read_arrays
from pycls_fast.data.sources.texts import Texts
from pycls_fast.data.to_rgb import Conversion
from pycls_fast.errors import UserError, is_first_of_node, refusing

VERSION = 4
INDEX = "index.npz"

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
    return folder / f"{number:05d}.bin"


def is_packed(folder: Path) -> bool:
    return (folder / INDEX).is_file()


class PackedImages(Images):
    """The images of one packed split."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        what, again = f"{folder} is not a complete packed split", "copy or pack it again"
        with refusing(what, OSError, ValueError, LookupError, use=again):
            # Checked by its checksum.
            arrays, self.about = read_arrays(folder / INDEX)
            if self.about["version"] != VERSION:
                raise ValueError(f"version {self.about['version']} instead of {VERSION}")
            self._table = arrays["table"]
            self._texts: Texts = Texts(arrays["names"], arrays["name_ends"])
            self._ends = np.cumsum(self.about["shards"])
            self.label_sets = arrays.get("sets")
            for number, end in enumerate(self._ends.tolist()):
                file, last = shard_file(folder, number), self._table[end - 1]
                needed = int(last["offset"]) + int(last["size"]) if self.about["shards"][number] else 0
                if file.stat().st_size != needed:
                    raise ValueError(f"{file.name} should have {needed:,} bytes")
        self.classes: tuple[str, ...] = tuple(self.about["classes"])
        self.labels = np.array(self._table["label"])
        self._is_raw = self.about["store"] == RAW
        self._shards = [str(shard_file(folder, number)) for number in range(len(self._ends))]
        self._files = OpenFiles()

    def read(self, index: int) -> bytes | np.ndarray:
        offset, size, _, _, height, width = self._table[index].item()
        stored = self._stored(index, offset, size)
        return np.frombuffer(stored, np.uint8).reshape(height, width, 3) if self._is_raw else stored

    def is_as_packed(self, index: int) -> bool:
        """Whether the stored bytes have the checksum of those that were packed; only this sees a changed raw pixel."""
        offset, size, crc32, *_ = self._table[index].item()
        return zlib.crc32(self._stored(index, offset, size)) == crc32

    def _stored(self, index: int, offset: int, size: int) -> bytes:
        shard = self._shards[int(np.searchsorted(self._ends, index, side="right"))]
        return self._files.read(shard, offset, size)

    def name(self, index: int) -> str:
        return f"{self.folder}[{index}: {self._texts[index]}]"

    @property
    def size(self) -> int:
        """Bytes of all images."""
        return int(self._table["size"].sum(dtype=np.int64))

    def describe(self) -> str:
        what = f"{len(self):,} packed images of {len(self.classes):,} classes"
        return f"{what} ({self.about['how']}, {self.size / 1e6:,.1f} MB) in {self.folder}"


def open_packed(root: str | Path, convert: Conversion) -> dict[str, Images]:
    """The packed splits below a folder: `train/`, `val/`, `test/` and `all/`; a note if their pixels were converted
    otherwise than the run says, which its predictions follow."""
    folders = {split: Path(root) / split for split in ("train", "val", "test", "all")}
    opened = {split: PackedImages(folder) for split, folder in folders.items() if is_packed(folder)}
    if not opened:
        raise UserError(f"{root} holds no packed split; make them with pycls-fast prepare pack (data/README.md)")
    about = next(iter(opened.values())).about
    upright, on_white = about.get("convert") or convert
    is_raw = about["store"] == RAW
    is_scaled = about.get("short_side") is not None
    kept = Conversion(upright if is_raw else convert.upright, on_white if is_raw or is_scaled else convert.on_white)
    if kept != convert and is_first_of_node():
        keys = f"data.exif_orientation={json.dumps(kept.upright)} data.transparent={('drop', 'white')[kept.on_white]}"
        print(f"note: {root} was packed with {keys}; use the same, which predictions follow", file=sys.stderr)
    return {**opened}
