"""Locates images inside Parquet files.

A column of images that is neither compressed nor dictionary-encoded (as `datasets` writes it) is a run of pages, each a
header and then the values with their lengths: each image can be read directly. Otherwise a whole row group has to be
read and decompressed for each image in it.

The format: https://parquet.apache.org/docs/file-format/, page headers in Thrift's compact protocol.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np

from pycls_fast.errors import UserError

_DATA_PAGE, _DATA_PAGE_V2 = 0, 3
_PLAIN, _RLE = 0, 3


def need_pyarrow(what: str) -> Any:
    """Import and return `pyarrow.parquet`.

    Raises:
        UserError: it is not installed.
    """
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{what} needs pyarrow, which is not installed: pip install -e '.[parquet]'") from error
    return pyarrow.parquet


def locate_values(path: Path, metadata: Any, column: int, max_definition_level: int) -> np.ndarray | None:
    """Offset and size in the file of every value of a binary column, int64 (rows, 2).

    Args:
        metadata: pyarrow's `FileMetaData`.
        column: number of the column among the file's leaves.
        max_definition_level: that column's; a value with a lower one is missing.

    Returns:
        None if the values cannot be read directly: compressed, dictionary-encoded, damaged, or some missing.
    """
    chunks = [metadata.row_group(number).column(column) for number in range(metadata.num_row_groups)]
    if any(chunk.compression != "UNCOMPRESSED" or chunk.has_dictionary_page for chunk in chunks):
        return None
    places: list[tuple[int, int]] = []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            if not all(_locate_in_chunk(data, chunk, max_definition_level, places) for chunk in chunks):
                return None
        except (IndexError, KeyError, TypeError, ValueError):
            # A damaged page header: pyarrow, which then reads the column, says what is wrong.
            return None
    return np.array(places, dtype=np.int64).reshape(-1, 2)


def _locate_in_chunk(data: mmap.mmap, chunk: Any, max_definition_level: int, places: list[tuple[int, int]]) -> bool:
    """Add the values of one column chunk; False where that is not possible."""
    before = len(places)
    at, end = chunk.data_page_offset, chunk.data_page_offset + chunk.total_compressed_size
    while at < end and len(places) - before < chunk.num_values:
        header, at = _read_struct(data, at)
        if not _locate_in_page(data, at, header, max_definition_level, places):
            return False
        at += header[3]
    return len(places) - before == chunk.num_values


def _locate_in_page(
    data: mmap.mmap, start: int, header: dict[int, Any], max_definition_level: int, places: list[tuple[int, int]]
) -> bool:
    """Append the places of one page's values; False if they cannot be read directly."""
    at, end = start, start + header[3]
    if header[1] == _DATA_PAGE:
        about = header[5]
        count, encoding = about[1], about[2]
        if max_definition_level:
            if about[3] != _RLE:
                return False
            at += 4 + int.from_bytes(data[at : at + 4], "little")
    elif header[1] == _DATA_PAGE_V2:
        about = header[8]
        count, encoding = about[1], about[4]
        at += about[5] + about[6]
    else:
        return False
    if encoding != _PLAIN:
        return False
    for _ in range(count):
        if at + 4 > end:
            # Fewer values than rows: some are missing.
            return False
        size = int.from_bytes(data[at : at + 4], "little")
        places.append((at + 4, size))
        at += 4 + size
    return at == end


def _read_struct(data: mmap.mmap, at: int) -> tuple[dict[int, Any], int]:
    """A struct in Thrift's compact protocol as field number -> value, and where it ends."""
    fields: dict[int, Any] = {}
    number = 0
    while True:
        head = data[at]
        at += 1
        if head == 0:
            return fields, at
        kind, step = head & 0x0F, head >> 4
        if step:
            number += step
        else:
            value, at = _read_varint(data, at)
            number = _zigzag(value)
        fields[number], at = _read_value(data, at, kind)


def _read_value(data: mmap.mmap, at: int, kind: int) -> tuple[Any, int]:
    if kind in (1, 2):  # true, false
        return kind == 1, at
    if kind == 3:  # byte
        return data[at], at + 1
    if kind in (4, 5, 6):  # integers
        value, at = _read_varint(data, at)
        return _zigzag(value), at
    if kind == 7:  # double
        return None, at + 8
    if kind == 8:  # binary
        size, at = _read_varint(data, at)
        return data[at : at + size], at + size
    if kind in (9, 10):  # list, set
        head = data[at]
        at += 1
        size, inner = head >> 4, head & 0x0F
        if size == 15:
            size, at = _read_varint(data, at)
        values = []
        for _ in range(size):
            value, at = _read_value(data, at, inner) if inner not in (1, 2) else (data[at] == 1, at + 1)
            values.append(value)
        return values, at
    if kind == 12:  # struct
        return _read_struct(data, at)
    raise ValueError(f"type {kind} in a page header")


def _read_varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _zigzag(value: int) -> int:
    return (value >> 1) ^ -(value & 1)
