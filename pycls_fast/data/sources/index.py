"""Lists of images in memory and on disk: many names in one array, indexes that are built once, a bar meanwhile.

An index is one `.npz` file, used as long as `is_fresh` accepts the stamp it was saved with. It lies in
`.pycls_fast_index/` beside the dataset's folder if that can be written, else in `~/.cache/pycls_fast/`
(`XDG_CACHE_HOME`), or where `data.index_cache` says. It is never inside the dataset's folder: other programs take every
folder there for a class.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pycls_fast.data.source import Opening, Source
from pycls_fast.files import atomic_write, cache_folder, flush, user_path
from pycls_fast.reading import parse_json, read_npz

_FORMAT = 7
_FOLDER = ".pycls_fast_index"

# FNV-1a, 64 bits (Fowler, Noll and Vo).
_FNV_START, _FNV_PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)
# Strings that are hashed at a time; the temporary arrays stay small.
_HASHED_TOGETHER = 1 << 16

Stamp = Mapping[str, Any]
"""What a dataset looked like when it was indexed; JSON."""


class Texts:
    """Many short byte strings, end to end in one array.

    1.28 million file names take about 60 MB, once: an array stays shared after a fork, whereas a list of strings would
    be copied into every worker.
    """

    def __init__(self, data: np.ndarray, ends: np.ndarray) -> None:
        """
        Args:
            data: uint8, the strings.
            ends: int64, where each of them ends in `data`.
        """
        self.data = data
        self.ends = ends

    @classmethod
    def of(cls, strings: Iterable[bytes]) -> Texts:
        held = list(strings)
        return cls(np.frombuffer(b"".join(held), np.uint8), np.cumsum([len(s) for s in held], dtype=np.int64))

    @classmethod
    def join(cls, parts: Iterable[Texts]) -> Texts:
        held = list(parts)
        starts = np.cumsum([0, *(len(part.data) for part in held)]).tolist()
        ends = [part.ends + start for part, start in zip(held, starts[:-1], strict=True)]
        return cls(np.concatenate([part.data for part in held]), np.concatenate(ends))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        start = self.ends[index - 1] if index > 0 else 0
        return os.fsdecode(self.data[start : self.ends[index]].tobytes())

    def hashes(self) -> np.ndarray:
        """Each string's FNV-1a hash, uint64."""
        found = np.full(len(self), _FNV_START, np.uint64)
        start = 0
        for first in range(0, len(self), _HASHED_TOGETHER):
            ends = self.ends[first : first + _HASHED_TOGETHER]
            _hash_into(found[first : first + len(ends)], self.data, np.append(start, ends[:-1]), ends)
            start = ends[-1]
        return found


def _hash_into(hashes_N: np.ndarray, data: np.ndarray, starts_N: np.ndarray, ends_N: np.ndarray) -> None:
    """Continue the hashes with the strings, one byte of all of them at a time."""
    longest_first = np.argsort(starts_N - ends_N, kind="stable")
    values_N, places_N = hashes_N[longest_first], starts_N[longest_first]
    lengths_N = (ends_N - starts_N)[longest_first]
    # How many strings have a byte at each place.
    counts = np.searchsorted(-lengths_N, -np.arange(lengths_N[0]), side="left")
    for place, count in enumerate(counts.tolist()):
        values_N[:count] = (values_N[:count] ^ data[places_N[:count] + place]) * _FNV_PRIME
    hashes_N[longest_first] = values_N


def write_arrays(file: Path, arrays: Mapping[str, np.ndarray], about: Any) -> None:
    """Write arrays and a description, which is JSON, as one `.npz`; it appears whole or not at all."""
    text = json.dumps(about, ensure_ascii=False).encode("utf-8", "surrogateescape")
    entries: dict[str, Any] = {"about": np.frombuffer(text, np.uint8), **arrays}
    entries["checksum"] = _checksum(entries)
    with atomic_write(file) as draft, draft.open("wb") as written:
        np.savez(written, **entries)
        flush(written)


def _checksum(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    found = 0
    for name, array in sorted(arrays.items()):
        found = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), found)
        found = zlib.crc32(np.ascontiguousarray(array).data, found)
    return np.array(found, np.uint32)


def read_arrays(file: Path) -> tuple[dict[str, np.ndarray], Any]:
    """The arrays and the description in a file of `write_arrays`.

    Raises:
        OSError, ValueError: it cannot be read, or is damaged or something else.
    """
    arrays = read_npz(file)
    # Arrays that do not fit each other would be found out image by image.
    if "about" not in arrays or not np.array_equal(arrays.pop("checksum", None), _checksum(arrays)):
        raise ValueError(f"{file} is damaged")
    return arrays, parse_json(arrays.pop("about").tobytes().decode("utf-8", "surrogateescape"))


@dataclass(frozen=True)
class Index:
    """The index of a dataset: arrays, and `stamp` and `more`, which are JSON."""

    arrays: Mapping[str, np.ndarray]
    """`labels` among them."""
    more: Mapping[str, Any]
    stamp: Stamp


class CachePolicy(NamedTuple):
    """Where indexes are kept ("auto", "off", or a folder); those of fewer images than `smallest` are rebuilt."""

    place: str = "auto"
    smallest: int = 50_000

    @classmethod
    def of(cls, data: Source, how: Opening, smallest: int = 50_000) -> CachePolicy:
        return cls(data.index_cache, 0 if how.index_all else smallest)


def load_or_build(
    root: str | Path, kind: str, policy: CachePolicy, *, build: Callable[[], Index], is_fresh: Callable[[Stamp], bool]
) -> Index:
    """The index of `root`, a folder or an address, from disk if there is one of this kind whose stamp is fresh.

    One process per machine builds it; the others wait.
    """
    files = [place / f"{kind}.npz" for place in _places(root, policy.place)]
    found = _load_any(files, is_fresh)
    if found is not None:
        return found
    with _lock(f"{root}|{kind}"):
        found = _load_any(files, is_fresh)
        if found is None:
            found = build()
            if files and len(found.arrays["labels"]) >= policy.smallest:
                _save_where_possible(found, files)
    return found


def _places(root: str | Path, setting: str) -> list[Path]:
    """Folders for indexes of this dataset, the preferred one first."""
    if setting == "off":
        return []
    name = digest(str(root))
    if setting != "auto":
        return [user_path(setting) / name]
    general = cache_folder() / name
    if not isinstance(root, Path) or not root.is_dir():
        return [general]
    whole = root.resolve()
    return [whole.parent / _FOLDER / whole.name, general]


def digest(text: str) -> str:
    """A hash of a text with names of files, as 16 hexadecimal digits."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _load_any(files: list[Path], is_fresh: Callable[[Stamp], bool]) -> Index | None:
    for file in files:
        try:
            arrays, about = read_arrays(file)
            if about["format"] == _FORMAT and is_fresh(about["stamp"]):
                return Index(arrays, about["more"], about["stamp"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"note: the index {file} cannot be read and is rebuilt ({error})", file=sys.stderr)
    return None


def _save_where_possible(index: Index, files: list[Path]) -> None:
    """Save an index as the first of these files that can be written."""
    reasons = []
    for file in files:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_arrays(file, index.arrays, {"format": _FORMAT, "more": index.more, "stamp": index.stamp})
            return
        except OSError as error:
            reasons.append(f"{file}: {error.strerror or error}")
    print(f"note: data.index_cache: the index is not saved ({'; '.join(reasons)})", file=sys.stderr)


@contextmanager
def _lock(what: str) -> Iterator[None]:
    """Admit one process of this user at a time; if the cache cannot be written, several may build the same index."""
    with ExitStack() as stack:
        with suppress(OSError):
            folder = cache_folder() / "locks"
            folder.mkdir(parents=True, exist_ok=True)
            # One of 256 files, so that they do not pile up. Two datasets that share one only wait for each other.
            file = stack.enter_context((folder / digest(what)[:2]).open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


_PATIENCE = 1.0
_PLAIN_SECONDS = 10.0


@contextmanager
def progress(what: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
    """Show progress ("index /data/imagenet/train", 1000, "folders") within the block; call the result with the number
    of items just finished.

    Goes to standard error: a bar that appears after a second on a terminal, elsewhere a line every ten seconds.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
    # A path may have square brackets.
    title = TextColumn("{task.description}", markup=False)
    columns = (title, BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    bar = Progress(*columns, console=console, refresh_per_second=4, transient=True)
    task = bar.add_task(what, total=total)
    started = spoken = time.monotonic()

    def advance(count: int) -> None:
        nonlocal spoken
        bar.advance(task, count)
        now = time.monotonic()
        if console.is_terminal and now - started >= _PATIENCE:
            bar.start()
        elif not console.is_terminal and now - spoken >= _PLAIN_SECONDS:
            spoken = now
            done = bar.tasks[0].completed
            of = f" of {total:,}" if total else ""
            console.print(f"{what}: {done:,.0f}{of} {unit}, {done / (now - started):,.3g}/s", markup=False)

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()
