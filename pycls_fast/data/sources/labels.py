"""The class labels of tables and archives, stored as numbers or names, and the list of classes beside the data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pycls_fast.data.sources.remote import is_remote
from pycls_fast.errors import UserError, first_few

_MOST_CLASSES = 1_000_000
CLASS_LIST = "classes.txt"
"""A file beside the data with one class name per line, for labels that are numbers."""


def name_classes(
    labels: Sequence[object] | np.ndarray, *, names: Sequence[str] | None, where: str, may_lack: bool = False
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
    stored = () if isinstance(labels, np.ndarray) else labels
    several = next((label for label in stored if isinstance(label, list | tuple | dict)), None)
    if several is not None:
        raise UserError(
            f"{where}: the label {several}: one label per image is needed; choose another with data.label_column=NAME"
        )
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
    if values.dtype.kind in "iu":
        return _numbered(values, names, where)
    if values.dtype.kind != "U":
        raise UserError(f"{where}: labels must be whole numbers or names; got {values[:1].tolist()}")
    return _named(values, names, where)


def _numbered(values: np.ndarray, names: Sequence[str] | None, where: str) -> tuple[tuple[str, ...], np.ndarray]:
    """`name_classes` for integers."""
    if len(values) and int(values.min()) < 0:
        raise UserError(
            f"{where}: the label {int(values.min())}: labels count from 0 (if this split has none, choose others "
            "with data.train=NAME and data.val=NAME)"
        )
    count = int(values.max()) + 1 if len(values) else 0
    if names is None and count > _MOST_CLASSES:
        raise UserError(f"{where}: the label {count - 1:,}: such numbers are ids; give the classes as names")
    if names is not None and count > len(names):
        raise UserError(f"{where}: the label {count - 1} is beyond the {len(names):,} class names")
    return tuple(names) if names is not None else tuple(map(str, range(count))), values.astype(np.int32)


def _named(values: np.ndarray, names: Sequence[str] | None, where: str) -> tuple[tuple[str, ...], np.ndarray]:
    """`name_classes` for strings."""
    found, positions = np.unique(values, return_inverse=True)
    if names is None:
        return tuple(found.tolist()), positions.astype(np.int32)
    place = {name: label for label, name in enumerate(names)}
    unknown = [name for name in found.tolist() if name not in place]
    if unknown:
        raise UserError(f"{where}: the label {first_few(unknown)} is not among the {len(names):,} class names")
    return tuple(names), np.array([place[name] for name in found.tolist()], dtype=np.int32)[positions]


def _whole_numbers(values: np.ndarray) -> np.ndarray:
    """Convert strings that are all whole numbers ("7", not "007") to integers; leave others as they are."""
    if not len(values):
        return values
    found, positions = np.unique(values, return_inverse=True)
    if not all(re.fullmatch(r"0|-?[1-9][0-9]{0,8}", text) for text in found.tolist()):
        return values
    return found.astype(np.int64)[positions]


def read_class_list(root: str) -> tuple[str, ...] | None:
    """The names in `classes.txt` beside the data, if there is one.

    Raises:
        UserError: a duplicate name, or a file that is not UTF-8.
    """
    if is_remote(root):
        return None
    folder = Path(root) if Path(root).is_dir() else Path(root).parent
    file = folder / CLASS_LIST
    if not file.is_file():
        return None
    names = read_lines(file)
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise UserError(f"{file}: {first_few(twice)}: more than once")
    return tuple(names)


def missing_column(what: str, column: str, columns: Sequence[str], key: str) -> UserError:
    """The error for a table without a column."""
    return UserError(
        f"{what} has no column {column!r}; it has {first_few(sorted(columns), 12)}: choose one with {key}=NAME"
    )


ENCODING = "utf-8-sig"
"""UTF-8, with or without the byte order mark that Windows adds."""


def read_lines(file: Path) -> list[str]:
    """The lines that are not blank, stripped.

    Raises:
        OSError: there is no such file, or it may not be read.
        UserError: the file is not UTF-8.
    """
    try:
        text = file.read_text(encoding=ENCODING)
    except UnicodeDecodeError as error:
        raise not_utf8(file) from error
    return [line.strip() for line in text.splitlines() if line.strip()]


def not_utf8(file: Path) -> UserError:
    """The error for a file that is not UTF-8, with the line number."""
    content = file.read_bytes()
    line = 1
    try:
        content.decode(ENCODING)
    except UnicodeDecodeError as error:
        line += content.count(b"\n", 0, error.start)
    return UserError(f"{file}: line {line} is not UTF-8; save the file as UTF-8")
