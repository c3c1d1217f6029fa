"""Datasets that are a table of paths and labels: CSV, TSV or Parquet."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from pycls_fast.data.sources.arrays import Texts
from pycls_fast.data.sources.base import LabelledSource, Source
from pycls_fast.data.sources.files import FileSource
from pycls_fast.data.sources.find import SPLIT_OF, find_files
from pycls_fast.data.sources.index_cache import Index, load_or_build
from pycls_fast.data.sources.labels import missing_column, name_classes, read_class_list
from pycls_fast.data.sources.options import OpenOptions
from pycls_fast.data.sources.splits import Subset, as_splits
from pycls_fast.data.sources.text_files import ENCODING, not_utf8
from pycls_fast.errors import UserError, first_line

EXTENSIONS = (".csv", ".tsv", ".parquet")
_SPLIT_COLUMN = "split"
_SPLITS = ("train", "val", "test")
_NO_LABEL = ("", None, "-1", -1)


def open_manifest(root: str | Path, options: OpenOptions) -> dict[str, Source]:
    """The splits of a dataset that tables describe, in the tables' order.

    The tables are `train.csv` and `val.csv` (or .tsv, .parquet) in `root`, or one table: with a column `split` that
    says train, val or test, else split at random class by class. Test images without labels are left out. Paths in them
    are absolute, or relative to `root` if that is a folder, else to the table's own folder. Labels are names or numbers
    (named by `classes.txt`, if that lies beside the table). Paths may have been written on Windows.

    Raises:
        UserError: missing files or columns, empty tables, labels that make no sense.
    """
    place = Path(root)
    files = find_files(str(place), EXTENSIONS, train=options.train, val=options.val, deep=False)
    for split, found in files.items():
        if len(found) > 1:
            raise UserError(
                f"{place}: {found[0]} and {found[1]} are both tables of {split}; choose with data.train=NAME"
            )
    base = place if place.is_dir() else place.parent
    names = read_class_list(str(place))
    tables = {split: _Table(split, Path(found[0]), base, names, options) for split, found in files.items()}
    opened = {split: table.source for split, table in tables.items()}
    if len(tables) == 1 and (only := next(iter(tables.values()))).splits is not None:
        opened = _by_column(only)
    return as_splits(opened, options, where=str(place))


class _Table:
    """One table, from its file or its cached index."""

    def __init__(
        self, split: str, path: Path, base: Path, class_names: Sequence[str] | None, options: OpenOptions
    ) -> None:
        path_column, label_column, cache = options.path_column, options.label_column, options.cache
        self.path = path
        self._base = base
        self._is_test = split == "test"
        status = path.stat()
        stamp = {
            "size": status.st_size,
            "time": status.st_mtime_ns,
            "columns": [path_column, label_column],
            "test": self._is_test,
            "classes": list(class_names) if class_names is not None else None,
        }
        index = load_or_build(
            path.absolute(),
            "manifest",
            cache,
            build=lambda: self._read(path_column, label_column, class_names, stamp),
            count=lambda index: len(index.arrays["labels"]),
            is_fresh=lambda kept: kept == stamp,
            columns=(path_column, label_column),
        )
        names = Texts(index.arrays["names"], index.arrays["name_ends"])
        self.source: LabelledSource = FileSource(base, index.more["classes"], names, index.arrays["labels"])
        self.splits = index.arrays.get("splits")

    def _read(
        self, path_column: str, label_column: str, class_names: Sequence[str] | None, stamp: dict[str, object]
    ) -> Index:
        reader = _read_parquet if self.path.suffix.lower() == ".parquet" else _read_csv
        columns: dict[str, Any] = dict(reader(self.path))
        for column in (label_column, _SPLIT_COLUMN):
            # A blank after a name is a slip, not another name.
            if column in columns:
                columns[column] = [value.strip() if isinstance(value, str) else value for value in columns[column]]
        if self._is_test and all(label in _NO_LABEL for label in columns.get(label_column, ())):
            # A test table without labels is left out, whatever its columns.
            return _without_images(stamp)
        for column, key in ((path_column, "data.path_column"), (label_column, "data.label_column")):
            if column not in columns:
                raise missing_column(str(self.path), column, list(columns), key)
        paths, labels = columns[path_column], columns[label_column]
        if not len(paths):
            raise UserError(f"{self.path} has no rows")
        splits = self._split_numbers(columns[_SPLIT_COLUMN]) if _SPLIT_COLUMN in columns else None
        kept = self._labelled_rows(labels, splits)
        self._check_complete(paths, labels, kept)
        paths, labels = [str(path) for path in compress(paths, kept)], list(compress(labels, kept))
        classes, numbers = name_classes(labels, names=class_names, where=str(self.path), may_lack=self._is_test)
        self._check_local(paths)
        names = Texts.of(os.fsencode(path) for path in self._slashed(paths))
        arrays = {"names": names.data, "name_ends": names.ends, "labels": numbers}
        if splits is not None:
            arrays["splits"] = splits[kept]
        return Index(arrays, {"classes": list(classes)}, stamp)

    def _check_complete(self, paths: Sequence[object], labels: Sequence[object], kept: np.ndarray) -> None:
        pairs = enumerate(zip(paths, labels, kept, strict=True), start=1)
        empty = next((row for row, (*pair, is_kept) in pairs if is_kept and ("" in pair or None in pair)), None)
        if empty is not None:
            raise UserError(f"{self.path}: row {empty} below the header has no path or no label")

    def _check_local(self, paths: Sequence[str]) -> None:
        address = next((path for path in paths if "://" in path), None)
        if address is not None:
            raise UserError(
                f"{self.path}: {address}: a table holds paths of local files; download the images, or make tar shards "
                "of them, which are read from addresses (data.source=tar)"
            )

    def _slashed(self, paths: list[str]) -> list[str]:
        """Windows paths with slashes in place of backslashes.

        On other systems a backslash may be part of a name: then the first path that has one exists.
        """
        first = next((path for path in paths if "\\" in path), None)
        if first is None or os.access(self._base / first, os.F_OK):
            return paths
        return [path.replace("\\", "/") for path in paths]

    def _split_numbers(self, values: Sequence[object]) -> np.ndarray:
        unknown = sorted({str(value) for value in values} - set(SPLIT_OF))
        if unknown:
            raise UserError(f"{self.path}: the column split says {unknown[0]!r}; it can say {', '.join(SPLIT_OF)}")
        return np.array([_SPLITS.index(SPLIT_OF[str(value)]) for value in values], dtype=np.uint8)

    @staticmethod
    def _labelled_rows(labels: Sequence[object], splits: np.ndarray | None) -> np.ndarray:
        """Which rows are used, bool: all but those of a test split that has no labels."""
        is_test = np.zeros(len(labels), dtype=bool) if splits is None else splits == _SPLITS.index("test")
        has_labels = is_test.all() or any(label not in _NO_LABEL for label in compress(labels, is_test))
        return np.ones_like(is_test) if has_labels else ~is_test


def _without_images(stamp: dict[str, object]) -> Index:
    none = Texts.of(())
    arrays = {"names": none.data, "name_ends": none.ends, "labels": np.zeros(0, dtype=np.int32)}
    return Index(arrays, {"classes": []}, stamp)


def _by_column(table: _Table) -> dict[str, LabelledSource]:
    assert table.splits is not None
    found: dict[str, LabelledSource] = {}
    for number, split in enumerate(_SPLITS):
        rows = np.flatnonzero(table.splits == number)
        if len(rows):
            found[split] = Subset(table.source, rows)
    if "train" not in found:
        raise UserError(f"{table.path}: no row whose column split says train")
    return found


def _read_csv(path: Path) -> dict[str, list[str]]:
    line = 0
    try:
        with path.open(newline="", encoding=ENCODING) as file:
            # Headers like "path, label" exist too.
            reader = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", skipinitialspace=True)
            header = next(reader, None)
            if not header:
                raise UserError(f"{path} is empty; its first line names the columns")
            columns: list[list[str]] = [[] for _ in header]
            line = reader.line_num
            for row in reader:
                line = reader.line_num
                if not row:
                    continue
                if len(row) != len(header):
                    raise UserError(f"{path}: line {line} has {len(row)} values for {len(header)} columns")
                for column, value in zip(columns, row, strict=True):
                    column.append(value)
    except UnicodeDecodeError as error:
        raise not_utf8(path) from error
    except csv.Error as error:
        raise UserError(
            f"{path}: line {line + 1} cannot be read ({error}); is there a quote that does not end?"
        ) from error
    return dict(zip([name.strip() for name in header], columns, strict=True))


def _read_parquet(path: Path) -> dict[str, list[object]]:
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UserError("a Parquet table needs pyarrow, which comes with: pip install -e '.[hub]'") from error
    try:
        table = pq.read_table(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as Parquet: {first_line(error)}") from error
    return {name: table.column(name).to_pylist() for name in table.column_names}
