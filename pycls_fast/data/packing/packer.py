"""Packing a source into the format of `sources/packed.py`; a killed run is resumed where it stopped."""

from __future__ import annotations

import json
import os
import sys
import zlib
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pycls_fast.data.packing import draft
from pycls_fast.data.packing.stored_image import PackSettings, store
from pycls_fast.data.packing.workers import map_images
from pycls_fast.data.sources.arrays import Texts
from pycls_fast.data.sources.base import Source
from pycls_fast.data.sources.packed import ABOUT, ENTRY, IMAGES, NAME_ENDS, NAMES, TABLE, is_packed, write_about
from pycls_fast.data.sources.progress import progress
from pycls_fast.durable import flush, flush_folder
from pycls_fast.errors import UserError


@dataclass(frozen=True)
class PackedSplit:
    """Result of packing: images and bytes written, and (name, reason) of unusable images."""

    count: int
    size: int
    damaged: list[tuple[str, str]] = field(default_factory=list)
    is_new: bool = True
    """False if the split was already complete and nothing was done."""


def pack(source: Source, folder: Path, settings: PackSettings, *, workers: int, title: str) -> PackedSplit:
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
    plan = draft.plan_of(source, settings)
    if is_packed(folder):
        return _finished(folder, plan)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft.check_empty(folder)
        with draft.only_process(folder):
            if is_packed(folder):
                return _finished(folder, plan)
            draft.begin(folder, plan)
            return _write(source, folder, settings, plan, workers, title)
    except OSError as error:
        raise UserError(
            f"output: {folder} cannot be written ({error.strerror or error}); run the same command again to resume"
        ) from error


def _finished(folder: Path, plan: dict[str, Any]) -> PackedSplit:
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
    return PackedSplit(about["count"], (folder / IMAGES).stat().st_size, damaged, is_new=False)


def _write(
    source: Source, folder: Path, settings: PackSettings, plan: dict[str, Any], workers: int, title: str
) -> PackedSplit:
    images_path, table_path, log_path = folder / draft.DRAFT_IMAGES, folder / draft.DRAFT_TABLE, folder / draft.DAMAGED
    damaged = draft.read_damaged(log_path)
    done, size = draft.whole_entries(images_path, table_path, damaged)
    readable = _first_readable(source, settings, sorted(index for index in damaged if index < done))
    if readable is not None:
        # From there on once more, so that the result is that of an undisturbed run.
        print(f"note: {source.name(readable)} was left out and can be read now; packing resumes there", file=sys.stderr)
        done, size = readable, int(np.fromfile(table_path, ENTRY, 1, offset=readable * ENTRY.itemsize)["offset"][0])
    kept = [draft.damaged_line(index, *found) for index, found in damaged.items() if index < done]
    log_path.write_text("".join(kept), encoding="utf-8")
    work = partial(store, settings=settings)
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
                log.write(draft.damaged_line(index, source.name(index), image.reason).encode())
                # Before its entry, which without this line is taken for a lost image.
                log.flush()
            if (index + 1) % draft.DURABLE_EVERY == 0:
                # After a power cut the table must not describe images that were lost.
                flush(images, log, table)
            advance(1)
        flush(images, log, table)
    return _finish(source, folder, plan, settings)


def _first_readable(source: Source, settings: PackSettings, indices: list[int]) -> int | None:
    """The first of these images, which were left out, that can be stored now."""
    with progress("retry images that were left out", len(indices), "images") as advance:
        for index in indices:
            if not store(source, index, settings=settings).reason:
                return index
            advance(1)
    return None


def _finish(source: Source, folder: Path, plan: dict[str, Any], settings: PackSettings) -> PackedSplit:
    """Put the final files in place, the one that makes the split complete last."""
    table = np.fromfile(folder / draft.DRAFT_TABLE, dtype=ENTRY)
    damaged = draft.read_damaged(folder / draft.DAMAGED)
    whole = np.flatnonzero(table["size"] > 0)
    if len(table) != len(source) or len(whole) + len(damaged) != len(table):
        raise UserError(
            f"output: {folder}: {len(whole):,} images and {len(damaged):,} damaged ones were written of "
            f"{len(source):,}; was the folder changed meanwhile? Remove it and pack it again"
        )
    if not len(whole):
        # So that the same command reads them again, once the disk is mounted or the permissions are right. The plan
        # after the others: without it they look like files of another program.
        for name in (draft.DRAFT_IMAGES, draft.DRAFT_TABLE, draft.DAMAGED, draft.PLAN, draft.LOCK):
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
            flush(written)
    about = {**plan["settings"], "plan": plan["digest"], "damaged": list(damaged.values())}
    about_file = folder / f"{ABOUT}.part"
    write_about(about_file, classes=source.classes, count=len(whole), how=settings.describe(), settings=about)
    (folder / draft.DRAFT_IMAGES).rename(folder / IMAGES)
    about_file.rename(folder / ABOUT)
    flush_folder(folder)
    for name in (draft.PLAN, draft.DRAFT_TABLE, draft.DAMAGED, draft.LOCK):
        (folder / name).unlink(missing_ok=True)
    return PackedSplit(len(whole), int(table["size"].sum()), list(damaged.values()))


def _common_start(names: list[str]) -> str:
    """The folders that these names (the first and the last) have in common, with a trailing slash."""
    folders = [name.rpartition("/")[0] for name in names]
    # A table may have relative paths and absolute ones.
    is_one_kind = len({name.startswith("/") for name in names}) == 1
    above = os.path.commonpath(folders) if is_one_kind and all(folders) else ""
    return f"{above}/" if above else ""
