"""The splits of a dataset, and the random split of one that comes without."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from pycls_fast.data.source import Source
from pycls_fast.data.sources.base import Images, Subset, match_classes, number_groups
from pycls_fast.data.sources.files import SPLIT_OF
from pycls_fast.errors import UserError, first_few, one_of, refuse, refusing
from pycls_fast.seeds import counter_seed, frozen_generator, mixed


def as_splits(opened: Mapping[str, Images], data: Source, *, where: str, whole: bool = False) -> dict[str, Images]:
    """The splits of a dataset, "train" and "val" among them, from its parts: "all", or "train" and others (`SPLIT_OF`).

    "test" is left out if it has no labels (all are -1), else it serves as "val" if there is none. "all" or "train"
    without other parts is split at random, or is "all" if it stays `whole`. Labels are those of "train".

    Raises:
        UserError: no training images, images without labels, several labels where `data` says one or the reverse,
            classes that "train" lacks, or folds of a dataset with a validation split; see `split_at_random`.
    """
    parts: dict[str, Images] = {}
    for said, source in opened.items():
        one_of(f"{where}: the name of a split", said, ["all", *SPLIT_OF])
        name = SPLIT_OF.get(said, said)
        if name != "test" or np.any(source.labels >= 0):
            parts[name] = source
    if "val" not in parts and "test" in parts:
        parts["val"] = parts.pop("test")
    if "all" in parts:
        parts = {"train": parts["all"]}
    if "train" not in parts:
        raise UserError(f"{where}: no training images, only {', '.join(opened)}")
    for name, source in parts.items():
        if not len(source) or np.any(source.labels < 0):
            raise UserError(f"{where} ({name}): images without labels, or none")
        if (source.label_sets is None) != (data.label_separator is None):
            found, use = ("one label", "null") if source.label_sets is None else ("several labels", ";")
            raise UserError(
                f"data.label_separator: images of {where} have {found} each; use data.label_separator={use}"
            )
    train = parts.pop("train")
    if not parts:
        return {"all": train} if whole else split_at_random(train, data, where=where)
    # Nothing is drawn.
    unused = [f"data.{key}" for key in ("folds", "group_by") if getattr(data, key) is not None]
    refuse(f"{key}: {where} has a validation split; use {key}=null, or a root without it" for key in unused)
    splits: dict[str, Images] = {"train": train}
    for name, source in parts.items():
        splits[name] = match_classes(source, train.classes, where=f"{where} ({name})", of="train")
    return splits


def split_at_random(source: Images, data: Source, *, where: str) -> dict[str, Images]:
    """Split into "train" and "val" at random: class by class, or whole groups (`data.group_by`).

    Images with several labels are split as if they were all of one class.

    Raises:
        UserError: a class with a single image, a fold without images, or no groups.
    """
    labels, classes = np.asarray(source.labels), source.classes
    if source.label_sets is not None:
        labels, classes = np.zeros_like(labels), ("images",)
    counts = np.bincount(labels, minlength=len(classes))
    alone = [name for name, count in zip(classes, counts, strict=True) if count == 1]
    if alone:
        raise UserError(
            f"{where}: a single image in the class {first_few(alone)}; splitting off a validation set takes two: add "
            "images, remove the class or provide a validation split"
        )
    if data.group_by is None:
        is_val = _draw_images(source, labels, classes, data)
    else:
        is_val = _draw_groups(_groups(source, data.group_by, where), labels, data)
    if not is_val.any():
        found = f"no image of {where} is in fold {data.fold}"
        raise UserError(f"data.fold: {found}; use fewer than data.folds={data.folds}")
    train, val = (Subset(source, np.flatnonzero(side), drawn=True) for side in (~is_val, is_val))
    return {"train": train, "val": val}


def _draw_images(source: Images, labels: np.ndarray, classes: Sequence[str], data: Source) -> np.ndarray:
    """Which images are held out, class by class; at least one image of a class is on each side.

    Each class is put in an order, from which the first images are held out. It is the order of a hash of the seed, the
    class's name and the image's name, so an image that is added or removed moves at most about one other image to the
    other side. Images that have only numbers are drawn by their position in the class instead.

    With `data.folds` each class is cut into so many parts, of which `data.fold` is held out: each image in
    exactly one fold, so a class with fewer images is missing from some.
    """
    counts = np.bincount(labels, minlength=len(classes))
    by_class = np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])
    hashes = source.name_hashes()
    is_val = np.zeros(len(labels), dtype=bool)
    folds = data.folds
    for name, own in zip(classes, by_class, strict=True):
        count = len(own)
        if count == 0:
            continue
        # Seeded by the class's name, so that adding a class leaves the split of the others as it was.
        seed = counter_seed(data.split_seed, zlib.crc32(os.fsencode(name)))
        size = min(max(int(count * data.val_fraction + 0.5), 1), count - 1)
        if hashes is None:
            order = frozen_generator(seed).permutation(count)
        else:
            order = np.argsort(mixed(hashes[own] + np.uint64(seed)), kind="stable")
        # Shifted by a number of the class, so that larger parts are not all in the first folds.
        held_out = order[:size] if folds is None else _fold(order, folds, data.fold + seed, spread=hashes is None)
        is_val[own[held_out]] = True
    return is_val


def _fold(order: np.ndarray, folds: int, number: int, *, spread: bool) -> np.ndarray:
    """The part of an order that is one fold: consecutive images, or every n-th one if it is `spread`."""
    number %= folds
    if spread:
        return order[number::folds]
    # An image more or less moves one image at each end of consecutive ones; of every n-th one it would move half.
    return order[number * len(order) // folds : (number + 1) * len(order) // folds]


def _groups(source: Images, group_by: str, where: str) -> np.ndarray:
    """`Images.groups`, by the images' names if no column says it."""
    groups = source.groups
    if groups is None:
        what = f"data.group_by: {group_by} is no column of {where}"
        with refusing(f"{what}, and no regular expression", re.error):
            pattern = re.compile(group_by)
        names = [source.own_name(index) or "" for index in range(len(source))]
        found = [pattern.search(name) for name in names]
        lacking = [name or "of images without one" for name, match in zip(names, found, strict=True) if match is None]
        if lacking:
            refuse([f"{what}, and is not found in the names {first_few(lacking, 3)}"])
        # What is in brackets is shared, if there are any.
        groups = number_groups([match.groups() or match[0] for match in found if match is not None])
    if not groups.any():
        raise UserError(f"data.group_by: the images of {where} all share the same {group_by}; use data.group_by=null")
    return groups


def _draw_groups(groups: np.ndarray, labels: np.ndarray, data: Source) -> np.ndarray:
    """Which images are held out, in whole groups; with as many groups as folds, fold k is the k-th one.

    The largest group first, each goes to the side, or fold, where the shares of its classes become least uneven. Own
    code, as the split of a run must not depend on the version of a library.
    """
    sizes, totals = np.bincount(groups), np.bincount(labels)
    if data.folds == len(sizes):
        return groups == data.fold
    wanted = [1 - data.val_fraction, data.val_fraction] if data.folds is None else [1 / data.folds] * data.folds
    by_group = np.split(np.argsort(groups, kind="stable"), np.cumsum(sizes)[:-1])
    drawn = frozen_generator(counter_seed(data.split_seed, len(sizes))).permutation(len(sizes))
    order = drawn[np.argsort(-sizes[drawn], kind="stable")]
    filled = np.zeros((len(wanted), len(totals)))
    side = np.zeros(len(sizes), dtype=np.int64)
    for group in order:
        classes, counts = np.unique(labels[by_group[group]], return_counts=True)
        share = counts / totals[classes]
        # By how much the sum of squares of all shares grows.
        growth = ((2 * filled[:, classes] + share) * share).sum(axis=1) / wanted
        side[group] = growth.argmin()
        filled[side[group], classes] += share
    if data.folds is None and side.min() == side.max():
        # Neither side is left empty.
        side[order[-1]] = 1 - side[order[-1]]
    return side[groups] == (1 if data.folds is None else data.fold)
