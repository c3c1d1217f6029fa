"""Indexes of large datasets on disk: built once, then mapped by all processes.

An index is used as long as `is_fresh` accepts the stamp it was saved with. It lies in `.pycls_fast_index/` beside the
dataset's folder if that can be written, else in `~/.cache/pycls_fast/` (`XDG_CACHE_HOME`), or where `data.index_cache`
says. It is never inside the dataset's folder: other programs take every folder there for a class.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pycls_fast.data.source import Opening, Source
from pycls_fast.data.sources.arrays import map_array
from pycls_fast.files import cache_folder, user_path
from pycls_fast.reading import parse_json, read_bytes

_FORMAT = 6
_ABOUT = "about.json"
_FOLDER = ".pycls_fast_index"
_DAY = 24 * 3600

Stamp = Mapping[str, Any]
"""What a dataset looked like when it was indexed; JSON."""


@dataclass(frozen=True)
class Index:
    """The index of a dataset: arrays, and `stamp` and `more`, which are JSON."""

    arrays: Mapping[str, np.ndarray]
    more: Mapping[str, Any]
    stamp: Stamp


@dataclass(frozen=True)
class CachePolicy:
    """The place where indexes are kept, and the smallest that are.

    Args:
        place: "auto", "off", or a folder.
        smallest: indexes of fewer images are rebuilt each time.
    """

    place: str = "auto"
    smallest: int = 50_000

    @classmethod
    def of(cls, data: Source, how: Opening) -> CachePolicy:
        """What `data.index_cache` says."""
        return cls(data.index_cache, 0) if how.index_all else cls(data.index_cache)


def load_or_build(
    root: str | Path,
    kind: str,
    policy: CachePolicy,
    *,
    build: Callable[[], Index],
    count: Callable[[Index], int],
    is_fresh: Callable[[Stamp], bool],
    columns: Sequence[str | None] = (),
) -> Index:
    """The index of `root`, from disk if there is a fresh one.

    One process per machine builds it; the others wait. Of several machines the first one's index is kept.

    Args:
        root: what is indexed: a folder, or an address.
        kind: the kind of index; several kinds can lie side by side.
        is_fresh: whether the dataset still matches this stamp.
        columns: the columns that are indexed; each choice has an index of its own.
    """
    if columns:
        kind = f"{kind}-{_digest(json.dumps(columns))}"
    places = [place / kind for place in _places(root, policy.place)]
    found = _load_any(places, is_fresh)
    if found is not None:
        return found
    with _lock(f"{root}|{kind}"):
        found = _load_any(places, is_fresh)
        if found is not None:
            return found
        index = build()
        if not places or count(index) < policy.smallest:
            return index
        # Another machine may have saved its index meanwhile, and mapped it.
        if _load_any(places, is_fresh) is None:
            _save_first(index, places)
        # Mapped from disk it is one copy for all processes.
        return _load_any(places, is_fresh) or index


def _places(root: str | Path, setting: str) -> list[Path]:
    """Folders for indexes of this dataset, the preferred one first."""
    if setting == "off":
        return []
    name = _digest(str(root))
    if setting != "auto":
        return [user_path(setting) / name]
    general = cache_folder() / name
    if not isinstance(root, Path) or not root.is_dir():
        return [general]
    whole = root.resolve()
    return [whole.parent / _FOLDER / whole.name, general]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _load_any(places: list[Path], is_fresh: Callable[[Stamp], bool]) -> Index | None:
    return next((index for place in places if (index := _load(place)) is not None and is_fresh(index.stamp)), None)


def _load(place: Path) -> Index | None:
    """The index; None if it is missing, incomplete or in another format."""
    try:
        about = parse_json(read_bytes(place / _ABOUT).decode(errors="surrogateescape"))
        if about["format"] != _FORMAT:
            return None
        arrays = {name: map_array(place / f"{name}.npy") for name in about["arrays"]}
        return Index(arrays, about["more"], about["stamp"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _say(f"the index in {place} cannot be read and is rebuilt ({error})")
        return None


def _save_first(index: Index, places: list[Path]) -> None:
    reasons = []
    for place in places:
        try:
            _save(index, place)
        except OSError as error:
            reasons.append(f"{place}: {error.strerror or error}")
        else:
            return
    _say(f"the index could not be saved, so the next start rebuilds it ({'; '.join(reasons)}); see data.index_cache")


def _save(index: Index, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    # Drafts of killed processes, and replaced indexes. Those of live processes, which may run on other machines, are
    # younger: writing an index takes minutes.
    for folder in place.parent.glob(f"{place.name}-*-old"):
        with suppress(FileNotFoundError):
            if folder.stat().st_mtime < time.time() - _DAY:
                shutil.rmtree(folder, ignore_errors=True)
    draft, old = (place.with_name(f"{place.name}-{secrets.token_hex(4)}-old") for _ in range(2))
    draft.mkdir()
    try:
        for name, array in index.arrays.items():
            np.save(draft / f"{name}.npy", array, allow_pickle=False)
        about = {"format": _FORMAT, "arrays": sorted(index.arrays), "more": index.more, "stamp": index.stamp}
        text = json.dumps(about, ensure_ascii=False)
        (draft / _ABOUT).write_text(text, encoding="utf-8", errors="surrogateescape")
        if place.exists():
            # A folder cannot be replaced in one move. The old one stays for a day: a process on another machine that
            # has mapped its files would crash without them.
            place.rename(old)
            # Renaming a folder does not change its time.
            os.utime(old)
        draft.rename(place)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def _lock(what: str) -> Iterator[None]:
    """Admit one process of this user at a time; released whenever the process ends.

    If the user's cache cannot be written there is none: several processes may then build the same index.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            folder = cache_folder() / "locks"
            folder.mkdir(parents=True, exist_ok=True)
            # One of 256 files, so that they do not pile up. Two datasets that share one only wait for each other.
            file = stack.enter_context((folder / _digest(what)[:2]).open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _say(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)
