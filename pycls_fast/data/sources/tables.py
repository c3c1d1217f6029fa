"""Datasets that are a table of paths and labels: CSV, TSV or Parquet."""

from __future__ import annotations

import csv
import io
import operator
import os
from collections.abc import Sequence
from functools import partial
from itertools import chain, compress
from pathlib import Path
from typing import Any

import numpy as np

from pycls_fast.data.source import ColumnSource, Opening
from pycls_fast.data.sources.base import Images, Subset, number_groups
from pycls_fast.data.sources.files import (
    ENCODING,
    EXTENSIONS,
    NO_LABEL,
    SPLIT_OF,
    FileImages,
    find_files,
    missing_column,
    name_classes,
    read_class_list,
)
from pycls_fast.data.sources.index import CachePolicy, Index, load_or_build
from pycls_fast.data.sources.remote import stamp_of
from pycls_fast.data.sources.texts import Texts
from pycls_fast.errors import UserError, one_of, refuse, refusing
from pycls_fast.files import exists
from pycls_fast.reading import TABLE_BYTES, open_file

TABLES = (".csv", ".tsv", ".parquet")
_SPLITS = ("train", "val", "test")
# If none of so many first images is there, it is the paths that are wrong.
_LOOKED_FOR = 16


def open_manifest(root: str | Path, data: ColumnSource, how: Opening, path_column: str) -> dict[str, Images]:
    """The parts of a dataset that tables describe, in the tables' order.

    The tables are `train.csv` and `val.csv` (or .tsv, .parquet) in `root`, or one table, which is "all". A column
    `split` that says train, val or test divides a table. Test images without labels are left out. Paths are absolute,
    or relative to `root` if that is a folder, else to the table's own folder. Labels are names or numbers (named by
    `classes.txt`, if that lies beside the table), or several of them (`data.label_separator`).

    Raises:
        UserError: missing files or columns, empty tables, paths where nothing is, labels that make no sense.
    """
    place = Path(root)
    files = find_files(str(place), TABLES, data, deep=False)
    names = read_class_list(str(place))
    base = place if place.is_dir() else place.parent
    opened: dict[str, Images] = {}
    for split, found in files.items():
        if len(found) > 1:
            raise UserError(f"{place}: {found[0]} and {found[1]} are both tables of {split}; choose with data.train=")
        path = Path(found[0])
        stamp = {"files": stamp_of(found[0]), "label": data.label_column, "separator": data.label_separator}
        stamp |= {"path": path_column, "classes": names, "group": data.group_by}
        index = load_or_build(
            path.absolute(),
            "manifest",
            CachePolicy.of(data, how),
            build=partial(_read_table, path, stamp, is_test=split == "test"),
            is_fresh=partial(operator.eq, stamp),
        )
        source = FileImages(base, index.names, index.labels)
        source.groups = index.more.get("groups")
        first = [source.name(number) for number in range(min(len(source), _LOOKED_FOR))]
        ending = _missing_ending(first)
        # Those of a test are perhaps not there yet.
        if ending is None and split != "test" and first:
            refuse([f"{path}: no {first[0]}, with or without .jpg, nor the next ones; paths begin at data.root"])
        source.ending = ending or ""
        parts: dict[str, Images] = {split: source}
        numbers = np.unique(index.more.get("splits", ())).tolist()
        # Beside other tables, a column that says the same of all images says no more than the table's name.
        if len(numbers) and (len(files) == 1 or (len(numbers) > 1 and data.val is None)):
            parts = {_SPLITS[k]: Subset(source, np.flatnonzero(index.more["splits"] == k)) for k in numbers}
        twice = opened.keys() & parts.keys()
        refuse(f"{path}: another table has {name} images, too; choose with data.train=" for name in sorted(twice))
        opened |= parts
    return opened


def _missing_ending(names: Sequence[str]) -> str | None:
    """What names lack of those of files that are there; None if there are none. Tables of competitions have ids."""
    endings = ("", *EXTENSIONS, *map(str.upper, EXTENSIONS))
    return next((ending for ending in endings if any(exists(Path(name + ending)) for name in names)), None)


def _read_table(path: Path, stamp: dict[str, Any], *, is_test: bool) -> Index:
    reader = _read_parquet if path.suffix.lower() == ".parquet" else _read_csv
    table: dict[str, Sequence[Any]] = dict(reader(path))
    path_column, label_column, separator = stamp["path"], stamp["label"], stamp["separator"]
    if separator is not None and path_column in table and label_column not in table:
        others = {name: column for name, column in table.items() if name != stamp["group"]}
        table |= _labels_from_columns(others, label_column)
    if is_test and all(label in NO_LABEL for label in table.get(label_column, ())):
        # It is left out, whatever its columns.
        table = {path_column: [], label_column: [], stamp["group"]: []}
    for column, key in ((path_column, "data.path_column"), (label_column, "data.label_column")):
        if column not in table:
            raise missing_column(str(path), column, list(table), f"data.source=manifest {key}")
    paths, labels = list(table[path_column]), list(table[label_column])
    more: dict[str, np.ndarray] = {}
    if stamp["group"] in table:
        more["groups"] = number_groups(table[stamp["group"]])
    if "split" in table:
        said = [str(value).strip() for value in table["split"]]
        for value in sorted(set(said)):
            one_of(f"{path}: the column split", value, SPLIT_OF)
        splits = np.array([_SPLITS.index(SPLIT_OF[value]) for value in said], dtype=np.uint8)
        kept = splits != _SPLITS.index("test")
        if all(label in NO_LABEL for label in compress(labels, ~kept)):
            # A test split without labels is left out.
            paths, labels, splits = list(compress(paths, kept)), list(compress(labels, kept)), splits[kept]
            more = {name: numbers[kept] for name, numbers in more.items()}
        more["splits"] = splits
    found = name_classes(labels, names=stamp["classes"], where=str(path), separator=separator)
    texts = Texts.of(os.fsencode(str(own)) for own in paths)
    return Index(texts, found, stamp, more)


# How a multi-hot column says whether an image is of its class.
_MULTI_HOT = {"0": False, "0.0": False, "False": False, "1": True, "1.0": True, "True": True}


def _labels_from_columns(table: dict[str, Sequence[Any]], label_column: str) -> dict[str, list[list[str]]]:
    """A column of labels for a table that has a column of zeros and ones for each class; empty for other tables."""
    columns = {
        name: [_MULTI_HOT[str(value)] for value in column]
        for name, column in table.items()
        if column and all(str(value) in _MULTI_HOT for value in column)
    }
    if not columns:
        return {}
    rows = zip(*columns.values(), strict=True)
    return {label_column: [[name for name, is_true in zip(columns, row, strict=True) if is_true] for row in rows]}


def _read_csv(path: Path) -> dict[str, list[str]]:
    separators = "separated by commas, semicolons or tabs"
    what = f"{path} is no table in UTF-8 with as many values in each line as columns, {separators}"
    with (
        refusing(what, OSError, ValueError, csv.Error),
        open_file(path, TABLE_BYTES) as opened,
        io.TextIOWrapper(opened, ENCODING, newline="") as file,
    ):
        # Where commas are decimal points, Excel writes semicolons. The first counts if none is more frequent.
        usual = "\t,;" if path.suffix.lower() == ".tsv" else ",;\t"
        first = file.readline()
        separator = max(usual, key=first.count)
        # "path, label" and columns that are aligned by blanks exist, too.
        reader = csv.reader(chain([first], file), delimiter=separator, skipinitialspace=True)
        header = next(reader, [])
        rows = [[value.rstrip() for value in row] for row in reader if row]
        columns = list(zip(*rows, strict=True)) if rows else [()] * len(header)
        return {name.strip(): list(column) for name, column in zip(header, columns, strict=True)}


def _read_parquet(path: Path) -> dict[str, list[object]]:
    with refusing(f"{path}: Parquet needs pyarrow", ImportError, use="pip install 'pycls_fast[hub]'"):
        import pyarrow.parquet as pq
    with refusing(f"{path}: cannot be read", OSError, ValueError), open_file(path, TABLE_BYTES) as opened:
        table = pq.read_table(opened)
        return {name: table.column(name).to_pylist() for name in table.column_names}
