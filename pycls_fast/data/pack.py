"""Makes packed datasets: what `pycls-fast prepare pack` does.

Each process packs one shard at a time. A shard's table gets its final name when it is complete: after a kill, the same
command makes only the shards that are missing. The format is that of `sources/packed.py`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import ExifTags, Image

from pycls_fast.data.loader import in_processes
from pycls_fast.data.progress import progress
from pycls_fast.data.sources.base import Images, checksum
from pycls_fast.data.sources.index import read_arrays, write_arrays
from pycls_fast.data.sources.packed import ENTRY, INDEX, RAW, VERSION, PackedImages, is_packed, shard_file
from pycls_fast.data.sources.texts import Texts
from pycls_fast.data.to_rgb import AS_STORED, Conversion, DamagedImage, decode, orientation_of, why
from pycls_fast.errors import UserError, refusing
from pycls_fast.files import flush

_PLAN = "plan.json"
# The most files of a split: a reader keeps each of them open.
_MOST_SHARDS = 128
_SMALLEST_SHARD = 256


@dataclass(frozen=True)
class PackSettings:
    """How images are stored."""

    short_side: int | None = None
    """Larger images are scaled down to this many pixels on the short side; None stores them as they are."""
    quality: int = 95
    """JPEG quality of the scaled images, 1 to 100."""
    store: Literal["encoded", "raw"] = "encoded"
    """As files, or as decoded pixels."""
    convert: Conversion = AS_STORED
    """For images whose pixels are stored or scaled; encoded ones keep their EXIF orientation."""

    def describe(self) -> str:
        size = f"short side at most {self.short_side}" if self.short_side else "as they are"
        if self.store == RAW:
            return f"raw pixels{', turned by EXIF' if self.convert.upright else ''}, {size}"
        return f"{size}, JPEG quality {self.quality}" if self.short_side else f"encoded, {size}"


def pack(source: Images, folder: Path, settings: PackSettings, *, workers: int, title: str) -> PackedImages:
    """Write a split into `folder`; a finished one is left as it is.

    Damaged images are left out and listed in `about`; without `short_side` and "raw" nothing is decoded, so only
    unreadable ones are found.

    Raises:
        UserError: the folder holds something else, no image can be read, or the disk is full.
    """
    plan = _plan(source, settings)
    with refusing(f"output: {folder} cannot be written", use="run the same command again to resume"):
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / _PLAN
        if not any(folder.iterdir()):
            file.write_text(json.dumps(plan))
        if is_packed(folder):
            begun = PackedImages(folder).about["plan"]
        else:
            begun = json.loads(file.read_text()) if file.is_file() else None
        if begun != plan:
            raise UserError(
                f"output: {folder} holds something else, or a packing of other names, labels or settings; remove it, "
                "or choose another"
            )
        if not is_packed(folder):
            shards = shards_of(len(source))
            left = [number for number in range(len(shards)) if not _part(folder, number).is_file()]
            work = partial(_pack_shard, folder=folder, settings=settings, shards=shards)
            with progress(title, len(source), "images") as advance:
                advance(len(source) - sum(len(shards[number]) for number in left))
                for count in in_processes(work, source, left, workers):
                    advance(count)
            _finish(source, folder, plan, settings, len(shards))
        # Of a finished packing, too: a kill may have left them.
        _remove_parts(folder)
        return PackedImages(folder)


def shards_of(count: int) -> list[range]:
    size = max(-(-count // _MOST_SHARDS), _SMALLEST_SHARD)
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def _part(folder: Path, number: int) -> Path:
    """The table of a finished shard: its entries, their positions in the source, and the damaged images."""
    return folder / f"{number:05d}.npz"


def _plan(source: Images, settings: PackSettings) -> str:
    """Identifies what is packed and how; only the same plan can be resumed."""
    names = [source.names_id(), source.name(0), source.name(len(source) - 1), list(source.classes)]
    names += [] if source.label_sets is None else [checksum(source.label_sets)]
    about = json.dumps([asdict(settings), len(source), checksum(source.labels), names])
    return hashlib.sha256(about.encode()).hexdigest()


def _pack_shard(source: Images, number: int, *, folder: Path, settings: PackSettings, shards: Sequence[range]) -> int:
    """Write the images of a shard, then its table; returns the number of images, damaged ones included."""
    entries, indices, damaged = [], [], []
    with shard_file(folder, number).open("wb") as images:
        for index in shards[number]:
            try:
                data, height, width = store(source, index, settings)
            except (OSError, DamagedImage) as error:
                damaged.append((source.name(index), why(error)))
            else:
                indices.append(index)
                entries.append((images.tell(), len(data), zlib.crc32(data), source.labels[index], height, width))
                images.write(data)
        flush(images)
    arrays = {"table": np.array(entries, dtype=ENTRY), "indices": np.array(indices, dtype=np.int64)}
    write_arrays(_part(folder, number), arrays, damaged)
    return len(shards[number])


def store(source: Images, index: int, settings: PackSettings) -> tuple[bytes, int, int]:
    """One image as it will be stored, and the height and width of raw pixels (else 0)."""
    data = source.read(index)
    if settings.store == "encoded" and settings.short_side is None and isinstance(data, bytes):
        if not data:
            raise DamagedImage("the file is empty (0 bytes)")
        return data, 0, 0
    if settings.store == RAW:
        small = _shrink(decode(data, settings.convert), settings)
        return small.tobytes(), small.height, small.width
    buffer = io.BytesIO()
    if isinstance(data, np.ndarray):
        # Arrays had no loss before, and are small.
        _shrink(decode(data), settings).save(buffer, "PNG")
        return buffer.getvalue(), 0, 0
    image = decode(data, settings.convert._replace(upright=False))
    small = _shrink(image, settings)
    if small is image:
        # Encoding it again would only lose quality.
        return data, 0, 0
    exif = Image.Exif()
    if (orientation := orientation_of(data)) != 1:
        # Whether it is followed is the choice of the run that reads the image.
        exif[ExifTags.Base.Orientation] = orientation
    small.save(buffer, "JPEG", quality=settings.quality, exif=exif or b"")
    return buffer.getvalue(), 0, 0


def _shrink(image: Image.Image, settings: PackSettings) -> Image.Image:
    if settings.short_side is None or min(image.size) <= settings.short_side:
        return image
    width, height = image.size
    scale = settings.short_side / min(width, height)
    size = (max(round(width * scale), 1), max(round(height * scale), 1))
    return image.resize(size, Image.Resampling.BICUBIC)


def _finish(source: Images, folder: Path, plan: str, settings: PackSettings, shards: int) -> None:
    """Put the shards' tables together; the file that makes the split complete comes last."""
    parts = [read_arrays(_part(folder, number)) for number in range(shards)]
    damaged = [(name, reason) for _, found in parts for name, reason in found]
    table = np.concatenate([arrays["table"] for arrays, _ in parts])
    if not len(table):
        # The same command can then read them again, once the disk is mounted or readable.
        _remove_parts(folder)
        for number in range(shards):
            shard_file(folder, number).unlink()
        raise UserError(f"{source.describe()}: no image can be read", *(f"{n}: {r}" for n, r in damaged[:3]))
    indices = np.concatenate([arrays["indices"] for arrays, _ in parts]).tolist()
    # Without the folders that all names share, which mean nothing elsewhere.
    folders = (source.name(index).split("/")[:-1] for index in (0, len(source) - 1))
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(*folders, strict=False))
    above = "".join(f"{folder}/" for folder, _ in shared)
    names = Texts.of(os.fsencode(source.name(index).removeprefix(above)) for index in indices)
    about = {
        "version": VERSION,
        "how": settings.describe(),
        "plan": plan,
        "damaged": damaged,
        "shards": [len(arrays["table"]) for arrays, _ in parts],
        "classes": list(source.classes),
        **asdict(settings),
    }
    arrays = {"table": table, "names": names.data, "name_ends": names.ends}
    arrays |= {} if source.label_sets is None else {"sets": source.label_sets}
    write_arrays(folder / INDEX, arrays, about)


def _remove_parts(folder: Path) -> None:
    for file in (*folder.glob("[0-9]*.npz"), *folder.glob(_PLAN)):
        file.unlink()
