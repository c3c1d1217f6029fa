"""Parts of a source, and the random split of a dataset that comes without one."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pycls_fast.counter import counter_seed, mixed
from pycls_fast.data.draws import frozen_generator
from pycls_fast.data.sources.base import (
    LabelledSource,
    Source,
    block_ends,
    checksum_holds,
    copied_shards,
    name_hashes,
    prefers_blocks,
)
from pycls_fast.data.sources.index import CachePolicy
from pycls_fast.data.sources.shards import CopiedShards, ShardCache
from pycls_fast.errors import UserError, first_few


class Subset:
    """The images of a source at given positions, in that order."""

    def __init__(self, source: LabelledSource, rows: np.ndarray, *, drawn: bool = False) -> None:
        """
        Args:
            drawn: a random split drew the positions.
        """
        self.source = source
        self.drawn = drawn
        # Half the memory, if it is wide enough.
        self.rows = rows.astype(np.uint32) if len(source) < 2**32 else rows

    @property
    def classes(self) -> tuple[str, ...]:
        return self.source.classes

    @property
    def labels(self) -> np.ndarray:
        return self.source.labels[self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> tuple[bytes | np.ndarray, int]:
        return self.source.read(int(self.rows[index]))

    def name(self, index: int) -> str:
        return self.source.name(int(self.rows[index]))

    def checksum_holds(self, index: int) -> bool:
        return checksum_holds(self.source, int(self.rows[index]))

    def name_hashes(self) -> np.ndarray | None:
        hashes = name_hashes(self.source)
        return None if hashes is None else hashes[self.rows]

    def describe(self) -> str:
        return f"{len(self):,} of {self.source.describe()}"

    @property
    def prefers_blocks(self) -> bool:
        return prefers_blocks(self.source)

    @property
    def copied_shards(self) -> CopiedShards | None:
        shards = copied_shards(self.source)
        return None if shards is None else shards.part(self.rows)

    @property
    def block_ends(self) -> np.ndarray | None:
        ends = block_ends(self.source)
        if ends is None or np.any(np.diff(self.rows.astype(np.int64)) < 0):
            return None
        inside = np.unique(np.searchsorted(self.rows, ends))
        return inside[inside > 0].astype(np.int64)


class Relabelled:
    """The same images with different labels and class names."""

    def __init__(self, source: LabelledSource, classes: Sequence[str], new_label: np.ndarray) -> None:
        """
        Args:
            new_label: integers, the new label for each label of `source`.
        """
        self.source = source
        self.classes = tuple(classes)
        self._new_label = new_label

    @property
    def labels(self) -> np.ndarray:
        return self._new_label[self.source.labels]

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int) -> tuple[bytes | np.ndarray, int]:
        data, label = self.source.read(index)
        return data, int(self._new_label[label])

    def name(self, index: int) -> str:
        return self.source.name(index)

    def checksum_holds(self, index: int) -> bool:
        return checksum_holds(self.source, index)

    def describe(self) -> str:
        return self.source.describe()

    @property
    def prefers_blocks(self) -> bool:
        return prefers_blocks(self.source)

    @property
    def copied_shards(self) -> CopiedShards | None:
        return copied_shards(self.source)

    @property
    def block_ends(self) -> np.ndarray | None:
        return block_ends(self.source)


def like_train(source: LabelledSource, train: Source, *, where: str, train_where: str) -> LabelledSource:
    """A split labelled with the training split's classes, which must include all of its own that have images.

    Raises:
        UserError: classes that training does not have.
    """
    matched, unknown = match_classes(source, train.classes)
    if unknown:
        raise UserError(
            f"{where}: no images of the class {first_few(unknown)} in {train_where}; add some there or remove it here"
        )
    return matched


def match_classes(source: LabelledSource, classes: Sequence[str]) -> tuple[LabelledSource, list[str]]:
    """The source with labels that are positions in `classes`, and the names of its classes that are not there.

    Only classes that have images count; the labels of those that are not there are -1.
    """
    if source.classes == tuple(classes):
        return source, []
    # Purely numeric labels define all classes from 0 on, with images or without; in training they may be names.
    counts = np.bincount(source.labels, minlength=len(source.classes))
    unknown = sorted({own for own, count in zip(source.classes, counts, strict=True) if count} - set(classes))
    position = {name: label for label, name in enumerate(classes)}
    new_label = np.array([position.get(name, -1) for name in source.classes], dtype=np.int32)
    return Relabelled(source, classes, new_label), unknown


def as_splits(opened: Mapping[str, LabelledSource], options: OpenOptions, *, where: str) -> dict[str, Source]:
    """The splits of a dataset, "train" and "val" among them, from its parts: "all", or "train" and others.

    "test" is left out if it has no labels (all are -1), else it serves as "val" if there is none. "all" or "train"
    without other parts is split at random, or is "all" if `options.whole` says so. Labels are those of "train".

    Raises:
        UserError: see `split_at_random` and `like_train`.
    """
    parts = {name: source for name, source in opened.items() if name != "test" or np.any(source.labels >= 0)}
    if "val" not in parts and "test" in parts:
        parts["val"] = parts.pop("test")
    if "all" in parts:
        parts = {"train": parts["all"]}
    train = parts.pop("train")
    if not parts:
        return undivided(train, options, where=where)
    refuse_folds(where, options.folds)
    splits: dict[str, Source] = {"train": train}
    for name, source in parts.items():
        splits[name] = like_train(source, train, where=f"{where} ({name})", train_where="train")
    return splits


def undivided(train: LabelledSource, options: OpenOptions, *, by_name: bool = True, where: str) -> dict[str, Source]:
    """The splits of a dataset that comes without one: drawn at random, or "all" if `options.whole` says so.

    Raises:
        UserError: see `split_at_random`.
    """
    if options.whole:
        return {"all": train}
    return split_at_random(
        train,
        options.val_fraction,
        options.split_seed,
        folds=options.folds,
        fold=options.fold,
        by_name=by_name,
        where=where,
    )


def refuse_folds(where: str, folds: int | None) -> None:
    """Refuse folds of a dataset that has a validation split.

    Raises:
        UserError: there are folds.
    """
    if folds is not None:
        raise UserError(f"data.folds: {where} has a validation split; use data.folds=null, or a root without it")


def split_at_random(
    source: LabelledSource,
    val_fraction: float,
    split_seed: int,
    *,
    folds: int | None = None,
    fold: int = 0,
    by_name: bool = True,
    where: str,
) -> dict[str, Source]:
    """Split class by class; at least one image of a class goes to each side.

    Each class is put in an order, from which the first images are held out. It is the order of a hash of the seed, the
    class's name and the image's name, so an image that is added or removed moves at most about one other image to the
    other side. Images that have only numbers are drawn by their position in the class instead.

    With `folds` each image is held out in exactly one fold, so a class with fewer images is missing from some.

    Args:
        val_fraction: the share of each class that is kept for validation, in (0, 1); not used with `folds`.
        folds: the number of parts that each class is cut into.
        fold: the part that is kept for validation, counted from 0.
        split_seed: seed of the order.
        by_name: false draws by position, whatever the names.
        where: what to call the dataset in messages.

    Raises:
        UserError: an impossible fraction, a class with a single image, or a fold without images.
    """
    if not 0 < val_fraction < 1:
        raise UserError(
            f"val_fraction must lie between 0 and 1 to split {where}, which has no validation split; got {val_fraction}"
        )
    labels = np.asarray(source.labels)
    counts = np.bincount(labels, minlength=len(source.classes))
    alone = [name for name, count in zip(source.classes, counts, strict=True) if count == 1]
    if alone:
        which = "the class" if len(alone) == 1 else "each of the classes"
        raise UserError(
            f"{where}: a single image in {which} {first_few(alone)}; splitting off a validation set "
            "takes two: add images, remove the class or provide a validation split"
        )
    # Positions class after class, each class in the source's order.
    in_order = bool(np.all(labels[:-1] <= labels[1:]))
    by_class = None if in_order else np.argsort(labels, kind="stable")
    hashes = name_hashes(source) if by_name else None
    is_val = np.zeros(len(source), dtype=bool)
    ends = np.cumsum(counts)
    for name, count, end in zip(source.classes, counts.tolist(), ends.tolist(), strict=True):
        if count == 0:
            continue
        own = slice(end - count, end) if by_class is None else by_class[end - count : end]
        # Seeded by the class's name, so that adding a class leaves the split of the others as it was.
        seed = counter_seed(split_seed, zlib.crc32(os.fsencode(name)))
        size = min(max(int(count * val_fraction + 0.5), 1), count - 1)
        if hashes is None:
            order = frozen_generator(seed).permutation(count)
        else:
            order = np.argsort(mixed(hashes[own] + np.uint64(seed)), kind="stable")
        held_out = order[:size] if folds is None else _of_fold(order, folds, fold + seed, spread=hashes is None)
        chosen = end - count + held_out
        is_val[chosen if by_class is None else by_class[chosen]] = True
    if not is_val.any():
        raise UserError(f"data.fold: no image of {where} is in fold {fold}; use fewer than data.folds={folds}")
    train, val = (Subset(source, np.flatnonzero(side), drawn=True) for side in (~is_val, is_val))
    return {"train": train, "val": val}


def _of_fold(order: np.ndarray, folds: int, number: int, *, spread: bool) -> np.ndarray:
    """One of the parts into which folds cut an order: a run of it, or every so many if it is `spread`.

    Args:
        number: the fold's, shifted by a number of the class, so that larger parts are not all in the first folds.
    """
    number %= folds
    if spread:
        return order[number::folds]
    # An image that comes or goes moves one image at each end of a run; of the others it would move half.
    return order[number * len(order) // folds : (number + 1) * len(order) // folds]


@dataclass(frozen=True)
class OpenOptions:
    """The options of all layouts.

    Args:
        val_fraction: the share of each class, in (0, 1), that a random split keeps for validation if there is no such
            split.
        split_seed: seed of the random split.
        folds, fold: see `split_at_random`.
        whole: a dataset without a validation split is not split at random; it is the split "all".
        train, val: the files of a split by name: a path below the root, an absolute one or an address, with `*` and
            `{000..146}`; for the hub the names of the splits. None finds them.
        path_column, image_column, label_column: columns of tables; the last is also the field of a tar's `.json`. If
            `image_column` is None, the only column with images is used.
        hub_config: name of a dataset's configuration on the hub.
        cache: where indexes of large datasets are kept.
        shard_cache: where remote shards are kept; None reads each image separately over the network.
    """

    val_fraction: float = 0.2
    split_seed: int = 0
    folds: int | None = None
    fold: int = 0
    whole: bool = False
    train: str | None = None
    val: str | None = None
    path_column: str = "path"
    image_column: str | None = None
    label_column: str = "label"
    hub_config: str | None = None
    cache: CachePolicy = field(default_factory=CachePolicy)
    shard_cache: ShardCache | None = None
