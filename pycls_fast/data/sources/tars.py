"""Tar shards as webdataset writes them, local or through fsspec: indexed once, then read in any order."""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from pycls_fast.data.source import Opening, Source
from pycls_fast.data.sources.arrays import Mapped, OpenFiles, Texts
from pycls_fast.data.sources.base import Images
from pycls_fast.data.sources.files import EXTENSIONS, find_files
from pycls_fast.data.sources.index import CachePolicy, Index, load_or_build
from pycls_fast.data.sources.labels import name_classes, read_class_list
from pycls_fast.data.sources.progress import progress
from pycls_fast.data.sources.remote import is_remote, open_whole, read_range, stamp_of
from pycls_fast.data.sources.shards import CopiedShards, ShardCache
from pycls_fast.data.sources.splits import as_splits
from pycls_fast.errors import UserError
from pycls_fast.files import user_path
from pycls_fast.reading import parse_json

_THREADS = 8
_LABEL_BYTES = 1 << 24
# Indexes of fewer samples of local shards are rebuilt at each start.
_SMALLEST = 1_000
# webdataset's: the key is everything up to the first dot of the file's own name.
_KEY_AND_EXTENSION = re.compile(r"^((?:.*/)?[^./]+)\.([^/]*)$")


class TarImages(Images, Mapped):
    """Images in uncompressed tar files, in the order of files and members."""

    def __init__(
        self,
        where: str,
        classes: Sequence[str],
        shards: Texts,
        versions: Texts,
        keys: Texts,
        arrays: dict[str, np.ndarray],
        cache: ShardCache | None,
    ) -> None:
        """
        Args:
            where: what to call the dataset in messages.
            shards: paths or addresses.
            versions: the shards' versions that the index describes, as strings.
            keys: the samples' names within their shard.
            arrays: `labels`, int32; `places`, int64 (samples, 2): offset and size of each image in its shard;
                `block_ends`, int64: samples up to the end of each shard.
            cache: keeps whole remote shards; None reads each image separately over the network.
        """
        self.classes = tuple(classes)
        self.labels = arrays["labels"]
        self.block_ends: np.ndarray = arrays["block_ends"]
        self._places = arrays["places"]
        self._where = where
        self._shards = shards
        self._versions = versions
        self._keys = keys
        self._cache = cache
        self._files = OpenFiles()
        # Remote shards are best read one after the other.
        self.prefers_blocks = is_remote(shards[0])
        if cache is not None and self.prefers_blocks:
            self.copied_shards = CopiedShards(cache, shards, versions, self.block_ends)

    def read(self, index: int) -> tuple[bytes, int]:
        offset, size = self._places[index].tolist()
        number = self._shard_number(index)
        shard = self._shards[number]
        if not is_remote(shard):
            data = self._files.read(shard, offset, size)
        elif self._cache is not None:
            data = self._cache.read_range(shard, self._versions[number], offset, size)
        else:
            data = read_range(shard, offset, size)
        if len(data) < size:
            raise OSError(f"{shard} ends before the image does; was it replaced?")
        return data, int(self.labels[index])

    def name(self, index: int) -> str:
        return f"{self._shards[self._shard_number(index)]}[{self._keys[index]}]"

    def name_hashes(self) -> np.ndarray:
        return self._keys.hashes()

    def _shard_number(self, index: int) -> int:
        return int(np.searchsorted(self.block_ends, index, side="right"))

    def describe(self) -> str:
        files = f"{len(self._shards):,} tar files of {self._where}"
        return f"{super().describe()} in {files}"


def open_tars(
    root: str,
    data: Source,
    how: Opening,
    *,
    train: str | None,
    val: str | None,
    label_column: str,
    shard_cache: str | None,
    shard_cache_gib: float | None,
) -> dict[str, Images]:
    """The splits of tar shards, told apart by their names (`imagenet-train-{000000..000146}.tar`).

    A sample is the members that share a name up to its first dot: an image, and its label in `.cls` (a number or a
    name) or in a field of `.json`.

    Args:
        root: a folder, one file, or an address of either.

    Raises:
        UserError: missing shards, members or labels.
    """
    files = find_files(root, (".tar",), train=train, val=val)
    names = read_class_list(root)
    copies = None
    if shard_cache is not None:
        limit = None if shard_cache_gib is None else int(shard_cache_gib * 2**30)
        copies = ShardCache(user_path(shard_cache), limit, processes=how.processes)
        copies.check()
    # Reading the headers takes longer than a list of files: over the network as long as reading the shards.
    smallest = 0 if is_remote(next(iter(files.values()))[0]) or how.index_all else _SMALLEST
    policy = CachePolicy(data.index_cache, smallest)
    opened = {
        split: _open_split(root, split, found, names, label_column, policy, copies) for split, found in files.items()
    }
    return as_splits(opened, data, how, where=root)


def _open_split(
    root: str,
    split: str,
    shards: Sequence[str],
    names: Sequence[str] | None,
    label_field: str,
    policy: CachePolicy,
    copies: ShardCache | None,
) -> TarImages:
    with ThreadPoolExecutor(_THREADS) as pool:
        stamps = list(pool.map(_stamp, shards))
    stamp = {"shards": stamps, "label": label_field, "classes": list(names) if names is not None else None}
    index = load_or_build(
        root if is_remote(root) else Path(root).absolute(),
        f"tars_{split}",
        policy,
        build=lambda: _build(root, shards, label_field, names, stamp, may_lack=split == "test"),
        count=lambda index: len(index.arrays["labels"]),
        is_fresh=lambda kept: kept == stamp,
        columns=(label_field,),
    )
    keys = Texts(index.arrays["keys"], index.arrays["key_ends"])
    paths = Texts.of(os.fsencode(shard) for shard in shards)
    versions = Texts.of(json.dumps(about).encode() for about in stamps)
    return TarImages(root, index.more["classes"], paths, versions, keys, dict(index.arrays), copies)


def _stamp(shard: str) -> list[Any]:
    if is_remote(shard):
        return stamp_of(shard)
    status = Path(shard).stat()
    return [shard, status.st_size, status.st_mtime_ns]


class _Found(NamedTuple):
    """One sample of a shard."""

    key: bytes
    offset: int
    size: int
    label: int | str


def _build(
    root: str,
    shards: Sequence[str],
    label_field: str,
    names: Sequence[str] | None,
    stamp: dict[str, Any],
    *,
    may_lack: bool,
) -> Index:
    places, labels, keys, counts = [], [], [], []
    with ThreadPoolExecutor(_THREADS) as pool, progress(f"index {root}", len(shards), "shards") as advance:
        for found in pool.map(lambda shard: _scan(shard, label_field, may_lack), shards):
            places.append(np.array([(s.offset, s.size) for s in found], dtype=np.int64).reshape(-1, 2))
            labels += [s.label for s in found]
            keys.append(Texts.of(s.key for s in found))
            counts.append(len(found))
            advance(1)
    if not labels:
        raise UserError(f"{root}: no images in {len(shards):,} tar files")
    classes, numbers = name_classes(labels, names=names, where=root, may_lack=may_lack)
    joined = Texts.join(keys)
    arrays = {
        "labels": numbers,
        "places": np.concatenate(places),
        "keys": joined.data,
        "key_ends": joined.ends,
        "block_ends": np.cumsum(counts, dtype=np.int64),
    }
    return Index(arrays, {"classes": list(classes)}, stamp)


def _scan(shard: str, label_field: str, may_lack: bool) -> list[_Found]:
    """The samples of one shard, in its order. If labels may be missing, a sample without one gets -1.

    Raises:
        UserError: a damaged file, or a sample without image or label.
    """
    found = []
    try:
        with open_whole(shard) if is_remote(shard) else Path(shard).open("rb") as file:
            for key, members in _samples(file):
                found.append(_read_sample(shard, key, members, label_field, may_lack))
    except (tarfile.TarError, EOFError, OSError, ValueError, OverflowError) as error:
        raise UserError(f"{shard} cannot be read after {len(found):,} samples ({error}); download it again") from error
    return found


_Member = tuple[str, int, int, bytes]
"""Extension, offset and size of the content, and the content of small members that hold a label."""


def _samples(file: IO[bytes]) -> Iterator[tuple[str, list[_Member]]]:
    """Runs of members with the same key."""
    last: str | None = None
    members: list[_Member] = []
    # "r:" refuses compressed files, in which one cannot seek to an image.
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            match = _KEY_AND_EXTENSION.match(member.name)
            if not member.isfile() or match is None or Path(member.name).name[0] == ".":
                continue
            key, extension = match[1], match[2].lower()
            if key != last and members:
                yield str(last), members
                members = []
            last = key
            content = b""
            if member.issparse() or member.size < 0:
                raise tarfile.ReadError(f"{member.name} is sparse, so its bytes are not in the file")
            if extension in ("cls", "json"):
                if member.size > _LABEL_BYTES:
                    raise tarfile.ReadError(f"the label {member.name} has {member.size:,} bytes")
                extracted = tar.extractfile(member)
                content = extracted.read() if extracted is not None else b""
            members.append((extension, member.offset_data, member.size, content))
            # tarfile remembers all members as long as the file is open.
            tar.members.clear()  # type: ignore[attr-defined]  # not in typeshed
        # tarfile takes a truncated header for the end of the archive.
        file.seek(tar.offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError("there is no end mark")
        if members:
            yield str(last), members


def _read_sample(shard: str, key: str, members: Sequence[_Member], label_field: str, may_lack: bool) -> _Found:
    extensions = ", ".join(extension for extension, *_ in members)
    images = [(offset, size) for extension, offset, size, _ in members if f".{extension}" in EXTENSIONS]
    if len(images) != 1:
        raise UserError(f"{shard}: sample {key} has {len(images)} images, expected one (members: {extensions})")
    contents = {extension: content for extension, _, _, content in members}
    try:
        label = contents.get("cls", b"").decode().strip() or parse_json(contents.get("json", b"{}")).get(label_field)
    except (ValueError, AttributeError) as error:
        raise UserError(f"{shard}: the label of sample {key} is damaged ({error})") from error
    if label is None and may_lack:
        label = -1
    if not isinstance(label, int | str) or isinstance(label, bool):
        raise UserError(
            f"{shard}: sample {key} has the label {label!r}; expected one whole number or name in .cls, or in the "
            f"field {label_field!r} of .json, which data.label_column chooses (members: {extensions})"
        )
    return _Found(os.fsencode(key), *images[0], label)
