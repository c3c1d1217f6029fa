"""Finds the files of each split, for datasets that are tables or archives."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from pycls_fast.data.sources.files import is_folder
from pycls_fast.data.sources.remote import is_remote, list_files
from pycls_fast.errors import UserError, first_few

SPLIT_OF = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "test": "test",
}
"""The splits by the words that stand for them."""
# Older `datasets` put a fingerprint of each shard into its name.
_OF_HOW_MANY = re.compile(r"(.*?)(\d{5})-of-(\d{5})(-[0-9a-f]{16})?(\D.*)")
# As in datasets converted by the hub: CONFIGURATION/SPLIT/0000.parquet.
_OF_THE_HUB = re.compile(r"\d{4}\.parquet")
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")


def find_files(
    root: str,
    extensions: Sequence[str],
    *,
    train: str | None = None,
    val: str | None = None,
    beside_images: bool = False,
) -> dict[str, tuple[str, ...]]:
    """The files of each split: "train" and others of "val" and "test", or "all" if no name tells them apart.

    A file's split is given by a word in its name (`imagenet-train-000000.tar`, `train-00000-of-00294.parquet`) or in
    the folders between it and `root` (`validation/0000.parquet`).

    Args:
        root: a file, a folder or an address of one.
        extensions: how the names end, e.g. (".tar",).
        train, val: the files of a split by name instead: a path below `root`, an absolute one or an address, with `*`
            and `{000..146}`.
        beside_images: the folders in `root` may hold millions of images: they are searched only if the files directly
            in it can't be all (there are none, or only training's), and links to folders are not followed.

    Raises:
        UserError: no files, a shard that is missing, names that do not tell the split, several versions of the same
        split.
    """
    if train is not None:
        named = {"train": _expand(root, train, "data.train")}
        if val is not None:
            named["val"] = _expand(root, val, "data.val")
        return named if val is not None else {"all": named["train"]}
    if val is not None:
        raise UserError("data.val: given without data.train; give both")
    found = _list_files(root, extensions, beside_images)
    if not found:
        raise UserError(f"there are no {' or '.join(extensions)} files in {root} (see data/README.md)")
    _check_complete(found)
    splits: dict[str, list[str]] = {}
    for file in found:
        splits.setdefault(_split_of(root, file), []).append(file)
    if not is_remote(root):
        splits = {split: _each_once(files) for split, files in splits.items()}
    for files in splits.values():
        _check_one_configuration(root, files)
    if set(splits) == {""}:
        return {"all": tuple(splits[""])}
    if "" in splits:
        raise UserError(
            f"{root}: {first_few([_below(root, f) for f in splits['']], 3)}: neither the name nor a folder says train "
            "or val, but those of other files do; rename them or say which are which with data.train and data.val"
        )
    if "train" not in splits:
        raise UserError(f"{root}: found files of {first_few(sorted(splits))} but none of train")
    return {name: tuple(files) for name, files in splits.items()}


def _list_files(root: str, extensions: Sequence[str], beside_images: bool) -> list[str]:
    if is_remote(root):
        return _list_remote(root, extensions)
    path = Path(root)
    if path.is_file():
        return [str(path)]
    if not path.is_dir():
        raise UserError(f"there is no dataset {path.absolute()}")
    top, endings = str(path), tuple(extensions)
    if beside_images:
        with os.scandir(top) as entries:
            here = sorted(entry.path for entry in entries if _is_wanted(entry, endings))
        if {_split_of(top, file) for file in here} - {"train"}:
            return here
    return sorted(_walk(top, top, endings, frozenset(), follow_links=not beside_images))


def _is_wanted(entry: os.DirEntry[str], endings: tuple[str, ...]) -> bool:
    return entry.name[0] != "." and entry.name.lower().endswith(endings) and Path(entry.path).is_file()


def _walk(
    root: str, folder: str, endings: tuple[str, ...], above: frozenset[tuple[int, int]], *, follow_links: bool
) -> Iterator[str]:
    """Files at any depth, hidden ones left out. Links to a folder above them are never followed."""
    status = Path(folder).stat()
    here = (status.st_dev, status.st_ino)
    if here in above:
        return
    try:
        entries = os.scandir(folder)
    except PermissionError:
        # A disk's `lost+found`, or someone's backup, beside the splits.
        if folder == root or _split_of(root, folder):
            raise
        return
    with entries:
        for entry in entries:
            if entry.name[0] == ".":
                continue
            if is_folder(entry):
                if follow_links or not entry.is_symlink():
                    yield from _walk(root, entry.path, endings, above | {here}, follow_links=follow_links)
            elif _is_wanted(entry, endings):
                yield entry.path


def _each_once(files: Sequence[str]) -> list[str]:
    """Drop files that are listed again through a link to their folder (`latest/` beside `2024-05/`)."""
    folders = {folder: folder.resolve() for folder in {Path(file).parent for file in files}}
    first: dict[Path, str] = {}
    for file in files:
        first.setdefault(folders[Path(file).parent] / Path(file).name, file)
    return list(first.values())


def _list_remote(root: str, extensions: Sequence[str]) -> list[str]:
    if root.lower().endswith(tuple(extensions)):
        return list(expand_braces(root))
    return sorted(name for name in list_files(root) if name.lower().endswith(tuple(extensions)))


def _expand(root: str, pattern: str, key: str) -> tuple[str, ...]:
    files: list[str] = []
    for name in expand_braces(pattern):
        if is_remote(name) or (is_remote(root) and not Path(name).is_absolute()):
            place = name if is_remote(name) else f"{root.rstrip('/')}/{name}"
            matching = _match_remote(place)
        else:
            place = str(Path(root if Path(root).is_dir() else ".") / name)
            matching = _match_local(root, name)
        if not matching:
            raise UserError(f"{key}: there is no file {place}")
        files += matching
    return tuple(files)


def _match_remote(place: str) -> list[str]:
    return list_files(place) if "*" in place else [place]


def _match_local(root: str, name: str) -> list[str]:
    """The files that a name means, which may have `*`; brackets and braces of `root` are only characters."""
    anchor = Path(name).anchor
    folder = Path(anchor or (root if Path(root).is_dir() else "."))
    below = name.removeprefix(anchor)
    found = sorted(folder.glob(below)) if "*" in below else [folder / below]
    return [str(file) for file in found if file.is_file()]


def expand_braces(text: str) -> tuple[str, ...]:
    """`a-{08..11}.tar` -> a-08.tar, a-09.tar, a-10.tar, a-11.tar."""
    found = _BRACES.search(text)
    if found is None:
        return (text,)
    first, last = found.groups()
    numbers = (str(n).zfill(len(first)) for n in range(int(first), int(last) + 1))
    return tuple(name for n in numbers for name in expand_braces(text[: found.start()] + n + text[found.end() :]))


def _split_of(root: str, file: str) -> str:
    """The split given by a file's name, else by the folders between it and `root`, else ""."""
    parts = PurePosixPath(_below(root, file)).parts
    # The file's own name takes precedence; `test/train-000.tar` is training data.
    for part in reversed(parts):
        words = re.split(r"[^a-z]+", part.lower())
        said = {SPLIT_OF[word] for word in words if word in SPLIT_OF}
        if len(said) > 1:
            raise UserError(f"{file}: the name says {' and '.join(sorted(said))}; use data.train and data.val")
        if said:
            return said.pop()
    return ""


def _below(root: str, file: str) -> str:
    base = urlsplit(root).path if is_remote(root) else root
    full = urlsplit(file).path if is_remote(file) else file
    path = PurePosixPath(full)
    return str(path.relative_to(base)) if path.is_relative_to(base) and full != base else path.name


def _check_complete(files: Sequence[str]) -> None:
    """Check that all shards numbered like "00003-of-00010" are there."""
    groups: dict[tuple[str, int, str], set[int]] = {}
    for file in files:
        match = _OF_HOW_MANY.fullmatch(file)
        if match:
            start, number, total, fingerprint, end = match.groups()
            key = (start, int(total), f"-*{end}" if fingerprint else end)
            groups.setdefault(key, set()).add(int(number))
    for (start, total, end), numbers in groups.items():
        missing = [f"{start}{n:05d}-of-{total:05d}{end}" for n in range(total) if n not in numbers]
        if missing:
            raise UserError(f"{first_few(missing, 3)}: missing, of {total:,} files; download the rest")


def _check_one_configuration(root: str, files: Sequence[str]) -> None:
    """Refuse several copies of a split: the hub's repositories may have a folder for each configuration."""
    folders: dict[tuple[str, str], set[PurePosixPath]] = {}
    for file in files:
        path = PurePosixPath(_below(root, file))
        match = _OF_HOW_MANY.fullmatch(path.name)
        if match or _OF_THE_HUB.fullmatch(path.name):
            key = (match[1], match[5]) if match else ("", "")
            folders.setdefault(key, set()).add(path.parent)
    for parents in folders.values():
        if len(parents) > 1:
            # The configuration of `full_size/train/0000.parquet` is full_size/.
            found = sorted({str(p.parent if p.name in SPLIT_OF else p) for p in parents})
            names = first_few([f"{name}/" for name in found])
            raise UserError(
                f"{root}: files of the same names in {names}, as a dataset's configurations have; choose one with "
                f"data.root={root}/{found[-1]}, say, or with data.train and data.val"
            )
