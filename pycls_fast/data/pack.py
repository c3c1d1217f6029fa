"""Makes packed datasets and checks any source: what `pycls-fast prepare` does.

Each process packs a whole shard, which has its final name once it is complete: after a kill the same command makes the
shards that are missing. The format is that of `sources/packed.py`.
"""

from __future__ import annotations

import hashlib
import io
import json
import multiprocessing
import os
import signal
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import forkserver, get_context, parent_process
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from PIL import ExifTags, Image

from pycls_fast.data.decode import DamagedImage, decode, decode_as_stored
from pycls_fast.data.sources.arrays import Texts
from pycls_fast.data.sources.base import Images
from pycls_fast.data.sources.packed import (
    ABOUT,
    ENTRY,
    NAME_ENDS,
    NAMES,
    RAW,
    TABLE,
    is_packed,
    open_packed_split,
    shard_file,
    write_about,
)
from pycls_fast.data.sources.progress import progress
from pycls_fast.errors import UserError
from pycls_fast.files import flush, flush_folder

R = TypeVar("R")

_PLAN = "plan.json"
_LARGEST_SIDE = 65_535
# At most so many files, each of which a reader keeps open.
_MOST_SHARDS = 128
_SMALLEST_SHARD = 256


@dataclass(frozen=True)
class PackSettings:
    """How images are stored.

    Args:
        short_side: larger images are scaled down to this many pixels on the short side, keeping proportions; None
            stores them as they are.
        quality: JPEG quality of the scaled images, 1 to 100.
        store: "encoded", or "raw" for decoded pixels.
        filter: the resampling filter.
        upright: turn raw pixels, which have no EXIF, as the file's orientation says. Encoded images keep the tag.
    """

    short_side: int | None = None
    quality: int = 95
    store: Literal["encoded", "raw"] = "encoded"
    filter: Literal["bilinear", "bicubic", "lanczos"] = "bicubic"
    upright: bool = False

    def describe(self) -> str:
        """A short description."""
        size = f"short side at most {self.short_side}" if self.short_side else "as they are"
        if self.store == RAW:
            return f"raw pixels{', turned by EXIF' if self.upright else ''}, {size}"
        return f"{size}, JPEG quality {self.quality}" if self.short_side else f"encoded, {size}"


@dataclass(frozen=True)
class PackedSplit:
    """Result of packing: images and bytes written, and (name, reason) of unusable images."""

    count: int
    size: int
    damaged: list[tuple[str, str]] = field(default_factory=list)
    is_new: bool = True
    """False if the split was already complete and nothing was done."""


class Damaged(NamedTuple):
    """An image that cannot be used."""

    position: int
    name: str
    reason: str


def pack(source: Images, folder: Path, settings: PackSettings, *, workers: int, title: str) -> PackedSplit:
    """Write a split; a finished one is left as it is.

    Damaged images are left out and reported; without `short_side` and "raw" nothing is decoded, so only unreadable ones
    are found.

    Args:
        folder: the split's, e.g. OUT/train.
        workers: processes that read, resize and encode.

    Raises:
        UserError: the folder holds something else, no image can be read, or the disk is full.
    """
    plan = _plan(source, settings)
    try:
        if is_packed(folder):
            return _finished(folder, plan)
        folder.mkdir(parents=True, exist_ok=True)
        _begin(folder, plan)
        shards = _shards(len(source))
        left = [number for number in range(len(shards)) if not _part(folder, number).is_file()]
        work = partial(_pack_shard, folder=folder, settings=settings, shards=shards)
        with progress(title, len(source), "images") as advance:
            advance(len(source) - sum(len(shards[number]) for number in left))
            for count in in_processes(work, source, left, workers):
                advance(count)
        return _finish(source, folder, plan, settings, len(shards))
    except OSError as error:
        raise UserError(
            f"output: {folder} cannot be written ({error.strerror or error}); run the same command again to resume"
        ) from error


def verify(source: Images, *, workers: int, title: str) -> Iterator[Damaged]:
    """Read and decode every image, in the source's order; yield those that a run would skip.

    Args:
        workers: processes.
        title: title of the progress bar.
    """
    shards = _shards(len(source))
    with progress(title, len(source), "images") as advance:
        for shard, found in zip(shards, in_processes(_check_shard, source, shards, workers), strict=True):
            advance(len(shard))
            yield from found


def _shards(count: int) -> list[range]:
    """The positions of each shard."""
    size = max(-(-count // _MOST_SHARDS), _SMALLEST_SHARD)
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def _part(folder: Path, number: int) -> Path:
    """The table of a finished shard: its entries, and the damaged images."""
    return folder / f"{number:05d}.npz"


def _plan(source: Images, settings: PackSettings) -> dict[str, Any]:
    """What is packed and how; only the same plan can be resumed. Takes some seconds for a million images."""
    digest = hashlib.sha256()
    for index in range(len(source)):
        digest.update(source.name(index).encode("utf-8", "surrogateescape") + b"\0")
    digest.update(source.labels.astype("<i8").tobytes())
    digest.update(json.dumps([len(source), list(source.classes), asdict(settings)]).encode())
    return {"settings": asdict(settings), "digest": digest.hexdigest(), "source": source.describe()}


def _begin(folder: Path, plan: dict[str, Any]) -> None:
    """Write the plan of a new packing, or check that the one begun here has this plan."""
    file, draft = folder / _PLAN, folder / f"{_PLAN}.part"
    if not file.is_file():
        if {entry.name for entry in folder.iterdir()} - {draft.name}:
            raise UserError(f"output: {folder} is not empty and holds no packed images; choose another output")
        draft.write_text(json.dumps(plan), encoding="utf-8")
        draft.rename(file)
    _check_plan(folder, json.loads(file.read_text(encoding="utf-8"))["digest"], plan)


def _finished(folder: Path, plan: dict[str, Any]) -> PackedSplit:
    about = open_packed_split(folder).about
    _check_plan(folder, about["plan"], plan)
    size = sum(shard_file(folder, number).stat().st_size for number in range(len(about["shards"])))
    return PackedSplit(about["count"], size, [(name, reason) for name, reason in about["damaged"]], is_new=False)


def _check_plan(folder: Path, digest: str, plan: dict[str, Any]) -> None:
    if digest != plan["digest"]:
        raise UserError(
            f"output: {folder} holds another packing: names, labels or settings differ; remove it, or choose another"
        )


def _pack_shard(source: Images, number: int, *, folder: Path, settings: PackSettings, shards: Sequence[range]) -> int:
    """Write the images of a shard, then its table; the number of its positions."""
    file, part = shard_file(folder, number), _part(folder, number)
    drafts = [path.with_name(f"{path.name}.{os.getpid()}.part") for path in (file, part)]
    entries, damaged = [], []
    with drafts[0].open("wb") as images:
        for index in shards[number]:
            try:
                image = store(source, index, settings)
            except OSError as error:
                damaged.append((source.name(index), f"cannot be read: {error.strerror or error}"))
            except DamagedImage as error:
                damaged.append((source.name(index), error.reason))
            else:
                data, label, height, width = image
                entries.append((index, (images.tell(), len(data), zlib.crc32(data), label, height, width)))
                images.write(data)
        flush(images)
    with drafts[1].open("wb") as table:
        np.savez(
            table,
            table=np.array([entry for _, entry in entries], dtype=ENTRY),
            indices=np.array([index for index, _ in entries], dtype=np.int64),
            damaged=np.frombuffer(json.dumps(damaged).encode(), np.uint8),
        )
        flush(table)
    drafts[0].rename(file)
    drafts[1].rename(part)
    return len(shards[number])


def store(source: Images, index: int, settings: PackSettings) -> tuple[bytes, int, int, int]:
    """One image as it will be stored, its label, and the height and width of raw pixels (else 0).

    Raises:
        OSError: it cannot be read.
        DamagedImage: it cannot be stored.
    """
    data, label = source.read(index)
    if settings.store == "encoded" and settings.short_side is None and isinstance(data, bytes):
        if not data:
            raise DamagedImage("the file is empty (0 bytes)")
        return data, label, 0, 0
    if settings.store == RAW:
        small = _shrink(decode(data, upright=settings.upright), settings)
        if max(small.size) > _LARGEST_SIDE:
            raise DamagedImage(f"{small.width} x {small.height} pixels do not fit the format; use short_side")
        return small.tobytes(), label, small.height, small.width
    buffer = io.BytesIO()
    if isinstance(data, np.ndarray):
        # Arrays had no loss before, and are small.
        _shrink(decode(data), settings).save(buffer, "PNG")
        return buffer.getvalue(), label, 0, 0
    image, orientation = decode_as_stored(data)
    small = _shrink(image, settings)
    if small is image:
        # Encoding it again would only lose quality.
        return data, label, 0, 0
    options: dict[str, Any] = {}
    if orientation != 1:
        # Whether it is followed is the choice of the run that reads the image.
        options["exif"] = Image.Exif()
        options["exif"][ExifTags.Base.Orientation] = orientation
    small.save(buffer, "JPEG", quality=settings.quality, optimize=False, **options)
    return buffer.getvalue(), label, 0, 0


def _shrink(image: Image.Image, settings: PackSettings) -> Image.Image:
    if settings.short_side is None or min(image.size) <= settings.short_side:
        return image
    width, height = image.size
    scale = settings.short_side / min(width, height)
    size = (max(round(width * scale), 1), max(round(height * scale), 1))
    return image.resize(size, Image.Resampling[settings.filter.upper()])


def _finish(source: Images, folder: Path, plan: dict[str, Any], settings: PackSettings, shards: int) -> PackedSplit:
    """Put the shards' tables together; the file that makes the split complete comes last."""
    parts = []
    for number in range(shards):
        with np.load(_part(folder, number)) as part:
            parts.append(dict(part))
    damaged = [tuple(pair) for part in parts for pair in json.loads(part["damaged"].tobytes())]
    table = np.concatenate([part["table"] for part in parts])
    if not len(table):
        # So that the same command reads them again, once the disk is mounted or the permissions are right.
        _remove(folder, "*.bin", "*.npz", "*.part", _PLAN)
        raise UserError(f"{source.describe()}: no image can be read", *(f"{n}: {r}" for n, r in damaged[:3]))
    # Without the folders that all names share, which mean nothing elsewhere.
    above = _common_start([source.name(0), source.name(len(source) - 1)])
    indices = np.concatenate([part["indices"] for part in parts]).tolist()
    names = (source.name(index).removeprefix(above) for index in indices)
    texts = Texts.of(name.encode("utf-8", "surrogateescape") for name in names)
    for name, array in ((TABLE, table), (NAMES, texts.data), (NAME_ENDS, texts.ends)):
        with (folder / name).open("wb") as written:
            np.save(written, array)
            flush(written)
    counts = [len(part["table"]) for part in parts]
    more = {**plan["settings"], "shards": counts, "plan": plan["digest"], "damaged": damaged}
    draft = folder / f"{ABOUT}.part"
    write_about(draft, classes=source.classes, count=len(table), how=settings.describe(), settings=more)
    draft.rename(folder / ABOUT)
    flush_folder(folder)
    _remove(folder, "*.npz", "*.part", _PLAN)
    return PackedSplit(len(table), int(table["size"].sum()), damaged)


def _remove(folder: Path, *patterns: str) -> None:
    for pattern in patterns:
        for file in folder.glob(pattern):
            file.unlink(missing_ok=True)


def _common_start(names: list[str]) -> str:
    """The folders that these names (the first and the last) have in common, with a trailing slash."""
    folders = [name.rpartition("/")[0] for name in names]
    # A table may have relative paths and absolute ones.
    is_one_kind = len({name.startswith("/") for name in names}) == 1
    above = os.path.commonpath(folders) if is_one_kind and all(folders) else ""
    return f"{above}/" if above else ""


def _check_shard(source: Images, shard: Sequence[int]) -> list[Damaged]:
    found = ((index, _check(source, index)) for index in shard)
    return [Damaged(index, source.name(index), reason) for index, reason in found if reason is not None]


def _check(source: Images, index: int) -> str | None:
    try:
        data, label = source.read(index)
        if not source.checksum_holds(index):
            return "the stored bytes are not those that were packed (checksum)"
        decode(data)
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    except DamagedImage as error:
        return error.reason
    return None if 0 <= label < len(source.classes) else f"the label {label} is none of {len(source.classes):,} classes"


_worker: tuple[Callable[[Images, Any], Any], Images] | None = None


def in_processes(
    function: Callable[[Images, Any], R], source: Images, jobs: Sequence[Any], workers: int
) -> Iterator[R]:
    """Yield function(source, job) for every job, in order.

    Args:
        function: a module's function or a `functools.partial` of one.
        workers: processes; a single job or worker runs in this one.

    Raises:
        UserError: a process died.
    """
    if min(workers, len(jobs)) < 2:
        yield from (function(source, job) for job in jobs)
        return
    # Forks of this process may hang: it has threads (the bar, torch).
    forkserver.set_forkserver_preload(["pycls_fast.data.pack"])
    arguments = (function, source)
    pool = ProcessPoolExecutor(min(workers, len(jobs)), get_context("forkserver"), _start, arguments)
    try:
        for future in [pool.submit(_run, job) for job in jobs]:
            yield future.result()
    except BrokenProcessPool as error:
        raise UserError(
            "a process that reads images died, most likely because memory ran out; lower data.num_workers"
        ) from error
    finally:
        # If this is interrupted, nobody waits for the shards in progress.
        for process in multiprocessing.active_children():
            process.terminate()
        pool.shutdown()


def _start(function: Callable[[Images, Any], Any], source: Images) -> None:
    global _worker
    # Launchers and terminals signal all processes; only the main process decides what follows.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = (function, source)


def _end_with_parent() -> None:
    """End this process with its parent: holding both ends of its queue, it would wait forever for a killed one."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run(job: Any) -> Any:
    assert _worker is not None
    function, source = _worker
    return function(source, job)
