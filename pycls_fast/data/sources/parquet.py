"""Parquet files as the Hugging Face hub lays out image datasets: bytes and labels in columns."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pycls_fast.data.sources.arrays import Mapped, Texts
from pycls_fast.data.sources.base import Source
from pycls_fast.data.sources.index_cache import Index, load_or_build
from pycls_fast.data.sources.labels import missing_column, name_classes, read_class_list
from pycls_fast.data.sources.layout import find_files
from pycls_fast.data.sources.open_files import OpenFiles
from pycls_fast.data.sources.options import OpenOptions
from pycls_fast.data.sources.parquet_files import locate_values, need_pyarrow
from pycls_fast.data.sources.progress import progress
from pycls_fast.data.sources.splits import as_splits
from pycls_fast.errors import UserError, first_few, first_line

_THREADS = 8


class ParquetSource(Mapped):
    """Images in Parquet files, in the order of files and rows."""

    def __init__(
        self, root: Path, classes: Sequence[str], files: Texts, column: str, arrays: dict[str, np.ndarray]
    ) -> None:
        """
        Args:
            files: paths relative to `root`.
            column: dotted path of the column with the encoded images.
            arrays: `labels`, int32 per row; `block_ends` (rows up to the end of each row group), `block_files` and
                `block_groups` (its file and its number there), int64; `places`, int64 (rows, 2): offset and size of
                each image in its file, -1 if its row group has to be read.
        """
        self.root = root
        self.classes = tuple(classes)
        self.labels = arrays["labels"]
        self.block_ends = arrays["block_ends"]
        self._block_files = arrays["block_files"]
        self._block_groups = arrays["block_groups"]
        self._places = arrays["places"]
        self._names = files
        self._column = column
        self._files = OpenFiles()
        # The row group that this process read last.
        self._held: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> tuple[bytes, int]:
        block = self._block(index)
        path = self.root / self._names[int(self._block_files[block])]
        offset, size = self._places[index].tolist()
        label = int(self.labels[index])
        if offset >= 0:
            return self._files.read(str(path), offset, size), label
        if self._held is None or self._held[0] != block:
            self._held = (block, self._read_group(path, int(self._block_groups[block])))
        value = self._held[1][index - self._start(block)].as_py()
        if value is None:
            raise OSError("there are no bytes in this row")
        return value, label

    def _read_group(self, path: Path, group: int) -> Any:
        import pyarrow

        pq = need_pyarrow("data.source=parquet")
        try:
            with pq.ParquetFile(path) as file:
                column = file.read_row_group(group, columns=[self._column]).column(0)
        except (pyarrow.ArrowException, ValueError) as error:
            raise OSError(f"row group {group} of {path}: {first_line(error)}") from error
        for name in self._column.split(".")[1:]:
            column = pyarrow.compute.struct_field(column, name)
        return column

    def name(self, index: int) -> str:
        block = self._block(index)
        file = int(self._block_files[block])
        first = int(np.searchsorted(self._block_files, file))
        return f"{self.root / self._names[file]}[{index - self._start(first)}]"

    def _block(self, index: int) -> int:
        return int(np.searchsorted(self.block_ends, index, side="right"))

    def _start(self, block: int) -> int:
        return int(self.block_ends[block - 1]) if block else 0

    def describe(self) -> str:
        slow = int(np.count_nonzero(self._places[:, 0] < 0))
        how = "" if not slow else ", compressed: faster for training if packed (tools/prepare_data.py pack)"
        files = f"{len(self._names):,} Parquet files of {self.root}"
        return f"{len(self):,} images of {len(self.classes):,} classes in {files}{how}"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_held": None}


@dataclass(frozen=True)
class _Part:
    """The contents of one file."""

    labels: list[Any]
    names: tuple[str, ...] | None
    group_rows: list[int]
    places: np.ndarray
    column: str


def open_parquet(root: str | Path, options: OpenOptions) -> dict[str, Source]:
    """The splits of Parquet files with images in them, told apart by their names (`train-00000-of-00294.parquet`).

    `options.image_column` holds images as structs with a field `bytes` or as binary; `options.label_column` whole
    numbers, with class names in the file's metadata or in `classes.txt`, or names.

    Raises:
        UserError: missing files, columns or labels; pyarrow not installed.
    """
    need_pyarrow("data.source=parquet")
    place = Path(root)
    files = find_files(str(place), (".parquet",), train=options.train, val=options.val)
    base = place if place.is_dir() else place.parent
    names = read_class_list(str(place))
    opened = {
        split: _open_split(base, split, [Path(f) for f in found], names, options) for split, found in files.items()
    }
    return as_splits(opened, options, where=str(place))


def _open_split(
    base: Path, split: str, files: Sequence[Path], names: Sequence[str] | None, options: OpenOptions
) -> ParquetSource:
    image_column, label_column, cache = options.image_column, options.label_column, options.cache
    stats = [file.stat() for file in files]
    stamp = {
        "files": [[str(f), status.st_size, status.st_mtime_ns] for f, status in zip(files, stats, strict=True)],
        "columns": [image_column, label_column],
        "classes": list(names) if names is not None else None,
    }
    index = load_or_build(
        base.absolute(),
        f"parquet_{split}",
        cache,
        build=lambda: _build(base, files, image_column, label_column, names, stamp, may_lack=split == "test"),
        count=lambda index: len(index.arrays["labels"]),
        is_fresh=lambda kept: kept == stamp,
        columns=(image_column, label_column),
    )
    paths = Texts.of(os.fsencode(os.path.relpath(file, base)) for file in files)
    return ParquetSource(base, index.more["classes"], paths, index.more["column"], dict(index.arrays))


def _build(
    base: Path,
    files: Sequence[Path],
    image_column: str | None,
    label_column: str,
    names: Sequence[str] | None,
    stamp: dict[str, Any],
    *,
    may_lack: bool,
) -> Index:
    parts: list[_Part] = []
    with ThreadPoolExecutor(_THREADS) as pool, progress(f"index {base}", len(files), "files") as advance:
        for part in pool.map(lambda file: _read_part(file, image_column, label_column, may_lack), files):
            parts.append(part)
            advance(1)
    stored = names or parts[0].names
    different = [str(f) for f, part in zip(files, parts, strict=True) if part.names != parts[0].names]
    if different and names is None:
        raise UserError(
            f"{first_few(different, 3)}: class names differ from those in {files[0]}; write them to classes.txt beside "
            "them"
        )
    columns = {part.column for part in parts}
    if len(columns) > 1:
        raise UserError(
            f"{base}: images in the columns {first_few(sorted(columns))}; choose one with data.image_column=NAME"
        )
    values = [value for part in parts for value in part.labels]
    if not values:
        raise UserError(f"{files[0]}: no rows")
    if may_lack and all(value is None for value in values):
        values = [-1] * len(values)
    if any(value is None for value in values):
        raise UserError(f"{base}: rows without a {label_column}; data.label_column chooses another column")
    classes, labels = name_classes(values, names=stored, where=str(files[0].parent), may_lack=may_lack)
    rows = [count for part in parts for count in part.group_rows]
    arrays: dict[str, np.ndarray] = {
        "labels": labels,
        "block_ends": np.cumsum(rows, dtype=np.int64),
        "block_files": np.repeat(np.arange(len(parts)), [len(part.group_rows) for part in parts]).astype(np.int64),
        "block_groups": np.concatenate([np.arange(len(part.group_rows)) for part in parts]).astype(np.int64),
        "places": np.concatenate([part.places for part in parts]),
    }
    return Index(arrays, {"classes": list(classes), "column": columns.pop()}, stamp)


def _read_part(path: Path, image_column: str | None, label_column: str, may_lack: bool) -> _Part:
    import pyarrow

    pq = need_pyarrow("data.source=parquet")
    try:
        with pq.ParquetFile(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
            has_labels = label_column in schema.names
            if not has_labels and not may_lack:
                raise missing_column(str(path), label_column, schema.names, "data.label_column")
            column = _image_column(path, schema, image_column)
            leaf = next(i for i in range(len(file.schema)) if file.schema.column(i).path == column)
            levels = file.schema.column(leaf)
            places = None
            if levels.max_repetition_level == 0:
                places = locate_values(path, metadata, leaf, levels.max_definition_level)
            rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
            labels = file.read(columns=[label_column]).column(0).to_pylist() if has_labels else [None] * sum(rows)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as Parquet: {first_line(error)}") from error
    if places is None:
        places = np.full((len(labels), 2), -1, dtype=np.int64)
    return _Part(labels, _class_names(schema, label_column), rows, places, column)


def _image_column(path: Path, schema: Any, wanted: str | None) -> str:
    """Dotted path of the column of encoded images."""
    import pyarrow

    def leaf(name: str) -> str | None:
        kind = schema.field(name).type
        if pyarrow.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
            return f"{name}.bytes"
        return name if pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind) else None

    if wanted is not None and wanted not in schema.names:
        raise missing_column(str(path), wanted, schema.names, "data.image_column")
    found = {name: leaf(name) for name in schema.names if wanted in (None, name)}
    leaves = {name: column for name, column in found.items() if column is not None}
    if not leaves:
        what = "no column holds images" if wanted is None else f"the column {wanted} holds no images"
        raise UserError(
            f"{path}: {what} (binary, or structs with a field bytes); it has {first_few(sorted(schema.names), 12)}: "
            "choose one with data.image_column=NAME, or use data.source=manifest for a column of paths"
        )
    if len(leaves) > 1:
        raise UserError(f"{path}: {first_few(sorted(leaves))} all hold images; choose one with data.image_column=NAME")
    return next(iter(leaves.values()))


def _class_names(schema: Any, label_column: str) -> tuple[str, ...] | None:
    """The names of a ClassLabel column in the metadata that `datasets` writes."""
    raw = (schema.metadata or {}).get(b"huggingface")
    if raw is None:
        return None
    feature = json.loads(raw).get("info", {}).get("features", {}).get(label_column, {})
    return tuple(feature["names"]) if isinstance(feature, dict) and feature.get("names") else None
