"""Lists of a dataset's images on disk: indexes that are built once.

An index is one `.npz` file, used as long as `is_fresh` accepts the stamp it was saved with. It lies in
`.pycls_fast_index/` beside the dataset's folder if that can be written, else in `~/.cache/pycls_fast/`
(`XDG_CACHE_HOME`), or where `data.index_cache` says. It is never inside the dataset's folder: other programs take every
folder there for a class.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pycls_fast.data.source import Opening, Source
from pycls_fast.data.sources.base import Labels
from pycls_fast.data.sources.texts import Texts, digest
from pycls_fast.files import atomic_write, cache_folder, flush, locked, user_path
from pycls_fast.reading import parse_json, read_npz

_FORMAT = 9
_FOLDER = ".pycls_fast_index"

Stamp = Mapping[str, Any]
"""What a dataset looked like when it was indexed; JSON."""


def write_arrays(file: Path, arrays: Mapping[str, np.ndarray], about: Any) -> None:
    """Write arrays and a description, which is JSON, as one `.npz`; it appears whole or not at all."""
    entries: dict[str, Any] = {"about": np.frombuffer(json.dumps(about).encode(), np.uint8), **arrays}
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
    # Arrays that do not fit each other would be found out image by image; the archive's checksums are of each alone.
    if "about" not in arrays or not np.array_equal(arrays.pop("checksum", None), _checksum(arrays)):
        raise ValueError(f"{file} is damaged")
    return arrays, parse_json(arrays.pop("about").tobytes())


@dataclass(frozen=True)
class Index:
    """What is known of a dataset's images without reading them."""

    names: Texts
    labels: Labels
    stamp: Stamp
    more: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Arrays of the layout."""


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
            if files and len(found.names) >= policy.smallest:
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


def _load_any(files: list[Path], is_fresh: Callable[[Stamp], bool]) -> Index | None:
    for file in files:
        try:
            arrays, about = read_arrays(file)
            if about["format"] == _FORMAT and is_fresh(about["stamp"]):
                labels = Labels(tuple(about["classes"]), arrays.pop("labels"), arrays.pop("sets", None))
                return Index(Texts(arrays.pop("names"), arrays.pop("name_ends")), labels, about["stamp"], arrays)
        except (OSError, ValueError, KeyError, TypeError):
            # Not there, or damaged: it is made anew.
            pass
    return None


def _save_where_possible(index: Index, files: list[Path]) -> None:
    """Save an index as the first of these files that can be written."""
    classes, labels, sets = index.labels
    arrays = {"names": index.names.data, "name_ends": index.names.ends, "labels": labels, **index.more}
    arrays |= {} if sets is None else {"sets": sets}
    reasons = []
    for file in files:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_arrays(file, arrays, {"format": _FORMAT, "classes": classes, "stamp": index.stamp})
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
            stack.enter_context(locked(folder / digest(what)[:2]))
        yield
