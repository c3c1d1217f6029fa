"""Tar shards as webdataset writes them, local or through fsspec: indexed once, then read in any order."""

from __future__ import annotations

import operator
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from pycls_fast.data.progress import progress
from pycls_fast.data.source import ColumnSource, Opening
from pycls_fast.data.sources.base import Images
from pycls_fast.data.sources.files import EXTENSIONS, OpenFiles, find_files, name_classes, read_class_list
from pycls_fast.data.sources.index import CachePolicy, Index, load_or_build
from pycls_fast.data.sources.remote import ShardCache, is_remote, open_whole, read_range, stamp_of
from pycls_fast.data.sources.texts import Texts
from pycls_fast.errors import UserError
from pycls_fast.files import user_path
from pycls_fast.reading import IMAGE_BYTES, open_file, parse_json

_THREADS = 8
_LABEL_BYTES = 1 << 24
# Indexes of fewer samples of local shards are rebuilt at each start.
_SMALLEST = 1_000
# webdataset's: the key is everything up to the first dot of the file's own name.
_KEY_AND_EXTENSION = re.compile(r"^((?:.*/)?[^./]+)\.([^/]*)$")


class TarImages(Images):
    """Images in uncompressed tar files, in the order of files and members."""

    def __init__(self, where: str, stamps: Sequence[Any], index: Index, cache: ShardCache | None) -> None:
        """
        Args:
            where: what to call the dataset in messages.
            stamps: path or address of each shard, its size (None if unknown) and its version.
            index: the samples' names within their shard, their labels, and `places`, int64 (samples, 2): offset and
                size of each image in its shard; `block_ends`, int64: samples up to the end of each shard.
            cache: keeps whole remote shards; None reads each image separately over the network.
        """
        self.classes, self.labels, self.label_sets = index.labels
        self.block_ends: np.ndarray = index.more["block_ends"]
        self.cache = cache
        self._places = index.more["places"]
        self._texts: Texts = index.names
        self.where = f"{len(stamps):,} tar files of {where}"
        self._stamps = stamps
        self._files = OpenFiles()
        # Remote shards are best read one after the other.
        self.prefers_blocks = is_remote(stamps[0][0])

    def shard(self, number: int) -> tuple[str, str, int | None]:
        """Address, version and size in bytes (None if unknown) of a shard."""
        address, size, version = self._stamps[number]
        return address, str(version), size

    def read(self, index: int) -> bytes:
        offset, size = self._places[index].tolist()
        shard, version, _ = self.shard(self._shard_number(index))
        if not self.prefers_blocks:
            return self._files.read(shard, offset, size)
        if self.cache is not None:
            return self.cache.read_range(shard, version, offset, size)
        return read_range(shard, offset, size)

    def name(self, index: int) -> str:
        return f"{self._stamps[self._shard_number(index)][0]}[{self._texts[index]}]"

    def _shard_number(self, index: int) -> int:
        return int(np.searchsorted(self.block_ends, index, side="right"))


def open_tars(
    root: str, data: ColumnSource, how: Opening, shard_cache: str | None, shard_cache_gib: float | None
) -> dict[str, Images]:
    """The parts of tar shards, told apart by their names (`imagenet-train-{000000..000146}.tar`).

    A sample is the members that share a name up to its first dot: an image, and its label in `.cls` (a number or a
    name) or in a field of `.json`; several as a list.

    Args:
        root: a folder, one file, or an address of either.

    Raises:
        OSError, UserError: missing shards, members or labels.
    """
    names = read_class_list(root)
    cache = None
    if shard_cache is not None:
        limit = float("inf") if shard_cache_gib is None else shard_cache_gib * 2**30
        cache = ShardCache(user_path(shard_cache), limit, processes=how.processes)
    opened: dict[str, Images] = {}
    for split, shards in find_files(root, (".tar",), data).items():
        with ThreadPoolExecutor(_THREADS) as pool:
            stamps = list(pool.map(stamp_of, shards))
        stamp = {"files": stamps, "label": data.label_column, "separator": data.label_separator, "classes": names}
        index = load_or_build(
            root if is_remote(root) else Path(root).absolute(),
            f"tars_{split}",
            # Reading the headers takes longer than a list of files: over the network as long as reading the shards.
            CachePolicy.of(data, how, 0 if is_remote(shards[0]) else _SMALLEST),
            build=partial(_build, root, stamp),
            is_fresh=partial(operator.eq, stamp),
        )
        opened[split] = TarImages(root, stamps, index, cache)
    return opened


class _Found(NamedTuple):
    """One sample of a shard."""

    key: bytes
    offset: int
    size: int
    label: object


def _build(root: str, stamp: dict[str, Any]) -> Index:
    samples: list[_Found] = []
    ends = []
    shards = [shard for shard, *_ in stamp["files"]]
    with ThreadPoolExecutor(_THREADS) as pool, progress(f"index {root}", len(shards), "shards") as advance:
        for found in pool.map(lambda shard: _scan(shard, stamp["label"]), shards):
            samples += found
            ends.append(len(samples))
            advance(1)
    said = [sample.label for sample in samples]
    labels = name_classes(said, names=stamp["classes"], where=root, separator=stamp["separator"])
    places = np.array([(sample.offset, sample.size) for sample in samples], dtype=np.int64).reshape(-1, 2)
    more = {"places": places, "block_ends": np.array(ends, dtype=np.int64)}
    return Index(Texts.of(sample.key for sample in samples), labels, stamp, more)


def _scan(shard: str, label_field: str) -> list[_Found]:
    found = []
    try:
        with open_whole(shard) if is_remote(shard) else open_file(shard, None) as file:
            for key, members in groupby(_members(file), operator.attrgetter("key")):
                found.append(_read_sample(key, list(members), label_field))
    # tarfile calls itself for each of several headers of one member.
    except (tarfile.TarError, EOFError, OSError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise UserError(f"{shard} cannot be read after {len(found):,} samples ({error}); download it again") from error
    return found


class _Member(NamedTuple):
    key: str
    extension: str
    offset: int
    size: int
    label: bytes
    """The content, if it is a label."""


def _members(file: IO[bytes]) -> Iterator[_Member]:
    # "r:" refuses compressed files, in which one cannot seek to an image.
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            # tarfile remembers all members as long as the file is open.
            tar.members.clear()  # type: ignore[attr-defined]  # not in typeshed
            if member.size < 0:
                # The next member would begin before this one.
                raise tarfile.ReadError(f"{member.name} has {member.size:,} bytes")
            match = _KEY_AND_EXTENSION.match(member.name)
            if not member.isfile() or match is None or Path(member.name).name[0] == ".":
                continue
            key, extension = match[1], match[2].lower()
            is_label = extension in ("cls", "json")
            if member.size > (_LABEL_BYTES if is_label else IMAGE_BYTES):
                raise tarfile.ReadError(f"{member.name} has {member.size:,} bytes")
            content = tar.extractfile(member) if is_label else None
            yield _Member(key, extension, member.offset_data, member.size, content.read() if content else b"")
        # tarfile takes a truncated header for the end of the archive.
        file.seek(tar.offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError("there is no end mark")


def _read_sample(key: str, members: Sequence[_Member], label_field: str) -> _Found:
    images = [(member.offset, member.size) for member in members if f".{member.extension}" in EXTENSIONS]
    labels = {member.extension: member.label for member in members}
    if len(images) != 1:
        raise ValueError(f"sample {key} has {len(images)} images, expected one (members: {', '.join(labels)})")
    try:
        label = labels.get("cls", b"").decode().strip() or parse_json(labels.get("json", b"{}")).get(label_field)
    except (ValueError, AttributeError) as error:
        raise ValueError(f"the label of sample {key} is damaged ({error})") from error
    return _Found(os.fsencode(key), *images[0], label)
