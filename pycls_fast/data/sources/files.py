"""Files of a dataset: which belong to which split, how they are read, and what labels are written as."""

from __future__ import annotations

import os
import re
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

import numpy as np

from pycls_fast.data.source import ColumnSource
from pycls_fast.data.sources.base import Images, Labels
from pycls_fast.data.sources.remote import is_remote, list_files
from pycls_fast.data.sources.texts import Texts
from pycls_fast.errors import UserError, first_few, is_first_of_node
from pycls_fast.reading import IMAGE_BYTES, open_file, parse_json, read_bytes

EXTENSIONS = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
"""Extensions of image files, in any case."""
UNREAD_EXTENSIONS = (".heic", ".heif", ".avif", ".jp2", ".jxl", ".tga", ".dng", ".cr2", ".nef")
"""Extensions of images in formats that are not read."""
SPLIT_OF = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "eval": "val",
    "evaluation": "val",
    "test": "test",
    "testing": "test",
}
"""The splits by the words that stand for them, the more usual word first."""
_EMPTY = ("", "nan", "NaN")
NO_LABEL = (*_EMPTY, None, "-1", -1)
"""How a missing label is written; nan by pandas."""
ENCODING = "utf-8-sig"
"""UTF-8, with or without the byte order mark that Windows adds."""
# Created by file systems, network storage (thumbnails in `@eaDir`) and archive programs.
_SYSTEM_FOLDERS = frozenset(
    {"lost+found", "@eaDir", "#recycle", "__MACOSX", "$RECYCLE.BIN", "System Volume Information"}
)
_NUMBERED_SHARD = re.compile(r"(.*?)(\d{5})-of-(\d{5})(\D.*)")
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MOST_CLASSES = 1_000_000
# The limit of each source in each process. By default a process may have 1,024 files open.
_MOST_OPEN = 256


class FileImages(Images):
    """One file per image."""

    numbered = False
    """The names only count the images."""
    ending = ""
    """What the names lack of those of the files, such as `.jpg`."""

    def __init__(self, root: Path, names: Texts, labels: Labels) -> None:
        """`names`: paths of the files, absolute or relative to `root`."""
        self.root, self.where = root, str(root)
        self.classes, self.labels, self.label_sets = labels
        self._texts: Texts = names

    def read(self, index: int) -> bytes:
        return read_bytes(self.name(index), IMAGE_BYTES)

    def name(self, index: int) -> str:
        return str(self.root / self._texts[index]) + self.ending

    def name_hashes(self) -> np.ndarray | None:
        return None if self.numbered else super().name_hashes()


class OpenFiles:
    """Reads pieces of files, and keeps the most recently read files open.

    Each read names its position in the file, so processes may share files that were open before a fork. A pickled copy
    has no open files. A file that is replaced while it is open is still read as it was.
    """

    def __init__(self) -> None:
        self._file = lru_cache(_MOST_OPEN)(_File)

    def read(self, path: str, start: int, size: int) -> bytes:
        """`size` bytes of a file from `start` on; an OSError if it ends before that."""
        file = self._file(path)
        try:
            data = os.pread(file.descriptor, size, start)
            if len(data) < size:
                raise OSError(f"{path} ends before the image does; was it replaced?")
        except OSError:
            # After a fault a network disk may accept only a new descriptor.
            self._file.cache_clear()
            raise
        return data

    def __reduce__(self) -> tuple[type[OpenFiles], tuple[()]]:
        return OpenFiles, ()


class _File:
    """A file, open as long as this object lives: one thread may still read it when another evicts it from the cache."""

    def __init__(self, path: str) -> None:
        with open_file(path, None) as opened:
            self.descriptor = os.dup(opened.fileno())
        weakref.finalize(self, os.close, self.descriptor)


def find_files(
    root: str, suffixes: tuple[str, ...], data: ColumnSource, *, deep: bool = True
) -> dict[str, tuple[str, ...]]:
    """The files of each split: "train" and others of "val" and "test", or "all" if no name tells them apart.

    A file's split is given by a word in its name (`imagenet-train-000000.tar`, `train-00000-of-00294.parquet`), else by
    the folders between it and `root` (`validation/0000.parquet`).

    Args:
        root: a file, a folder or an address of one.
        suffixes: how the names end, e.g. (".tar",).
        data: `train` and `val` are the files of a split by name instead: a path below `root`, an absolute one or an
            address, with `*` and `{000..146}`.
        deep: look in folders of `root`, too.

    Raises:
        OSError, UserError: no files, a shard that is missing, or names that do not tell the split.
    """
    if data.train is not None:
        train = _expand(root, data.train, "data.train")
        return {"all": train} if data.val is None else {"train": train, "val": _expand(root, data.val, "data.val")}
    found = sorted(files_below(root, suffixes, deep=deep))
    if not found:
        hint = "class folders need data.source=folder; see data/README.md"
        raise UserError(f"there are no {' or '.join(suffixes)} files in {root} ({hint})")
    _check_complete(found)
    splits: dict[str, tuple[str, ...]] = {}
    for file in found:
        split = _split_of(root, file)
        splits[split] = (*splits.get(split, ()), file)
    if set(splits) == {""}:
        return {"all": splits[""]}
    if "" in splits:
        raise UserError(f"{root}: no name says that {splits[''][0]} is train, val or test; use data.train=NAME")
    return splits


def files_below(root: str, suffixes: tuple[str, ...], *, deep: bool = True) -> Iterator[str]:
    """Files at any depth, without hidden ones; each folder once, whatever links lead to it."""
    if is_remote(root):
        found = _expand_braces(root) if root.lower().endswith(suffixes) else list_files(root)
        yield from (name for name in found if name.lower().endswith(suffixes))
    elif Path(root).is_file():
        yield root
    else:
        for folder, _, inner, files in walk(root):
            inner[:] = inner if deep else []
            yield from (f"{folder}/{name}" for name in files if name.lower().endswith(suffixes))


def note_unread(root: str | Path, unread: Counter[str]) -> None:
    """Say how many images of which extensions are left out because of their formats."""
    # Once per node: each rank opens the dataset.
    if unread and is_first_of_node():
        found = ", ".join(f"{count:,} {extension}" for extension, count in sorted(unread.items()))
        print(f"note: {root}: images of formats that are not read are left out: {found}", file=sys.stderr)


def walk(root: str) -> Iterator[tuple[str, os.stat_result, list[str], list[str]]]:
    """Walk folders from `root` down, each once and none above it, whatever links lead there.

    Yields path, status, and the names of folders and files in it, without hidden ones and those of the system. Folders
    that the caller removes from the list are not entered.

    Raises:
        OSError: one is missing or cannot be read.
    """

    def fail(error: OSError) -> None:
        raise error

    seen = {(above.stat().st_dev, above.stat().st_ino) for above in Path(root).resolve().parents}
    for folder, inner, files in os.walk(root, followlinks=True, onerror=fail):
        status = Path(folder).stat()
        here = (status.st_dev, status.st_ino)
        inner[:] = sorted(name for name in inner if name[0] != "." and name not in _SYSTEM_FOLDERS and here not in seen)
        if here not in seen:
            seen.add(here)
            yield folder, status, inner, [name for name in files if name[0] != "."]


def _expand(root: str, pattern: str, key: str) -> tuple[str, ...]:
    files: list[str] = []
    # One that counts down ({3..1}) stands for itself, a file that is not there.
    for name in _expand_braces(pattern) or (pattern,):
        if is_remote(name) or (is_remote(root) and not Path(name).is_absolute()):
            place = name if is_remote(name) else f"{root.rstrip('/')}/{name}"
            matching = list_files(place) if "*" in place else [place]
        else:
            # Brackets and braces of `root` are only characters.
            anchor = Path(name).anchor
            folder = Path(anchor or (root if Path(root).is_dir() else "."))
            below = name.removeprefix(anchor)
            place = str(folder / below)
            found = sorted(folder.glob(below)) if "*" in below else [folder / below]
            matching = [str(file) for file in found if file.is_file()]
        if not matching:
            raise UserError(f"{key}: there is no file {place}")
        files += matching
    return tuple(files)


def _expand_braces(text: str) -> tuple[str, ...]:
    """`a-{08..11}.tar` -> a-08.tar, a-09.tar, a-10.tar, a-11.tar."""
    found = _BRACES.search(text)
    if found is None:
        return (text,)
    first, last = found.groups()
    numbers = (str(n).zfill(len(first)) for n in range(int(first), int(last) + 1))
    return tuple(name for n in numbers for name in _expand_braces(text[: found.start()] + n + text[found.end() :]))


def _split_of(root: str, file: str) -> str:
    """The split given by a file's name, else by the folders between it and `root`, else ""."""
    base, full = (urlsplit(place).path if is_remote(place) else place for place in (root, file))
    path = PurePosixPath(full)
    below = path.relative_to(base).parts if path.is_relative_to(base) and full != base else (path.name,)
    # The file's own name takes precedence; `test/train-000.tar` is training data.
    for part in reversed(below):
        said = {SPLIT_OF[word] for word in re.split(r"[^a-z]+", part.lower()) if word in SPLIT_OF}
        if said:
            return said.pop() if len(said) == 1 else ""
    return ""


def _check_complete(files: Sequence[str]) -> None:
    """Check that all shards numbered like "00003-of-00010" are there: half a download trains, too."""
    numbered = [match.groups() for match in map(_NUMBERED_SHARD.fullmatch, files) if match]
    there = {(start, int(number), total) for start, number, total, _ in numbered}
    for start, total in {(start, total) for start, _, total in there}:
        missing = [f"{start}{n:05d}-of-{total}" for n in range(int(total)) if (start, n, total) not in there]
        if missing:
            raise UserError(f"{first_few(missing, 3)}: missing, of {int(total):,} files; download the rest")


def name_classes(
    labels: Sequence[object], *, names: Sequence[str] | None, where: str, separator: str | None = None
) -> Labels:
    """Class names and labels for labels that are stored as numbers or names.

    Args:
        labels: integers, also as floats (pandas' columns with gaps), or strings; strings that are all whole numbers
            count as integers. Those of `NO_LABEL` stand for an image without a label: then all must, as those of a test
            split, and get -1.
        names: class names, if known. Numbers are positions in it; strings must be among them.
        where: the file, for messages.
        separator: images have any number of labels, in lists or in strings with this between them.

    Raises:
        UserError: labels that are neither, not in `names`, or missing for only some images.
    """
    if separator is not None:
        return _name_label_sets(labels, names, where, separator)
    labels = [_plain(label) for label in labels]
    lacking = [row for row, label in enumerate(labels, 1) if label in NO_LABEL]
    if len(lacking) == len(labels):
        return Labels(tuple(names or ()), np.full(len(labels), -1, dtype=np.int32))
    if lacking:
        first = f"the first is number {lacking[0]:,}"
        raise UserError(f"{where}: {len(lacking):,} of {len(labels):,} images have no label ({first}); leave them out")
    wrong = [label for label in labels if not isinstance(label, str | int)]
    if wrong:
        use = "choose another data.label_column; for lists data.label_separator=;"
        raise UserError(f"{where}: the label {wrong[0]!r} is no whole number or name; {use}")
    found, positions = np.unique(np.asarray(labels), return_inverse=True)
    kinds = [str(kind) for kind in found.tolist()]
    if not all(re.fullmatch(r"(0|-?[1-9][0-9]{0,8})(\.0)?", kind) for kind in kinds):
        place = {name: label for label, name in enumerate(dict.fromkeys(names or kinds))}
        unknown = [kind for kind in kinds if kind not in place]
        if unknown:
            raise UserError(f"{where}: the label {first_few(unknown)} is not among the {len(place):,} class names")
        return Labels(tuple(place), np.array([place[kind] for kind in kinds], dtype=np.int32)[positions])
    numbers = np.array([int(float(kind)) for kind in kinds])
    low, high = int(numbers.min()), int(numbers.max())
    most = _MOST_CLASSES if names is None else len(names)
    if low < 0 or high >= most:
        raise UserError(f"{where}: the label {low if low < 0 else high:,}: labels count the classes, 0 to {most - 1:,}")
    classes = tuple(map(str, range(high + 1))) if names is None else tuple(names)
    return Labels(classes, numbers[positions].astype(np.int32))


def _plain(label: object) -> object:
    if isinstance(label, float) and label.is_integer():
        return int(label)
    return str(label).strip() if isinstance(label, str | bool) else label


def _name_label_sets(labels: Sequence[object], names: Sequence[str] | None, where: str, separator: str) -> Labels:
    parts = [_split_label(each, separator) for each in labels]
    classes, numbers, _ = name_classes([part for each in parts for part in each], names=names, where=where)
    if np.all(numbers < 0):
        return Labels(classes, np.full(len(labels), -1, dtype=np.int32))
    ends = np.cumsum([len(each) for each in parts])
    return labels_of([found.tolist() for found in np.split(numbers, ends[:-1])], classes)


def labels_of(own: Iterable[Iterable[int]], classes: tuple[str, ...]) -> Labels:
    """Labels of images with any number of classes each."""
    place: dict[tuple[int, ...], int] = {}
    numbers = [place.setdefault(tuple(sorted(set(each))), len(place)) for each in own]
    sets = np.zeros((len(place), len(classes)), dtype=bool)
    for each, row in place.items():
        sets[row, list(each)] = True
    return Labels(classes, np.array(numbers, dtype=np.int32), sets)


def _split_label(label: object, separator: str) -> list[object]:
    """The classes that a label names: a list, a list as JSON text, or text with separators."""
    if isinstance(label, str) and label.startswith("["):
        # If it is not JSON, it is a name that begins with a bracket.
        with suppress(ValueError):
            label = parse_json(label)
    parts = label if isinstance(label, list) else ("" if label is None else str(label)).split(separator)
    return [part for part in parts if str(part).strip() not in _EMPTY]


def read_class_list(root: str) -> list[str] | None:
    """The names in `classes.txt` beside the data, one per line, if there is one."""
    file = (Path(root) if Path(root).is_dir() else Path(root).parent) / "classes.txt"
    return None if is_remote(root) or not file.is_file() else read_lines(file)


def read_lines(file: Path) -> list[str]:
    """The lines of a text that are not blank, stripped."""
    text = read_bytes(file).decode(ENCODING, errors="replace")
    return [line.strip() for line in text.splitlines() if line.strip()]


def missing_column(what: str, column: str, columns: Sequence[str], key: str) -> UserError:
    return UserError(
        f"{what} has no column {column!r}; it has {first_few(sorted(columns), 12)}: choose one with {key}=NAME"
    )
