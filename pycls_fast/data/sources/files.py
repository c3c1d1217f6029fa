"""Image files with given labels; which files and folders belong to a dataset, and to which split."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

import numpy as np

from pycls_fast.data.sources.arrays import Mapped, Texts
from pycls_fast.data.sources.base import Images
from pycls_fast.data.sources.remote import is_remote, list_files
from pycls_fast.errors import UserError, first_few
from pycls_fast.reading import IMAGE_BYTES, read_bytes

EXTENSIONS = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
"""Extensions of image files, in any case."""
SPLIT_OF = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "test": "test",
    "testing": "test",
}
"""The splits by the words that stand for them, the more usual word first."""
# Created by file systems, network storage (thumbnails in `@eaDir`) and archive programs.
_SYSTEM_FOLDERS = frozenset(
    {"lost+found", "@eaDir", "#recycle", "__MACOSX", "$RECYCLE.BIN", "System Volume Information"}
)
_OF_HOW_MANY = re.compile(r"(.*?)(\d{5})-of-(\d{5})(\D.*)")
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether the entry is a folder that may hold data, or a link to one; broken and circular links are not."""
    # Not `suppress`: it takes longer than everything else per entry, and there may be millions.
    try:
        return entry.is_dir() and entry.name not in _SYSTEM_FOLDERS
    except OSError:
        return False


class FileImages(Images, Mapped):
    """One file per image."""

    def __init__(
        self, root: Path, classes: Sequence[str], names: Texts, labels: np.ndarray, *, numbered: bool = False
    ) -> None:
        """
        Args:
            root: the folder that the names are relative to.
            classes: class names; the label is the position.
            names: paths of the files, absolute or relative to `root`.
            labels: int32, one per image.
            numbered: the names only count the images.
        """
        self.root = root
        self.classes = tuple(classes)
        self.labels = labels
        self._names = names
        self._numbered = numbered

    def read(self, index: int) -> tuple[bytes, int]:
        return read_bytes(self.name(index), IMAGE_BYTES), int(self.labels[index])

    def name(self, index: int) -> str:
        return str(self.root / self._names[index])

    def name_hashes(self) -> np.ndarray | None:
        return None if self._numbered else self._names.hashes()

    def describe(self) -> str:
        return f"{super().describe()} in {self.root}"


def find_files(
    root: str, suffixes: Sequence[str], *, train: str | None = None, val: str | None = None, deep: bool = True
) -> dict[str, tuple[str, ...]]:
    """The files of each split: "train" and others of "val" and "test", or "all" if no name tells them apart.

    A file's split is given by a word in its name (`imagenet-train-000000.tar`, `train-00000-of-00294.parquet`) or in
    the folders between it and `root` (`validation/0000.parquet`).

    Args:
        root: a file, a folder or an address of one.
        suffixes: how the names end, e.g. (".tar",).
        train, val: the files of a split by name instead: a path below `root`, an absolute one or an address, with `*`
            and `{000..146}`.
        deep: look in folders of `root`, too.

    Raises:
        UserError: no files, a shard that is missing, names that do not tell the split, or the same names in several
        folders.
    """
    if train is not None:
        named = {"train" if val is not None else "all": _expand(root, train, "data.train")}
        return named if val is None else {**named, "val": _expand(root, val, "data.val")}
    found = _list_files(root, tuple(suffixes), deep)
    if not found:
        raise UserError(f"there are no {' or '.join(suffixes)} files in {root} (see data/README.md)")
    _check_complete(found)
    splits: dict[str, list[str]] = {}
    for file in found:
        splits.setdefault(_split_of(root, file), []).append(file)
    for files in splits.values():
        name, times = Counter(PurePosixPath(file).name for file in files).most_common(1)[0]
        if times > 1:
            raise UserError(f"{root}: {name} is in {times} folders; choose one of them as data.root, or use data.train")
    if set(splits) == {""}:
        return {"all": tuple(splits[""])}
    if "" in splits:
        example = first_few(splits[""], 1)
        raise UserError(f"{root}: no name or folder says that {example} is train, val or test; use data.train=NAME")
    return {name: tuple(files) for name, files in splits.items()}


def _list_files(root: str, suffixes: tuple[str, ...], deep: bool) -> list[str]:
    if is_remote(root):
        found = _expand_braces(root) if root.lower().endswith(suffixes) else list_files(root)
        return sorted(name for name in found if name.lower().endswith(suffixes))
    path = Path(root)
    if path.is_file():
        return [root]
    if not path.is_dir():
        raise UserError(f"there is no dataset {path.absolute()}")
    return sorted(_walk(root, suffixes, deep))


def _walk(root: str, suffixes: tuple[str, ...], deep: bool) -> Iterator[str]:
    """Files at any depth, without hidden ones; each folder once, whatever links lead to it."""
    seen = set()
    for folder, inner, files in os.walk(root, onerror=_raise, followlinks=True):
        status = Path(folder).stat()
        is_new = (status.st_dev, status.st_ino) not in seen
        seen.add((status.st_dev, status.st_ino))
        wanted = (name for name in inner if name[0] != "." and name not in _SYSTEM_FOLDERS)
        inner[:] = sorted(wanted) if deep and is_new else []
        if is_new:
            yield from (f"{folder}/{name}" for name in files if name[0] != "." and name.lower().endswith(suffixes))


def _raise(error: OSError) -> None:
    raise error


def _expand(root: str, pattern: str, key: str) -> tuple[str, ...]:
    files: list[str] = []
    for name in _expand_braces(pattern):
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
    numbered = [match.groups() for match in map(_OF_HOW_MANY.fullmatch, files) if match]
    there = {(start, int(number), total) for start, number, total, _ in numbered}
    for start, total in {(start, total) for start, _, total in there}:
        missing = [f"{start}{n:05d}-of-{total}" for n in range(int(total)) if (start, n, total) not in there]
        if missing:
            raise UserError(f"{first_few(missing, 3)}: missing, of {int(total):,} files; download the rest")
