"""Class labels that are stored as numbers or names, and the list of classes beside the data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pycls_fast.data.sources.remote import is_remote
from pycls_fast.errors import UserError, first_few
from pycls_fast.reading import read_bytes

_MOST_CLASSES = 1_000_000
ENCODING = "utf-8-sig"
"""UTF-8, with or without the byte order mark that Windows adds."""


def name_classes(
    labels: Sequence[object], *, names: Sequence[str] | None, where: str, may_lack: bool = False
) -> tuple[tuple[str, ...], np.ndarray]:
    """Class names and int32 labels for labels that are stored as numbers or names.

    Args:
        labels: integers, or strings; strings that are all whole numbers count as integers.
        names: class names, if known. Numbers are positions in it; strings must be among them.
        where: the file, for messages.
        may_lack: whether this is a test split, in which all may be -1.

    Raises:
        UserError: labels that are neither, not in `names`, several per image, or missing for only some images of a test
        split.
    """
    wrong = [label for label in labels if not isinstance(label, str | int) or isinstance(label, bool)]
    if wrong:
        raise UserError(f"{where}: the label {wrong[0]!r} is no whole number or name; choose another data.label_column")
    values = np.asarray(labels)
    if values.dtype.kind in "UTO":
        # A name with a trailing blank is not another class.
        values = _whole_numbers(np.char.strip(values.astype(str)))
    if may_lack:
        lacking = np.flatnonzero(values.astype(str) == "-1")
        if len(lacking) == len(values):
            return tuple(names or ()), np.full(len(values), -1, dtype=np.int32)
        if len(lacking):
            raise UserError(
                f"{where}: {len(lacking):,} of {len(values):,} test images have no label, or the label -1 (number "
                f"{lacking[0] + 1:,} first), and the others have one; label them all, or none"
            )
    if values.dtype.kind == "U":
        return _named(values, names, where)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= (_MOST_CLASSES if names is None else len(names)):
        count = "" if names is None else f" to {len(names) - 1:,}, one for each class name"
        raise UserError(f"{where}: the label {low if low < 0 else high:,}: labels count the classes from 0{count}")
    return tuple(names) if names is not None else tuple(map(str, range(high + 1))), values.astype(np.int32)


def _named(values: np.ndarray, names: Sequence[str] | None, where: str) -> tuple[tuple[str, ...], np.ndarray]:
    """`name_classes` for strings."""
    found, positions = np.unique(values, return_inverse=True)
    names = names or found.tolist()
    place = {name: label for label, name in enumerate(names)}
    unknown = [name for name in found.tolist() if name not in place]
    if unknown:
        raise UserError(f"{where}: the label {first_few(unknown)} is not among the {len(names):,} class names")
    return tuple(names), np.array([place[name] for name in found.tolist()], dtype=np.int32)[positions]


def _whole_numbers(values: np.ndarray) -> np.ndarray:
    """Convert strings that are all whole numbers ("7", not "007") to integers; leave others as they are."""
    found, positions = np.unique(values, return_inverse=True)
    if not all(re.fullmatch(r"0|-?[1-9][0-9]{0,8}", text) for text in found.tolist()):
        return values
    return found.astype(np.int64)[positions]


def read_class_list(root: str) -> tuple[str, ...] | None:
    """The names in `classes.txt` beside the data, one per line, if there is one.

    Raises:
        UserError: a duplicate name, or a file that is not UTF-8.
    """
    file = (Path(root) if Path(root).is_dir() else Path(root).parent) / "classes.txt"
    if is_remote(root) or not file.is_file():
        return None
    names = read_lines(file)
    if len(set(names)) < len(names):
        raise UserError(f"{file}: {first_few(sorted({n for n in names if names.count(n) > 1}))}: more than once")
    return tuple(names)


def missing_column(what: str, column: str, columns: Sequence[str], key: str) -> UserError:
    """The error for a table without a column."""
    return UserError(
        f"{what} has no column {column!r}; it has {first_few(sorted(columns), 12)}: choose one with {key}=NAME"
    )


def read_lines(file: Path) -> list[str]:
    """The lines that are not blank, stripped.

    Raises:
        OSError: there is no such file, or it may not be read.
        UserError: the file is not UTF-8.
    """
    try:
        text = read_bytes(file).decode(ENCODING)
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 (byte {error.start:,}); save it as UTF-8") from error
    return [line.strip() for line in text.splitlines() if line.strip()]
