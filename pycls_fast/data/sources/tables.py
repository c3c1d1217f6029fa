"""Datasets that are a table of paths and labels: CSV, TSV or Parquet."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from pycls_fast.data.source import Opening, Source
from pycls_fast.data.sources.arrays import Texts
from pycls_fast.data.sources.base import Images, Subset
from pycls_fast.data.sources.files import SPLIT_OF, FileImages, find_files
from pycls_fast.data.sources.index import CachePolicy, Index, load_or_build
from pycls_fast.data.sources.labels import ENCODING, missing_column, name_classes, read_class_list
from pycls_fast.data.sources.splits import as_splits
from pycls_fast.errors import UserError, first_line

EXTENSIONS = (".csv", ".tsv", ".parquet")
_SPLIT_COLUMN = "split"
_SPLITS = ("train", "val", "test")
_NO_LABEL = ("", None, "-1", -1)


def open_manifest(
    root: str | Path,
    data: Source,
    how: Opening,
    *,
    train: str | None,
    val: str | None,
    path_column: str,
    label_column: str,
) -> dict[str, Images]:
    """The splits of a dataset that tables describe, in the tables' order.

    The tables are `train.csv` and `val.csv` (or .tsv, .parquet) in `root`, or one table: with a column `split` that
    says train, val or test, else split at random class by class. Test images without labels are left out. Paths in them
    are absolute, or relative to `root` if that is a folder, else to the table's own folder. Labels are names or numbers
    (named by `classes.txt`, if that lies beside the table). Paths may have been written on Windows.

    Raises:
        UserError: missing files or columns, empty tables, labels that make no sense.
    """
    place = Path(root)
    files = find_files(str(place), EXTENSIONS, train=train, val=val, deep=False)
    for split, found in files.items():
        if len(found) > 1:
            raise UserError(
                f"{place}: {found[0]} and {found[1]} are both tables of {split}; choose with data.train=NAME"
            )
    names = read_class_list(str(place))
    base = place if place.is_dir() else place.parent
    opened: dict[str, Images] = {}
    for split, (file,) in files.items():
        source, splits = _open_table(
            Path(file), base, names, (path_column, label_column), CachePolicy.of(data, how), is_test=split == "test"
        )
        opened[split] = source
        if splits is not None and len(files) == 1:
            parts = ((name, np.flatnonzero(splits == number)) for number, name in enumerate(_SPLITS))
            opened = {name: Subset(source, rows) for name, rows in parts if len(rows)}
    return as_splits(opened, data, how, where=str(place))


def _open_table(
    path: Path, base: Path, names: Sequence[str] | None, columns: tuple[str, str], cache: CachePolicy, *, is_test: bool
) -> tuple[FileImages, np.ndarray | None]:
    """The images of a table, from its file or its cached index, and their splits as positions in `_SPLITS`."""
    status = path.stat()
    stamp = {
        "size": status.st_size,
        "time": status.st_mtime_ns,
        "columns": list(columns),
        "test": is_test,
        "classes": list(names) if names is not None else None,
    }
    index = load_or_build(
        path.absolute(),
        "manifest",
        cache,
        build=lambda: _read_table(path, base, columns, names, stamp, is_test=is_test),
        count=lambda index: len(index.arrays["labels"]),
        is_fresh=lambda kept: kept == stamp,
        columns=columns,
    )
    paths = Texts(index.arrays["names"], index.arrays["name_ends"])
    source = FileImages(base, index.more["classes"], paths, index.arrays["labels"])
    return source, index.arrays.get("splits")


def _read_table(
    path: Path,
    base: Path,
    keys: tuple[str, str],
    names: Sequence[str] | None,
    stamp: dict[str, object],
    *,
    is_test: bool,
) -> Index:
    reader = _read_parquet if path.suffix.lower() == ".parquet" else _read_csv
    columns: dict[str, Sequence[Any]] = dict(reader(path))
    for column in (keys[1], _SPLIT_COLUMN):
        # A blank after a name is a slip, not another name.
        if column in columns:
            columns[column] = [value.strip() if isinstance(value, str) else value for value in columns[column]]
    splits = None
    paths: list[Any] = []
    labels: list[Any] = []
    # A test table without labels is left out, whatever its columns.
    if not is_test or any(label not in _NO_LABEL for label in columns.get(keys[1], ())):
        for column, key in zip(keys, ("data.path_column", "data.label_column"), strict=True):
            if column not in columns:
                raise missing_column(str(path), column, list(columns), key)
        paths, labels = list(columns[keys[0]]), list(columns[keys[1]])
        if _SPLIT_COLUMN in columns:
            splits = _split_numbers(path, columns[_SPLIT_COLUMN])
            kept = _labelled_rows(labels, splits)
            paths, labels, splits = list(compress(paths, kept)), list(compress(labels, kept)), splits[kept]
        lacking = [
            row for row, pair in enumerate(zip(paths, labels, strict=True), 1) if not {"", None}.isdisjoint(pair)
        ]
        if lacking or not paths:
            raise UserError(f"{path}: {f'row {lacking[0]:,} has no path or no label' if lacking else 'no rows'}")
    classes: tuple[str, ...] = ()
    numbers = np.zeros(0, dtype=np.int32)
    if labels:
        classes, numbers = name_classes(labels, names=names, where=str(path), may_lack=is_test)
    texts = Texts.of(os.fsencode(own) for own in _slashed(base, [str(own) for own in paths]))
    arrays = {"names": texts.data, "name_ends": texts.ends, "labels": numbers}
    return Index(arrays if splits is None else {**arrays, "splits": splits}, {"classes": list(classes)}, stamp)


def _slashed(base: Path, paths: list[str]) -> list[str]:
    """Windows paths with slashes in place of backslashes.

    On other systems a backslash may be part of a name: then the first path that has one exists.
    """
    first = next((path for path in paths if "\\" in path), None)
    if first is None or os.access(base / first, os.F_OK):
        return paths
    return [path.replace("\\", "/") for path in paths]


def _split_numbers(path: Path, values: Sequence[object]) -> np.ndarray:
    unknown = sorted({str(value) for value in values} - set(SPLIT_OF))
    if unknown:
        raise UserError(f"{path}: the column split says {unknown[0]!r}; it can say {', '.join(SPLIT_OF)}")
    return np.array([_SPLITS.index(SPLIT_OF[str(value)]) for value in values], dtype=np.uint8)


def _labelled_rows(labels: Sequence[object], splits: np.ndarray) -> np.ndarray:
    """Which rows are used, bool: all but those of a test split that has no labels."""
    is_test = splits == _SPLITS.index("test")
    has_labels = any(label not in _NO_LABEL for label in compress(labels, is_test))
    return np.ones_like(is_test) if has_labels else ~is_test


def _read_csv(path: Path) -> dict[str, list[str]]:
    try:
        with path.open(newline="", encoding=ENCODING) as file:
            # Headers like "path, label" exist too.
            reader = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", skipinitialspace=True)
            header = next(reader, [])
            rows = [row for row in reader if row]
            columns = list(zip(*rows, strict=True)) if rows else [()] * len(header)
            return {name.strip(): list(column) for name, column in zip(header, columns, strict=True)}
    except (ValueError, csv.Error) as error:
        raise UserError(f"{path} is no table in UTF-8 with as many values in each line as columns ({error})") from error


def _read_parquet(path: Path) -> dict[str, list[object]]:
    try:
        import pyarrow.parquet as pq

        table = pq.read_table(path)
    except ImportError as error:
        raise UserError("a Parquet table needs pyarrow, which comes with: pip install -e '.[hub]'") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as Parquet: {first_line(error)}") from error
    return {name: table.column(name).to_pylist() for name in table.column_names}
