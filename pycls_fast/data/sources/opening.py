"""Opens the splits of a dataset by the name of its layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pycls_fast.data.sources.base import Images
from pycls_fast.data.sources.cifar import find_cifar, open_cifar
from pycls_fast.data.sources.folders import open_folder, scan_classes
from pycls_fast.data.sources.hub import open_hub, open_parquet
from pycls_fast.data.sources.packed import is_packed, open_packed
from pycls_fast.data.sources.splits import OpenOptions, as_splits
from pycls_fast.data.sources.synthetic import write_digits
from pycls_fast.data.sources.tables import open_manifest
from pycls_fast.data.sources.tars import open_tars
from pycls_fast.errors import UserError


def open_digits(root: str, options: OpenOptions) -> dict[str, Images]:
    """The embedded digits, written to `root` if they are not there; the published results are of a split by position.

    Raises:
        UserError: see `write_digits`.
    """
    write_digits(root)
    return as_splits({"all": scan_classes(Path(root), options.cache, numbered=True)}, options, where=root)


LAYOUTS: dict[str, Callable[[str, OpenOptions], dict[str, Images]]] = {
    "folder": open_folder,
    "manifest": open_manifest,
    "parquet": open_parquet,
    "hub": open_hub,
    "tar": open_tars,
    "packed": open_packed,
    "cifar": open_cifar,
    "digits": open_digits,
}


def open_splits(kind: str, root: str, options: OpenOptions) -> dict[str, Images]:
    """The splits of a dataset by name, "train" and "val" among them.

    Args:
        kind: one of `LAYOUTS`, or "auto" for class folders, packed images or CIFAR.
        root: a path; for "hub" a dataset's name, for "tar" perhaps an address.

    Raises:
        UserError: no such dataset, one in another layout, no permission to read it, or mistakes in it.
    """
    try:
        return LAYOUTS[recognise(Path(root)) if kind == "auto" else kind](root, options)
    except PermissionError as error:
        raise UserError(f"{root} cannot be read ({error.filename}: {error.strerror})") from error


def recognise(root: Path) -> str:
    """The layout of a folder among those that need no `data.source`."""
    if any(is_packed(root / split) for split in ("train", "val", "test", "all")):
        return "packed"
    return "folder" if find_cifar(root) is None else "cifar"
