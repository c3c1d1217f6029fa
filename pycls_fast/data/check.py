"""Reads every image of a dataset: which are damaged, how large they are, and which appear more than once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from pycls_fast.data.loader import in_processes
from pycls_fast.data.pack import shards_of
from pycls_fast.data.progress import progress
from pycls_fast.data.sources.base import Images
from pycls_fast.data.sources.files import FileImages, files_below
from pycls_fast.data.sources.packed import PackedImages
from pycls_fast.data.sources.tables import TABLES
from pycls_fast.data.to_rgb import DamagedImage, decode, why

SEEN = np.dtype([("index", "i8"), ("height", "i4"), ("width", "i4"), ("pixels", "u8"), ("dhash", "u8")])
"""A readable image: its position, its size, a hash of its pixels, and a perceptual hash."""

_MOST_BITS = 3
_BANDS = _MOST_BITS + 1
# Of hashes with an equal band, each is compared with at most this many others: there can be very many flat images.
_FARTHEST = 256


class Damaged(NamedTuple):
    """An image that cannot be used."""

    position: int
    name: str
    reason: str


class Checked(NamedTuple):
    """Some images of a source, in its order; `seen` is of `SEEN`."""

    damaged: list[Damaged]
    seen: np.ndarray


def verify(source: Images, *, workers: int, title: str) -> Iterator[Checked]:
    """Read and decode every image; damaged: those that a run would skip, and packed ones whose bytes have changed."""
    shards = shards_of(len(source))
    with progress(title, len(source), "images") as advance:
        for shard, found in zip(shards, in_processes(_check_shard, source, shards, workers), strict=True):
            advance(len(shard))
            yield found


def _check_shard(source: Images, shard: Sequence[int]) -> Checked:
    damaged, seen = [], []
    whole, rows = source.origin(np.asarray(shard))
    for index, row in zip(shard, rows.tolist(), strict=True):
        try:
            image = decode(source.read(index))
            if isinstance(whole, PackedImages) and not whole.is_as_packed(row):
                raise DamagedImage("the bytes are not those that were packed (checksum)")
            seen.append((index, image.height, image.width, _pixels(image), _dhash(image)))
        except (OSError, DamagedImage) as error:
            damaged.append(Damaged(index, source.name(index), why(error)))
    return Checked(damaged, np.array(seen, dtype=SEEN))


def _pixels(image: Image.Image) -> int:
    digest = hashlib.blake2b(image.tobytes(), digest_size=8, person=str(image.size).encode()[:16])
    return int.from_bytes(digest.digest(), "big")


def _dhash(image: Image.Image) -> int:
    """The difference hash, which survives small changes: whether brightness rises to the right, at 8 x 8 places."""
    small = np.asarray(image.convert("L").resize((9, 8), Image.Resampling.BILINEAR))
    return int.from_bytes(np.packbits(small[:, 1:] > small[:, :-1]).tobytes(), "big")


def left_out(root: Path, sources: Iterable[Images]) -> dict[str, list[str]]:
    """Files below class folders or beside them that no source of the dataset reads, by suffix, without hidden ones;
    empty for other layouts."""
    wholes = [source.origin(np.arange(len(source)))[0] for source in sources]
    has_tables = not root.is_dir() or any(file.suffix.lower() in TABLES for file in root.iterdir())
    if has_tables or not all(isinstance(whole, FileImages) for whole in wholes):
        return {}
    known = {whole.name(index) for whole in wholes for index in range(len(whole))}
    found: dict[str, list[str]] = {}
    for name in sorted(files_below(str(root), ("",))):
        if name not in known:
            found.setdefault(Path(name).suffix.lower(), []).append(str(Path(name).relative_to(root)))
    return found


def copies(splits: Mapping[str, np.ndarray]) -> dict[str, list[list[tuple[str, int]]]]:
    """Groups of images, as (split, position), that appear more than once: "identical" ones have the same pixels,
    "alike" ones form a chain in which the perceptual hashes of neighbours differ in at most three of 64 bits.

    Args:
        splits: all of `Checked.seen`, by the split's name.
    """
    places = [(name, int(index)) for name, seen in splits.items() for index in seen["index"]]
    pixels, hashes = (np.concatenate([seen[key] for seen in splits.values()]) for key in ("pixels", "dhash"))
    alike = [group for group in _groups(_near(hashes)) if len(set(pixels[group])) > 1]
    found = {"identical": _groups(np.unique(pixels, return_inverse=True)[1]), "alike": alike}
    return {kind: [[places[position] for position in group] for group in groups] for kind, groups in found.items()}


def _groups(labels_N: np.ndarray) -> list[np.ndarray]:
    """The positions of each label that occurs more than once."""
    order = np.argsort(labels_N, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(labels_N[order])) + 1)
    return [part for part in parts if len(part) > 1]


def _near(hashes_N: np.ndarray) -> np.ndarray:
    """A label for each hash, the same for those that a chain of small differences connects."""
    # If two hashes differ in at most three bits, at least one of their four bands of 16 bits is equal.
    kinds, place_of = np.unique(hashes_N, return_inverse=True)
    pairs = [np.zeros((2, 0), dtype=np.int64)]
    for band in range(_BANDS):
        keys = (kinds >> np.uint64(16 * band)) & np.uint64(0xFFFF)
        order = np.argsort(keys, kind="stable")
        for step in range(1, min(len(kinds), _FARTHEST + 1)):
            pair = np.stack([order[:-step], order[step:]])
            pair = pair[:, keys[pair[0]] == keys[pair[1]]]
            if not pair.shape[1]:
                break
            bits = np.unpackbits((kinds[pair[0]] ^ kinds[pair[1]])[:, None].view(np.uint8), axis=1).sum(axis=1)
            pairs.append(pair[:, bits <= _MOST_BITS])
    rows, columns = np.concatenate(pairs, axis=1)
    graph = coo_array((np.ones(len(rows), dtype=bool), (rows, columns)), shape=(len(kinds), len(kinds)))
    return np.asarray(connected_components(graph, directed=False)[1][place_of])
