"""Datasets as folders: one folder per class, with or without train/ and val/ above them."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from pycls_fast.counter import counter_seed
from pycls_fast.data.draws import frozen_generator
from pycls_fast.data.sources import Source
from pycls_fast.errors import UserError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
"""File names that are images, in any case."""

_VAL_NAMES = ("val", "valid", "validation")
_SPLIT_NAMES = ("train", *_VAL_NAMES, "test")
_LAYOUT = "expected ROOT/train/CLASS/IMAGE and ROOT/val/CLASS/IMAGE, or ROOT/CLASS/IMAGE (see data/README.md)"
_SCAN_THREADS = 16


class FolderSource:
    """Image files in class folders, ordered by class name and, within a class, by the file names' bytes.

    The names lie end to end in one byte array: 1.28 million ImageNet names take about 60 MB, once, since
    arrays stay shared after a fork where a list of strings would be copied into every worker.
    """

    def __init__(
        self,
        root: Path,
        classes: Sequence[str],
        names: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
        labels: np.ndarray,
    ) -> None:
        """
        Args:
            root: the folder that holds the class folders.
            classes: class names, which are also the names of the folders; the label is the position.
            names: uint8, the file names below the class folders, end to end.
            starts, ends: int64, where each image's name lies in `names`.
            labels: int32, one per image.
        """
        self.root = root
        self.classes = tuple(classes)
        self.labels = labels
        self._names = names
        self._starts = starts
        self._ends = ends

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> tuple[bytes, int]:
        return Path(self.name(index)).read_bytes(), int(self.labels[index])

    def name(self, index: int) -> str:
        file_name = os.fsdecode(self._names[self._starts[index] : self._ends[index]].tobytes())
        return str(self.root / self.classes[self.labels[index]] / file_name)

    def describe(self) -> str:
        return f"{len(self):,} images of {len(self.classes):,} classes in {self.root}"

    def subset(self, indices: np.ndarray) -> FolderSource:
        """The images at `indices`, in that order; the names are shared, not copied."""
        return FolderSource(
            self.root,
            self.classes,
            self._names,
            self._starts[indices],
            self._ends[indices],
            self.labels[indices],
        )

    def with_classes(self, classes: Sequence[str]) -> FolderSource:
        """The same images labelled by another list of classes, which must hold all of this source's."""
        position = {name: label for label, name in enumerate(classes)}
        new_label = np.array([position[name] for name in self.classes], dtype=np.int32)
        return FolderSource(self.root, classes, self._names, self._starts, self._ends, new_label[self.labels])


def open_folder(root: str | Path, *, val_fraction: float, split_seed: int) -> dict[str, Source]:
    """Find the splits of a dataset on disk.

    With `train/` and one of `val/`, `valid/`, `validation/`, `test/` these are "train" and "val"; with both a
    validation and a test folder there is "test" too, unless it holds no class folders (ImageNet's has no
    labels). With only `train/`, or with class folders directly in `root`, the images are split at random,
    class by class.

    Args:
        val_fraction: the share of each class that a random split keeps for validation, in (0, 1); at least
            one image of a class goes to each side. Not used where the folders say the split.
        split_seed: of the random split, which depends on nothing else but class names and the order of file
            names.

    Raises:
        UserError: when the folders are not such a dataset, with what was looked for and what was found.
    """
    root = Path(root)
    try:
        return _open_folder(root, val_fraction, split_seed)
    except PermissionError as error:
        raise UserError(f"the dataset folder {error.filename} cannot be read: {error.strerror}") from error


def _open_folder(root: Path, val_fraction: float, split_seed: int) -> dict[str, Source]:
    folders = _list_root(root)
    if not _has_split_folders(root, folders):
        return _split(scan_classes(root), val_fraction, split_seed)
    train = scan_classes(root / "train")
    val_name, test_name = _choose_validation(root, folders)
    if val_name is None:
        return _split(train, val_fraction, split_seed)
    sources: dict[str, Source] = {"train": train, "val": _scan_like(root / val_name, train)}
    if test_name is not None and _subfolders(root / test_name):
        sources["test"] = _scan_like(root / test_name, train)
    return sources


def scan_classes(root: Path) -> FolderSource:
    """Index class folders: every image below `root/CLASS/`, at any depth, hidden files and folders left out.

    Listing runs in threads, since on network file systems it waits more than it works.

    Raises:
        UserError: when there are no class folders, or a class folder without images.
    """
    classes = _subfolders(root)
    if not classes:
        raise UserError(_no_class_folders(root))
    with ThreadPoolExecutor(_SCAN_THREADS) as pool:
        listings = list(pool.map(_list_images, (f"{root}/{name}" for name in classes)))
    empty = [name for name, listing in zip(classes, listings, strict=True) if not listing]
    if empty:
        raise UserError(
            f"{root}: no images in the class {_folders(empty)}; "
            f"add images ({' '.join(EXTENSIONS)}) or remove the folder"
        )
    counts = [len(listing) for listing in listings]
    lengths = np.fromiter((len(name) for listing in listings for name in listing), np.int64, sum(counts))
    ends = np.cumsum(lengths)
    return FolderSource(
        root,
        classes,
        names=np.frombuffer(b"".join(b"".join(listing) for listing in listings), dtype=np.uint8),
        starts=ends - lengths,
        ends=ends,
        labels=np.repeat(np.arange(len(classes), dtype=np.int32), counts),
    )


def _list_root(root: Path) -> list[str]:
    if not root.exists():
        raise UserError(f"there is no dataset folder {root.absolute()}; {_LAYOUT}")
    if not root.is_dir():
        raise UserError(f"the dataset {root.absolute()} is a file, not a folder; {_LAYOUT}")
    return _subfolders(root)


def _has_split_folders(root: Path, folders: list[str]) -> bool:
    """Whether `train/` is the training split, and not a class of that name (buses, cars, trains)."""
    if "train" in folders:
        only_splits = all(name in _SPLIT_NAMES for name in folders)
        return only_splits or bool(_subfolders(root / "train"))
    nested = [name for name in folders if name in _SPLIT_NAMES and _subfolders(root / name)]
    if nested:
        raise UserError(f"{root}: found {_folders(nested)} but no train/; {_LAYOUT}")
    return False


def _choose_validation(root: Path, folders: list[str]) -> tuple[str | None, str | None]:
    """The names of the validation folder and of a further test folder."""
    found = [name for name in _VAL_NAMES if name in folders]
    if len(found) > 1:
        raise UserError(f"{root}: {_folders(found)} could each be the validation split; keep one of them")
    test = "test" if "test" in folders else None
    if found:
        return found[0], test
    return test, None


def _scan_like(root: Path, train: FolderSource) -> FolderSource:
    source = scan_classes(root)
    unknown = sorted(set(source.classes) - set(train.classes))
    if unknown:
        raise UserError(
            f"{root}: no images of the class {_folders(unknown)} in {train.root}; add some there or remove it here"
        )
    return source.with_classes(train.classes)


def _split(source: FolderSource, val_fraction: float, split_seed: int) -> dict[str, Source]:
    if not 0 < val_fraction < 1:
        raise UserError(
            f"val_fraction must lie between 0 and 1 to split {source.root}, which has no val/ folder; "
            f"got {val_fraction}"
        )
    counts = np.bincount(source.labels, minlength=len(source.classes))
    alone = [name for name, count in zip(source.classes, counts, strict=True) if count < 2]
    if alone:
        raise UserError(
            f"{source.root}: a single image in the class {_folders(alone)}; splitting off a validation set "
            "takes two: add images, remove the folder or provide train/ and val/"
        )
    is_val = np.zeros(len(source), dtype=bool)
    ends = np.cumsum(counts)
    for name, count, end in zip(source.classes, counts.tolist(), ends.tolist(), strict=True):
        # Seeded by the class's name, so that adding a class leaves the split of the others as it was.
        seed = counter_seed(split_seed, zlib.crc32(os.fsencode(name)))
        size = min(max(int(count * val_fraction + 0.5), 1), count - 1)
        is_val[end - count + frozen_generator(seed).permutation(count)[:size]] = True
    return {"train": source.subset(np.flatnonzero(~is_val)), "val": source.subset(np.flatnonzero(is_val))}


def _subfolders(root: Path) -> list[str]:
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if entry.name[0] != "." and entry.is_dir())


def _list_images(folder: str) -> list[bytes]:
    """Names of the images below a class folder, relative to it, sorted as bytes (by no locale)."""
    return sorted(_walk_images(folder, "", frozenset()))


def _walk_images(folder: str, prefix: str, above: frozenset[tuple[int, int]]) -> Iterator[bytes]:
    nested: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name
            if name[0] == ".":
                continue
            if entry.is_dir():
                nested.append(name)
            elif name.lower().endswith(EXTENSIONS):
                # Whatever it is: a broken link is then reported as a damaged image, not overlooked.
                yield os.fsencode(prefix + name)
    if not nested:
        return
    status = Path(folder).stat()
    here = (status.st_dev, status.st_ino)
    if here in above:
        raise UserError(f"{folder} is a link to a folder above it; remove the link")
    for name in nested:
        yield from _walk_images(f"{folder}/{name}", f"{prefix}{name}/", above | {here})


def _no_class_folders(root: Path) -> str:
    with os.scandir(root) as entries:
        images = sum(entry.name.lower().endswith(EXTENSIONS) for entry in entries)
    if images:
        return (
            f"{root} holds {images:,} images but no class folders: "
            f"an image's label is the name of its folder, so sort them into {root}/CLASS/"
        )
    return f"{root} holds no class folders; {_LAYOUT}"


def _folders(names: Sequence[str], limit: int = 5) -> str:
    shown = ", ".join(f"{name}/" for name in names[:limit])
    rest = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return f"folder{'s' if len(names) > 1 else ''} {shown}{rest}"
