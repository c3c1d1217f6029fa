"""A table of paths and labels: CSV, TSV or Parquet."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pycls_fast.data.sources.arrays import Texts
from pycls_fast.data.sources.base import LabelledSource, Source
from pycls_fast.data.sources.files import FileSource
from pycls_fast.data.sources.index_cache import Index, load_or_build
from pycls_fast.data.sources.layout import find_files, missing_column, name_classes, read_class_list
from pycls_fast.data.sources.options import Opening
from pycls_fast.data.sources.parquet_files import need_pyarrow
from pycls_fast.data.sources.splits import Subset, as_splits
from pycls_fast.errors import UserError, first_line

EXTENSIONS = (".csv", ".tsv", ".parquet")
_SPLIT_COLUMN = "split"
_SPLITS = {"train": 0, "val": 1, "valid": 1, "validation": 1, "test": 2}


def open_manifest(root: str | Path, options: Opening) -> dict[str, Source]:
    """The splits of a dataset that tables describe, in the tables' order.

    The tables are `train.csv` and `val.csv` (or .tsv, .parquet) in `root`, or one table: with a column `split` that
    says train, val or test, else split at random class by class. Paths in them are absolute, or relative to `root`
    where that is a folder, else to the table's own folder. Labels are names or numbers (named by `classes.txt`, if
    that lies beside the table).

    Raises:
        UserError: missing files or columns, empty tables, labels that make no sense.
    """
    place = Path(root)
    files = find_files(str(place), EXTENSIONS, train=options.train, val=options.val)
    for split, found in files.items():
        if len(found) > 1:
            raise UserError(
                f"{place}: {found[0]} and {found[1]} are both tables of {split}; choose with data.train=NAME"
            )
    base = place if place.is_dir() else place.parent
    names = read_class_list(str(place))
    opened = {split: _Table(Path(found[0]), base, names, options) for split, found in files.items()}
    if "all" in opened and opened["all"].splits is not None:
        return _by_column(opened["all"])
    return as_splits({split: table.source for split, table in opened.items()}, options, where=str(place))


class _Table:
    """One table, read (or its index)."""

    def __init__(self, path: Path, base: Path, class_names: Sequence[str] | None, options: Opening) -> None:
        path_column, label_column, cache = options.path_column, options.label_column, options.cache
        self.path = path
        status = path.stat()
        stamp = {
            "size": status.st_size,
            "time": status.st_mtime_ns,
            "columns": [path_column, label_column],
            "classes": list(class_names) if class_names is not None else None,
        }
        index = load_or_build(
            path.absolute(),
            "manifest",
            cache,
            build=lambda: self._read(path_column, label_column, class_names, stamp),
            count=lambda index: len(index.arrays["labels"]),
            is_fresh=lambda kept: kept == stamp,
        )
        names = Texts(index.arrays["names"], index.arrays["name_ends"])
        self.source: LabelledSource = FileSource(base, index.more["classes"], names, index.arrays["labels"])
        self.splits = index.arrays.get("splits")

    def _read(
        self, path_column: str, label_column: str, class_names: Sequence[str] | None, stamp: dict[str, object]
    ) -> Index:
        reader = _read_parquet if self.path.suffix == ".parquet" else _read_csv
        columns = reader(self.path)
        for column, key in ((path_column, "data.path_column"), (label_column, "data.label_column")):
            if column not in columns:
                raise missing_column(str(self.path), column, list(columns), key)
        paths, labels = columns[path_column], columns[label_column]
        if not len(paths):
            raise UserError(f"{self.path} has no rows")
        pairs = enumerate(zip(paths, labels, strict=True), start=1)
        empty = next((row for row, pair in pairs if "" in pair or None in pair), None)
        if empty is not None:
            raise UserError(f"{self.path}: row {empty} below the header has no path or no label")
        classes, numbers = name_classes(labels, names=class_names, where=str(self.path))
        names = Texts.of(os.fsencode(str(path)) for path in paths)
        arrays = {"names": names.data, "name_ends": names.ends, "labels": numbers}
        if _SPLIT_COLUMN in columns:
            arrays["splits"] = self._split_numbers(columns[_SPLIT_COLUMN])
        return Index(arrays, {"classes": list(classes)}, stamp)

    def _split_numbers(self, values: Sequence[object]) -> np.ndarray:
        unknown = sorted({str(value) for value in values} - set(_SPLITS))
        if unknown:
            raise UserError(f"{self.path}: the column split says {unknown[0]!r}; it can say {', '.join(_SPLITS)}")
        return np.array([_SPLITS[str(value)] for value in values], dtype=np.uint8)


def _by_column(table: _Table) -> dict[str, Source]:
    assert table.splits is not None
    found: dict[str, Source] = {}
    for split, number in (("train", 0), ("val", 1), ("test", 2)):
        rows = np.flatnonzero(table.splits == number)
        if len(rows):
            found[split] = Subset(table.source, rows)
        elif split != "test":
            raise UserError(f"{table.path}: no row whose column split says {split}")
    return found


def _read_csv(path: Path) -> dict[str, list[str]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        header = next(reader, None)
        if not header:
            raise UserError(f"{path} is empty; its first line names the columns")
        columns: list[list[str]] = [[] for _ in header]
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                raise UserError(f"{path}: line {reader.line_num} has {len(row)} values for {len(header)} columns")
            for column, value in zip(columns, row, strict=True):
                column.append(value)
    return dict(zip([name.strip() for name in header], columns, strict=True))


def _read_parquet(path: Path) -> dict[str, list[object]]:
    pq = need_pyarrow("a Parquet manifest")
    try:
        table = pq.read_table(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as Parquet: {first_line(error)}") from error
    return {name: table.column(name).to_pylist() for name in table.column_names}
