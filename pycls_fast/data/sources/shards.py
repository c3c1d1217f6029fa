"""Local copies of remote shards, fetched ahead of their use.

Workers never download a shard: they read its copy, or single images over the network while there is none. A process
beside the workers of each rank iterates over the same sampler further ahead, and copies shards before their first use.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import re
import signal
import stat
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from pycls_fast.data.sources.arrays import Texts
from pycls_fast.data.sources.remote import attempt, file_system, read_range
from pycls_fast.errors import UserError
from pycls_fast.files import flush

_FOLDER = "pycls_fast_shards"
_COPY = re.compile(r"[0-9a-f]{16}-.+", re.DOTALL)
# A partial copy has its final size in its name, so that others can leave room for it.
_DRAFT = re.compile(r"\.[0-9a-f]{16}-.+\.(\d+)\.part", re.DOTALL)
# A copy that was read or touched within this time is not evicted.
_IN_USE_SECONDS = 5.0

# Downloads at the same time, of each rank.
_THREADS = 8
_PAUSE, _STOP_SECONDS = 0.1, 5.0
# Bounds the memory (some MB) and the work of looking ahead where few shards are in use.
_MOST_BATCHES, _BATCHES_AT_ONCE = 10_000, 500
# Together they have images of all lanes, however many microbatches a step has.
_BATCHES_OF_LANES = 64


class ShardCache:
    """A folder with copies of whole remote files, shared by all processes of a machine."""

    def __init__(self, folder: Path, limit: int | None, processes: int = 1) -> None:
        """
        Args:
            folder: may hold other files: copies lie in a subfolder.
            limit: total bytes of all copies, complete or not; None for no limit. Above it the least recently used
                copies are evicted.
            processes: how many copy shards on this machine, each within its share of the limit.
        """
        self.folder = folder / _FOLDER
        self.limit = limit
        self.processes = processes

    def check(self) -> None:
        """Make the folder.

        Raises:
            UserError: it cannot be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._folder_lock():
                pass
        except OSError as error:
            raise UserError(f"data.shard_cache: {self.folder} cannot be written ({error.strerror or error})") from error

    def place(self, address: str, version: str) -> Path:
        """The path of a file's copy, whether it exists or not.

        Args:
            version: `stamp_of` as JSON; each version has its own copy.
        """
        name = hashlib.sha256(f"{address}\0{version}".encode()).hexdigest()[:16]
        return self.folder / f"{name}-{address.rpartition('/')[2]}"

    def read_range(self, address: str, version: str, start: int, size: int) -> bytes:
        """Bytes of the local copy; of the remote file if there is no (whole) copy.

        Raises:
            FileNotFoundError, UserError: see `read_range`.
        """
        with suppress(OSError), self.place(address, version).open("rb", buffering=0) as file:
            # Another user's copy can be read, but not touched.
            with suppress(OSError):
                os.utime(file.fileno())
            data = os.pread(file.fileno(), size, start)
            # A power cut may have truncated the copy.
            if len(data) == size:
                return data
        return read_range(address, start, size)

    def touch(self, place: Path, size: int) -> bool:
        """Whether the copy is complete. If it is, it counts as used now."""
        with suppress(OSError):
            about = place.stat()
            if stat.S_ISREG(about.st_mode) and about.st_size == size:
                with suppress(OSError):
                    os.utime(place)
                return True
        return False

    def begin(self, place: Path, size: int) -> IO[bytes] | None:
        """A partial copy for which there is room; None if there is none, or another process is making this copy.

        It is locked until it is closed, so that those of killed processes are recognised.

        Raises:
            OSError: the folder cannot be written.
        """
        with self._folder_lock():
            if not self._make_room(size):
                return None
            draft = self._draft(place, size).open("ab")
            if not _lock(draft):
                draft.close()
                return None
            if self.touch(place, size):
                # Another process has just completed it.
                self.discard(place, size)
                draft.close()
                return None
            return draft

    def download(self, address: str, place: Path, size: int, draft: IO[bytes]) -> None:
        """Fill a partial copy, and give it its final name.

        Raises:
            FileNotFoundError: the remote file is gone.
            UserError: it cannot be reached.
            OSError: the copy cannot be written.
        """

        def fetch() -> None:
            files.get_file(path, draft.name)
            arrived = Path(draft.name).stat().st_size
            if arrived != size:
                raise OSError(f"{arrived:,} bytes arrived instead of {size:,}; was the file replaced?")

        with draft:
            try:
                files, path = file_system(address)
                attempt(f"fetching {address}", fetch)
                # A power cut must not leave a truncated copy under the final name.
                flush(draft)
                Path(draft.name).rename(place)
            finally:
                Path(draft.name).unlink(missing_ok=True)

    def discard(self, place: Path, size: int) -> None:
        """Remove what has arrived of a copy that this process makes."""
        self._draft(place, size).unlink(missing_ok=True)

    def _draft(self, place: Path, size: int) -> Path:
        return place.with_name(f".{place.name}.{size}.part")

    @contextmanager
    def _folder_lock(self) -> Iterator[None]:
        """Exclude this user's other processes while room is made."""
        # Another user's lock could not be opened.
        with (self.folder / f".room-{os.getuid()}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _make_room(self, size: int) -> bool:
        """Evict copies until another one fits. If that is not enough, none is evicted."""
        excess = size - (float("inf") if self.limit is None else self.limit)
        copies = []
        for file in self.folder.iterdir():
            # Other processes make and evict files too, and some may belong to another user.
            with suppress(OSError):
                if draft := _DRAFT.fullmatch(file.name):
                    # Also if it gets its final name just now.
                    excess += int(draft[1])
                    with file.open("r+b") as left:
                        if _lock(left):
                            file.unlink()
                            excess -= int(draft[1])
                elif _COPY.fullmatch(file.name) and stat.S_ISREG((about := file.lstat()).st_mode):
                    excess += about.st_size
                    copies.append((about.st_mtime, about.st_size, file))
        evicted = []
        for used, own, file in sorted(copies):
            if excess <= 0 or used > time.time() - _IN_USE_SECONDS:
                break
            evicted.append(file)
            excess -= own
        if excess > 0:
            return False
        for file in evicted:
            file.unlink(missing_ok=True)
        return True


def _lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass(frozen=True)
class CopiedShards:
    """The remote shards of a source that keeps copies of them.

    Args:
        addresses, versions: each shard's, as `ShardCache` takes them.
        ends: int64, the number of images up to the end of each shard.
        rows: the places, in all shards together, of the images of a part of them; None for all images.
    """

    cache: ShardCache
    addresses: Texts
    versions: Texts
    ends: np.ndarray
    rows: np.ndarray | None = None

    @property
    def sizes(self) -> list[int | None]:
        """Bytes of each shard, None where its file system did not tell."""
        return [json.loads(self.versions[number])[1] for number in range(len(self.versions))]

    def part(self, rows: np.ndarray) -> CopiedShards:
        """The same shards for the images at some positions only."""
        return replace(self, rows=rows if self.rows is None else self.rows[rows])

    def numbers(self, indices: np.ndarray) -> np.ndarray:
        """The number of each image's shard, int64."""
        rows = indices if self.rows is None else self.rows[indices]
        return np.searchsorted(self.ends, rows, side="right")


class Window:
    """The shards of a rank's next batches in the order of their first use, as far as there is room for them."""

    def __init__(self, batches: Iterator[Sequence[int]], sizes: Sequence[int | None], *, budget: float) -> None:
        """
        Args:
            batches: the numbers of the shards of each batch, without repetitions.
            sizes: bytes of each shard, None where unknown.
            budget: bytes of all shards in the window; the next batch is in it even if its shards have more.
        """
        self._sizes = sizes
        self._budget = budget
        self._held: deque[Sequence[int]] = deque()
        # How many batches use each shard; in the order of their first use.
        self._uses: dict[int, int] = {}
        self._consumed = 0
        first = list(islice(batches, _BATCHES_OF_LANES))
        # A lane of `block_order` reads one shard after the other: each has its next one in the window.
        self._most = 2 * len(set(chain.from_iterable(first))) + _THREADS
        self._batches = chain(first, batches)
        self._next = next(self._batches, None)

    def move(self, consumed: int) -> list[int]:
        """The shards of the window that begins after so many batches."""
        while self._consumed < consumed and (self._held or self._next is not None):
            if not self._held:
                self._append()
            for number in self._held.popleft():
                self._uses[number] -= 1
                if not self._uses[number]:
                    del self._uses[number]
            self._consumed += 1
        for _ in range(_BATCHES_AT_ONCE):
            if self._next is None or not self._fits(self._next):
                break
            self._append()
        return list(self._uses)

    def _fits(self, batch: Sequence[int]) -> bool:
        shards = self._uses.keys() | set(batch)
        size = sum(self._sizes[number] or 0 for number in shards)
        fits = len(self._held) < _MOST_BATCHES and len(shards) <= self._most and size <= self._budget
        return fits or not self._held

    def _append(self) -> None:
        assert self._next is not None
        self._held.append(self._next)
        for number in self._next:
            self._uses[number] = self._uses.get(number, 0) + 1
        self._next = next(self._batches, None)


class Fetcher:
    """Copies the shards of a window, in the order of their first use."""

    def __init__(self, shards: CopiedShards, batches: Iterator[Sequence[int]]) -> None:
        """
        Args:
            batches: see `Window`.
        """
        self._cache = shards.cache
        self._addresses = shards.addresses
        self._versions = shards.versions
        self._sizes = shards.sizes
        limit = shards.cache.limit
        budget = float("inf") if limit is None else limit / shards.cache.processes
        self._window = Window(batches, self._sizes, budget=budget)
        self._running: dict[int, Future[None]] = {}
        # Left to the workers, which read single images of them and say what is wrong. So are shards of unknown size.
        self._failed: set[int] = set()
        self._has_told = False
        self._pool = ThreadPoolExecutor(_THREADS)

    def step(self, consumed: int) -> None:
        """Start and finish what can be started and finished now.

        Args:
            consumed: batches that the workers have finished.
        """
        for number in [number for number, future in self._running.items() if future.done()]:
            self._finish(number, self._running.pop(number).exception())
        wanted = self._window.move(consumed)
        self._failed.intersection_update(wanted)
        # Touching keeps them from being evicted before they are used.
        missing = [number for number in wanted if number not in self._running and not self._touch(number)]
        for number in missing:
            if number in self._failed or self._sizes[number] is None:
                continue
            if len(self._running) == _THREADS:
                break
            place, size = self._copy(number)
            try:
                draft = self._cache.begin(place, size)
            except OSError as error:
                self._finish(number, error)
                continue
            # None: another process copies it, or there is no room, which may be enough for a smaller one.
            if draft is not None:
                address = self._addresses[number]
                self._running[number] = self._pool.submit(self._cache.download, address, place, size, draft)

    def stop(self) -> None:
        """Remove what is incomplete. The process has to end now: its threads are still writing."""
        for number in self._running:
            with suppress(OSError):
                self._cache.discard(*self._copy(number))

    def _copy(self, number: int) -> tuple[Path, int]:
        return self._cache.place(self._addresses[number], self._versions[number]), self._sizes[number] or 0

    def _touch(self, number: int) -> bool:
        return self._cache.touch(*self._copy(number))

    def _finish(self, number: int, error: BaseException | None) -> None:
        if error is None:
            return
        if not self._has_told:
            self._has_told = True
            print(f"note: data.shard_cache: {self._addresses[number]} is not copied ({error})", file=sys.stderr)
        self._failed.add(number)


@contextmanager
def fetch_ahead(
    shards: CopiedShards | None, sampler: Iterable[Sequence[tuple[int, int]]], count: int
) -> Iterator[Callable[[], None]]:
    """Copy the remote shards of a sampler's batches ahead of their use, as long as the context lasts.

    Yields the function to call when a batch has arrived.

    Args:
        shards: None does nothing.
        sampler: yields the same batches of (epoch, position) in each iteration.
        count: images of the source; position % count is an image's index.
    """
    if shards is None:
        yield lambda: None
        return
    arrived = multiprocessing.RawValue("q", 0)
    is_over = multiprocessing.Event()
    # A process: threads would take turns with the training step, and be missing in forked workers.
    process = multiprocessing.Process(target=_run, args=(shards, sampler, count, arrived, is_over), daemon=True)
    process.start()

    def count_batch() -> None:
        arrived.value += 1

    try:
        yield count_batch
    finally:
        is_over.set()
        process.join(_STOP_SECONDS)
        if process.is_alive():
            process.kill()


def _run(shards: CopiedShards, sampler: Iterable[Any], count: int, arrived: Any, is_over: Any) -> None:
    parent = os.getppid()
    # A launcher signals the whole process group; only the end of the parent or of its loader ends this process, and
    # multiprocessing's SIGTERM at exit.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    fetcher = Fetcher(shards, _shards_of_batches(shards, sampler, count))
    while os.getppid() == parent and not is_over.wait(_PAUSE):
        fetcher.step(arrived.value)
    fetcher.stop()
    # Without waiting for downloads.
    os._exit(0)


def _shards_of_batches(shards: CopiedShards, sampler: Iterable[Any], count: int) -> Iterator[tuple[int, ...]]:
    for keys in sampler:
        indices = np.fromiter((position for _, position in keys), np.int64, len(keys)) % count
        yield tuple(dict.fromkeys(shards.numbers(indices).tolist()))
