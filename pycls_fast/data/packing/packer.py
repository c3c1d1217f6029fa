"""Packing a source into the format of `sources/packed.py`; a killed run is resumed where it stopped."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from PIL import ExifTags, Image

from pycls_fast.data.decode import DamagedImage, decode, decode_as_stored
from pycls_fast.data.packing.workers import map_images
from pycls_fast.data.sources.arrays import Texts
from pycls_fast.data.sources.base import Source
from pycls_fast.data.sources.packed import ABOUT, ENTRY, IMAGES, NAME_ENDS, NAMES, RAW, TABLE, is_packed, write_about
from pycls_fast.data.sources.progress import progress
from pycls_fast.errors import UserError

_PLAN, _DRAFT_TABLE, _DAMAGED = "plan.json", "table.part", "damaged.part"
_DRAFT_PLAN, _LOCK = "plan.draft", "lock.part"
_LARGEST_SIDE = 65_535
_DURABLE_EVERY = 4096


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
class Packed:
    """Result of packing: images and bytes written, and (name, reason) of unusable images."""

    count: int
    size: int
    damaged: list[tuple[str, str]] = field(default_factory=list)
    is_new: bool = True
    """False if the split was already complete and nothing was done."""


class _Image(NamedTuple):
    """One image as it is stored; `reason` says why it cannot be."""

    data: bytes
    label: int
    height: int
    width: int
    reason: str = ""


def pack(source: Source, folder: Path, settings: PackSettings, *, workers: int, title: str) -> Packed:
    """Write a split. After a kill it resumes after the last complete image, or at the first image that was left out and
    can be read now; a finished split is left as it is.

    Damaged images are left out and reported; without `short_side` and "raw" nothing is decoded, so only unreadable ones
    are found.

    Args:
        folder: the split's, e.g. OUT/train.
        workers: processes that read, resize and encode.

    Raises:
        UserError: the folder holds something else, another process is packing into it, or the disk is full.
    """
    plan = _plan(source, settings)
    if is_packed(folder):
        return _finished(folder, plan)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_empty(folder)
        with _only_process(folder):
            if is_packed(folder):
                return _finished(folder, plan)
            _begin(folder, plan)
            return _write(source, folder, settings, plan, workers, title)
    except OSError as error:
        raise UserError(
            f"output: {folder} cannot be written ({error.strerror or error}); run the same command again to resume"
        ) from error


@contextmanager
def _only_process(folder: Path) -> Iterator[None]:
    """Keep other processes from packing into the folder; a kill leaves no lock."""
    with (folder / _LOCK).open("a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise UserError(f"output: another process is packing into {folder}; wait until it has finished") from error
        except OSError:
            # A file system without locks.
            pass
        yield


def _write(
    source: Source, folder: Path, settings: PackSettings, plan: dict[str, Any], workers: int, title: str
) -> Packed:
    images_path, table_path, log_path = folder / f"{IMAGES}.part", folder / _DRAFT_TABLE, folder / _DAMAGED
    damaged = _read_damaged(log_path)
    done, size = _whole_entries(images_path, table_path, damaged)
    readable = _first_readable(source, settings, sorted(index for index in damaged if index < done))
    if readable is not None:
        # From there on once more, so that the result is that of an undisturbed run.
        print(f"note: {source.name(readable)} was left out and can be read now; packing resumes there", file=sys.stderr)
        done, size = readable, int(np.fromfile(table_path, ENTRY, 1, offset=readable * ENTRY.itemsize)["offset"][0])
    kept = [_damaged_line(index, *found) for index, found in damaged.items() if index < done]
    log_path.write_text("".join(kept), encoding="utf-8")
    work = partial(_make, settings=settings)
    with (
        images_path.open("r+b") as images,
        table_path.open("r+b") as table,
        log_path.open("ab") as log,
        progress(title, len(source), "images") as advance,
    ):
        images.truncate(size)
        table.truncate(done * ENTRY.itemsize)
        images.seek(size)
        table.seek(done * ENTRY.itemsize)
        if done:
            advance(done)
        for index, image in map_images(source, work, start=done, workers=workers):
            size = images.tell()
            entry = (size, len(image.data), zlib.crc32(image.data), image.label, image.height, image.width)
            images.write(image.data)
            table.write(np.array([entry], dtype=ENTRY).tobytes())
            if image.reason:
                log.write(_damaged_line(index, source.name(index), image.reason).encode())
                # Before its entry, which without this line is taken for a lost image.
                log.flush()
            if (index + 1) % _DURABLE_EVERY == 0:
                # After a power cut the table must not describe images that were lost.
                _sync(images, log, table)
            advance(1)
        _sync(images, log, table)
    return _finish(source, folder, plan, settings)


def _first_readable(source: Source, settings: PackSettings, indices: list[int]) -> int | None:
    """The first of these images, which were left out, that can be stored now."""
    with progress("retry images that were left out", len(indices), "images") as advance:
        for index in indices:
            if not _make(source, index, settings=settings).reason:
                return index
            advance(1)
    return None


def _sync(*files: BinaryIO) -> None:
    """Force everything that was written to disk, file after file."""
    for file in files:
        file.flush()
        os.fsync(file.fileno())


def _finish(source: Source, folder: Path, plan: dict[str, Any], settings: PackSettings) -> Packed:
    """Put the final files in place, the one that makes the split complete last."""
    table = np.fromfile(folder / _DRAFT_TABLE, dtype=ENTRY)
    damaged = _read_damaged(folder / _DAMAGED)
    whole = np.flatnonzero(table["size"] > 0)
    if len(table) != len(source) or len(whole) + len(damaged) != len(table):
        raise UserError(
            f"output: {folder}: {len(whole):,} images and {len(damaged):,} damaged ones were written of "
            f"{len(source):,}; was the folder changed meanwhile? Remove it and pack it again"
        )
    if not len(whole):
        # So that the same command reads them again, once the disk is mounted or the permissions are right. The plan
        # after the others: without it they look like files of another program.
        for name in (f"{IMAGES}.part", _DRAFT_TABLE, _DAMAGED, _PLAN, _LOCK):
            (folder / name).unlink(missing_ok=True)
        raise UserError(
            f"{source.describe()}: no image can be read", *(f"{n}: {r}" for n, r in list(damaged.values())[:3])
        )
    # Without the folders that all names share, which mean nothing elsewhere.
    above = _common_start([source.name(0), source.name(len(source) - 1)])
    names = (source.name(int(index)).removeprefix(above) for index in whole)
    texts = Texts.of(name.encode("utf-8", "surrogateescape") for name in names)
    for file, array in ((TABLE, table[whole]), (NAMES, texts.data), (NAME_ENDS, texts.ends)):
        with (folder / file).open("wb") as written:
            np.save(written, array)
            _sync(written)
    about = {**plan["settings"], "plan": plan["digest"], "damaged": list(damaged.values())}
    draft = folder / f"{ABOUT}.part"
    write_about(draft, classes=source.classes, count=len(whole), how=settings.describe(), settings=about)
    (folder / f"{IMAGES}.part").rename(folder / IMAGES)
    draft.rename(folder / ABOUT)
    _sync_folder(folder)
    for name in (_PLAN, _DRAFT_TABLE, _DAMAGED, _LOCK):
        (folder / name).unlink(missing_ok=True)
    return Packed(len(whole), int(table["size"].sum()), list(damaged.values()))


def _sync_folder(folder: Path) -> None:
    """Force the names in a folder to disk; not every file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _damaged_line(index: int, name: str, reason: str) -> str:
    return json.dumps([index, name, reason]) + "\n"


def _read_damaged(log: Path) -> dict[int, tuple[str, str]]:
    """Name and reason of each damaged image by position; truncated lines are left out."""
    damaged: dict[int, tuple[str, str]] = {}
    for line in log.read_bytes().splitlines() if log.is_file() else ():
        with suppress(ValueError, TypeError):
            index, name, reason = json.loads(line)
            damaged[index] = (name, reason)
    return damaged


def _common_start(names: list[str]) -> str:
    """The folders that these names (the first and the last) have in common, with a trailing slash."""
    folders = [name.rpartition("/")[0] for name in names]
    # A table may have relative paths and absolute ones.
    is_one_kind = len({name.startswith("/") for name in names}) == 1
    above = os.path.commonpath(folders) if is_one_kind and all(folders) else ""
    return f"{above}/" if above else ""


def _plan(source: Source, settings: PackSettings) -> dict[str, Any]:
    """What is packed and how; only the same plan can be resumed. Takes some seconds for a million images."""
    digest = hashlib.sha256()
    for index in range(len(source)):
        digest.update(source.name(index).encode("utf-8", "surrogateescape") + b"\0")
    labels = getattr(source, "labels", None)
    if labels is not None:
        digest.update(np.asarray(labels, dtype="<i8").tobytes())
    digest.update(json.dumps([len(source), list(source.classes), asdict(settings)]).encode())
    return {"settings": asdict(settings), "digest": digest.hexdigest(), "source": source.describe()}


def _check_empty(folder: Path) -> None:
    """Check that the folder holds nothing but possibly the beginning of a packing."""
    names = {entry.name for entry in folder.iterdir()}
    is_ours = _is_plan(folder / _PLAN) if _PLAN in names else not names - {_DRAFT_PLAN, _LOCK}
    if not is_ours:
        raise UserError(f"output: {folder} is not empty and holds no packed images; choose another output")


def _is_plan(file: Path) -> bool:
    try:
        plan = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return True  # Another process has finished since the folder was listed.
    except ValueError:
        return False
    return isinstance(plan, dict) and {"digest", "source", "settings"} <= plan.keys()


def _begin(folder: Path, plan: dict[str, Any]) -> None:
    path = folder / _PLAN
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        if before["digest"] != plan["digest"]:
            raise UserError(
                f"output: {folder} holds the beginning of another packing ({before['source']}, {before['settings']}): "
                "names, labels or settings differ; remove it, or choose another output"
            )
    else:
        # First, so that a full disk or a kill leaves a folder in which the same command can start again.
        draft = folder / _DRAFT_PLAN
        with draft.open("w", encoding="utf-8") as written:
            written.write(json.dumps(plan))
            written.flush()
            os.fsync(written.fileno())
        draft.rename(path)
    images = folder / f"{IMAGES}.part"
    if not images.exists() and (folder / IMAGES).exists():
        # The last run was killed between the last two renames.
        (folder / IMAGES).rename(images)
    for file in (images, folder / _DRAFT_TABLE):
        file.touch()


def _finished(folder: Path, plan: dict[str, Any]) -> Packed:
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"output: {folder / ABOUT} is damaged ({error}); remove {folder} and pack it again") from error
    if about["plan"] != plan["digest"]:
        raise UserError(
            f"output: {folder} already holds other packed images ({about['how']}, {about['count']:,}): "
            "names, labels or settings differ; remove it, or choose another output"
        )
    damaged = [tuple(pair) for pair in about["damaged"]]
    return Packed(about["count"], (folder / IMAGES).stat().st_size, damaged, is_new=False)


def _whole_entries(images: Path, table: Path, damaged: Mapping[int, object]) -> tuple[int, int]:
    """The number of entries of a possibly truncated table whose images are stored, and where these end.

    Args:
        damaged: the positions of the entries without an image.
    """
    entries = np.fromfile(table, dtype=ENTRY, count=table.stat().st_size // ENTRY.itemsize)
    sizes = entries["size"].astype(np.int64)
    ends = np.cumsum(sizes)
    has_image = sizes > 0
    has_image[[index for index in damaged if index < len(entries)]] = True
    is_whole = has_image & (entries["offset"] == ends - sizes) & (ends <= images.stat().st_size)
    count = len(entries) if is_whole.all() else int(np.argmin(is_whole))
    # After a power cut a file may have its length, but not its content, from the last `_sync` on.
    first = max(count - 1, 0) // _DURABLE_EVERY * _DURABLE_EVERY
    with images.open("rb") as file:
        file.seek(int(ends[first] - sizes[first]) if count else 0)
        for done in range(first, count):
            if zlib.crc32(file.read(int(sizes[done]))) != int(entries[done]["crc32"]):
                count = done
                break
    return count, int(ends[count - 1]) if count else 0


def _make(source: Source, index: int, *, settings: PackSettings) -> _Image:
    """One image as it will be stored."""
    try:
        data, label = source.read(index)
        if settings.store == "encoded" and settings.short_side is None and isinstance(data, bytes):
            if not data:
                raise DamagedImage("the file is empty (0 bytes)")
            return _Image(data, label, 0, 0)
        if settings.store == RAW:
            small = _shrink(decode(data, upright=settings.upright), settings)
            if max(small.size) > _LARGEST_SIDE:
                raise DamagedImage(f"{small.width} x {small.height} pixels do not fit the format; use short_side")
            return _Image(small.tobytes(), label, small.height, small.width)
        if isinstance(data, np.ndarray):
            return _Image(_encode_losslessly(_shrink(decode(data), settings)), label, 0, 0)
        image, orientation = decode_as_stored(data)
        small = _shrink(image, settings)
        # If it is small enough, encoding it again would only lose quality.
        return _Image(data if small is image else _encode(small, orientation, settings), label, 0, 0)
    except OSError as error:
        return _Image(b"", -1, 0, 0, f"cannot be read: {error.strerror or error}")
    except DamagedImage as error:
        return _Image(b"", -1, 0, 0, error.reason)


def _shrink(image: Image.Image, settings: PackSettings) -> Image.Image:
    if settings.short_side is None or min(image.size) <= settings.short_side:
        return image
    width, height = image.size
    scale = settings.short_side / min(width, height)
    size = (max(round(width * scale), 1), max(round(height * scale), 1))
    return image.resize(size, Image.Resampling[settings.filter.upper()])


def _encode(image: Image.Image, orientation: int, settings: PackSettings) -> bytes:
    buffer = io.BytesIO()
    options: dict[str, Any] = {}
    if orientation != 1:
        # Whether it is followed is the choice of the run that reads the image.
        options["exif"] = Image.Exif()
        options["exif"][ExifTags.Base.Orientation] = orientation
    image.save(buffer, "JPEG", quality=settings.quality, optimize=False, **options)
    return buffer.getvalue()


def _encode_losslessly(image: Image.Image) -> bytes:
    """Arrays had no loss before, and are small."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
