"""Opens the splits of a dataset by the name of its layout."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from pycls_fast.data.sources.base import Source
from pycls_fast.data.sources.cifar import is_cifar, open_cifar
from pycls_fast.data.sources.folders import open_folder
from pycls_fast.data.sources.hub import open_hub, open_parquet
from pycls_fast.data.sources.packed import is_packed, open_packed
from pycls_fast.data.sources.remote import is_remote
from pycls_fast.data.sources.splits import OpenOptions, refuse_folds
from pycls_fast.data.sources.tables import open_manifest
from pycls_fast.data.sources.tars import open_tars
from pycls_fast.errors import UserError


def _cifar(root: str, options: OpenOptions) -> dict[str, Source]:
    refuse_folds(root, options.folds)
    return open_cifar(root)


_OPEN: dict[str, Callable[[str, OpenOptions], dict[str, Source]]] = {
    "folder": open_folder,
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
_TABLES = {".csv": "manifest", ".tsv": "manifest", ".parquet": "parquet"}
_SUFFIXES = {**_TABLES, ".tar": "tar"}


def open_splits(kind: str, root: str, options: OpenOptions) -> dict[str, Source]:
    """The splits of a dataset by name, "train" and "val" among them.

    Args:
        kind: "folder", "manifest", "parquet", "hub", "tar", "packed", "cifar", or "auto" for class folders, packed
            images or CIFAR.
        root: a path; for "hub" a dataset's name, for "tar" perhaps an address.

    Raises:
        UserError: no such dataset, one in another layout, no permission to read it, or mistakes in it.
    """
    layout = recognise(root) if kind == "auto" else kind
    if layout in _FIXED_NAMES and options.train is not None:
        raise UserError(
            f"data.train: data.source={layout} has folders of fixed names; choose another data.source for these files"
        )
    try:
        return _OPEN[layout](root, options)
    except PermissionError as error:
        raise UserError(f"{root} cannot be read ({error.filename}: {error.strerror})") from error
    except UserError as error:
        meant = _looks_like(root) if kind == "auto" else None
        if meant is None:
            raise
        raise UserError(*error.lines[:-1], f"{error.lines[-1]}; did you mean data.source={meant}?") from error


def recognise(root: str) -> str:
    """The layout of a folder among those that need no `data.source`.

    Raises:
        UserError: the folder holds a table, which may list its images or something else.
    """
    path = Path(root)
    if is_packed(path) or any(is_packed(path / split) for split in ("train", "val", "test", "all")):
        return "packed"
    if is_cifar(path) or any(path.glob("cifar-*.tar.gz")):
        return "cifar"
    # Kaggle's tables for ImageNet.
    tables = [file for file in _files(path) if file.suffix.lower() in _TABLES and not file.name.startswith("LOC_")]
    if tables:
        kind = _TABLES[tables[0].suffix.lower()]
        raise UserError(f"{root} holds {tables[0].name}; choose data.source={kind}, or data.source=folder without it")
    return "folder"


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.glob("*.*") if file.name[0] != ".") if path.is_dir() else []


def _looks_like(root: str) -> str | None:
    """The layout that may have been meant by a root that is none of class folders."""
    path = Path(root)
    if is_remote(root):
        return "tar"
    if path.is_file():
        return _SUFFIXES.get(path.suffix.lower())
    if not path.exists():
        return "hub" if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", root) else None
    if (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file():
        return "hub"
    files = [file for folder in (path, path / "data", path / "train") for file in _files(folder)]
    return next((_SUFFIXES[file.suffix.lower()] for file in files if file.suffix.lower() in _SUFFIXES), None)
