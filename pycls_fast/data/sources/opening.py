"""Opens the splits of a dataset by the name of its layout; recognises layouts by what is on disk."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

from pycls_fast.data.sources.base import Source
from pycls_fast.data.sources.cifar import is_cifar, open_cifar
from pycls_fast.data.sources.files import EXTENSIONS
from pycls_fast.data.sources.folders import open_folder, subfolders
from pycls_fast.data.sources.hub import open_hub, open_parquet
from pycls_fast.data.sources.manifest import open_manifest
from pycls_fast.data.sources.options import OpenOptions
from pycls_fast.data.sources.packed import is_packed, open_packed
from pycls_fast.data.sources.remote import is_remote
from pycls_fast.data.sources.splits import refuse_folds
from pycls_fast.data.sources.tars import open_tars
from pycls_fast.errors import UserError

_SUFFIXES = {".tar": "tar", ".csv": "manifest", ".tsv": "manifest", ".parquet": "parquet"}


def _folder(root: str, options: OpenOptions) -> dict[str, Source]:
    return open_folder(
        root,
        val_fraction=options.val_fraction,
        split_seed=options.split_seed,
        folds=options.folds,
        fold=options.fold,
        whole=options.whole,
        cache=options.cache,
    )


def _cifar(root: str, options: OpenOptions) -> dict[str, Source]:
    refuse_folds(root, options.folds)
    return open_cifar(root)


_OPEN: dict[str, Callable[[str, OpenOptions], dict[str, Source]]] = {
    "folder": _folder,
    "manifest": open_manifest,
    "parquet": open_parquet,
    "hub": open_hub,
    "tar": open_tars,
    "packed": open_packed,
    "cifar": _cifar,
}
LAYOUT_NAMES = tuple(_OPEN)
"""The names of the layouts that `open_splits` opens."""
# Layouts without `data.train` and `data.val`.
_FIXED_NAMES = ("folder", "packed", "cifar")
_SPLITS = ("train", "val", "valid", "validation", "dev", "test", "all")
# At most this many folders are searched: there may be 20,000.
_LOOK_AT = 10
# And this many files of each folder.
_LOOK_AT_FILES = 50


def open_splits(kind: str, root: str, options: OpenOptions) -> dict[str, Source]:
    """The splits of a dataset by name, "train" and "val" among them.

    Args:
        kind: "folder", "manifest", "parquet", "hub", "tar", "packed", "cifar", or "auto" to recognise it.
        root: a path; for "hub" a dataset's name, for "tar" perhaps an address.

    Raises:
        UserError: no such dataset, one in another layout, no permission to read it, or mistakes in it.
    """
    try:
        return _open_splits(kind, root, options)
    except PermissionError as error:
        raise UserError(f"{root} cannot be read ({error.filename}: {error.strerror})") from error


def _open_splits(kind: str, root: str, options: OpenOptions) -> dict[str, Source]:
    found = recognise(root)
    # A table or shards elsewhere, whatever lies in `root`.
    named = _SUFFIXES.get(Path(options.train).suffix.lower()) if options.train is not None else None
    if kind == "auto":
        kind = _only(found, root)
    elif found and kind not in ("hub", named, *found) and not (kind == "manifest" and "parquet" in found):
        others = " or ".join(f"data.source={other}" for other in found)
        raise UserError(f"{root} is not a dataset for data.source={kind}; use {others}")
    if kind in _FIXED_NAMES and options.train is not None:
        raise UserError(
            f"data.train: {root} is read as data.source={kind}, whose folders of splits have fixed names "
            "(data/README.md); rename them, and use data.train=null data.val=null"
            + (f", or read {options.train} with data.source={named}" if named is not None else "")
        )
    return _OPEN[kind](root, options)


def recognise(root: str) -> tuple[str, ...]:
    """The layouts that a place may have, judged by the names in it; empty if none is recognised."""
    if is_remote(root):
        return ("tar",)
    path = Path(root)
    if path.is_file():
        kind = _SUFFIXES.get(path.suffix.lower())
        return (kind,) if kind else ()
    if not path.is_dir():
        return ()
    if is_packed(path) or any(is_packed(path / split) for split in _SPLITS):
        return ("packed",)
    if is_cifar(path) or any(path.glob("cifar-*.tar.gz")):
        return ("cifar",)
    if (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file():
        return ("hub",)
    kinds = _kinds_of_files([path, path / "data", *(path / split for split in _SPLITS)])
    # Tables beside class folders or shards only list something: the images decide.
    if "parquet" in kinds or "tar" in kinds:
        kinds.discard("manifest")
    classes = _count_class_folders(path)
    if not kinds and not classes:
        # A clone of a hub repository may have a folder for each configuration, with one for each split in it. Archives
        # in such folders are those that class folders were unpacked from.
        inner = (top / name for top in _some_folders(path) for name in (".", *_SPLITS))
        kinds = _kinds_of_files(inner) & {"parquet"}
    if classes and "manifest" not in kinds:
        kinds.clear()
    # A single folder beside a table holds the table's images.
    if classes > 1 or (classes and not kinds):
        kinds.add("folder")
    return tuple(sorted(kinds))


def _kinds_of_files(folders: Iterable[Path]) -> set[str]:
    endings = tuple(_SUFFIXES)
    found: list[str] = []
    for folder in folders:
        if folder.is_dir():
            # No `Path` for each entry: there may be a million images.
            with os.scandir(folder) as entries:
                found += [entry.name for entry in entries if entry.name.lower().endswith(endings)]
    return {_SUFFIXES[Path(name).suffix.lower()] for name in found if not name.startswith(("LOC_", "."))}


def _count_class_folders(path: Path) -> int:
    """The number of folders that could be classes, in the split with most of them: 0, 1, or 2 for more."""
    splits = [path / name for name in subfolders(path) if name in _SPLITS]
    return max(sum(1 for _ in islice(_class_folders(top), 2)) for top in splits or [path])


def _class_folders(top: Path) -> Iterator[Path]:
    for folder in _some_folders(top):
        if any(file.name.lower().endswith(EXTENSIONS) for file in islice(folder.iterdir(), _LOOK_AT_FILES)):
            yield folder


def _some_folders(top: Path) -> list[Path]:
    """The first folders in a folder, without unreadable ones (such as a disk's `lost+found`)."""
    folders = [top / name for name in subfolders(top)[:_LOOK_AT]]
    return [folder for folder in folders if os.access(folder, os.R_OK | os.X_OK)]


def _only(found: tuple[str, ...], root: str) -> str:
    if len(found) == 1:
        return found[0]
    if found:
        choices = " or ".join(f"data.source={kind}" for kind in found)
        raise UserError(f"{root} could be {' or '.join(found)}; choose with {choices}")
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", root) and not Path(root).exists():
        raise UserError(
            f"there is no dataset folder {Path(root).absolute()}; if that is a dataset of the Hugging Face hub, use "
            "data.source=hub"
        )
    # Its error, which shows what class folders should look like, is the most useful answer.
    return "folder"
