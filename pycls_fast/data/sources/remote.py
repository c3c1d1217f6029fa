"""Files at addresses (`s3://`, `gs://`, `https://` ...) through fsspec, and local copies made ahead of their use.

Workers never download a shard: they read its copy, or single images over the network while there is none. A process
beside the workers of each rank iterates over the same sampler further ahead, and copies shards before their first use.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pycls_fast.data.sources.base import Images
from pycls_fast.data.sources.texts import digest
from pycls_fast.errors import UserError, refusing
from pycls_fast.files import flush, locked

_ATTEMPTS = 4
_FIRST_PAUSE = 0.5
_BLOCK = 8 * 2**20

T = TypeVar("T")


def is_remote(place: str) -> bool:
    """Whether a place is an address (`s3://...`) and not a path."""
    return "://" in place


def file_system(address: str) -> tuple[Any, str]:
    """fsspec's file system for an address (one for each process and thread), and the path on it."""
    import fsspec

    with refusing(f"{address}: fsspec cannot read it", ImportError, ValueError):
        files, path = fsspec.core.url_to_fs(address)
    if "file" in files.protocol and files.exists(path) and not (files.isfile(path) or files.isdir(path)):
        raise OSError(errno.EINVAL, "is no ordinary file", path)
    return files, path


def attempt(what: str, action: Callable[[], T]) -> T:
    """Run a network operation, with retries after growing pauses.

    Raises:
        FileNotFoundError: at once.
        UserError: it failed every time, which is no damaged image.
    """
    for number in range(_ATTEMPTS):
        try:
            return action()
        except (FileNotFoundError, UserError):
            raise
        except Exception as error:
            # File systems raise their own libraries' exceptions here.
            if number == _ATTEMPTS - 1:
                text = " ".join(str(error).split()) or type(error).__name__
                raise UserError(f"{what} failed {_ATTEMPTS} times: {text}") from error
            time.sleep(_FIRST_PAUSE * 4**number)
    raise AssertionError("unreachable")


def list_files(address: str) -> list[str]:
    """The addresses of all files below an address, or that match one with `*`; none if there is nothing."""
    files, path = file_system(address)
    try:
        found = attempt(f"listing {address}", lambda: files.glob(path) if "*" in path else files.find(path))
    except FileNotFoundError:
        found = []
    return sorted(files.unstrip_protocol(name) for name in found)


def stamp_of(place: str) -> list[Any]:
    """Path or address, size and version, as far as the file system has one: changes when the file does."""
    if not is_remote(place):
        status = Path(place).stat()
        return [place, status.st_size, status.st_mtime_ns]
    files, path = file_system(place)
    about = attempt(f"asking for {place}", lambda: files.info(path))
    versions = (about.get(key) for key in ("ETag", "etag", "md5Hash", "mtime", "LastModified", "created"))
    return [place, about.get("size"), next((str(version) for version in versions if version is not None), "")]


def open_whole(address: str) -> Any:
    files, path = file_system(address)
    return attempt(f"opening {address}", lambda: files.open(path, "rb", block_size=_BLOCK))


def read_range(address: str, start: int, size: int) -> bytes:
    files, path = file_system(address)
    return attempt(f"reading {address}", lambda: bytes(files.cat_file(path, start, start + size)))


# A partial copy has its final size in its name, so that others can leave room for it.
_DRAFT = re.compile(r"\.[0-9a-f]{16}-.+\.(\d+)\.part", re.DOTALL)
# A copy that was read or touched within this time is not evicted; a draft that did not grow for so long is removed.
_IN_USE_SECONDS, _STALE_SECONDS = 5.0, 60.0


class ShardCache:
    """A folder with copies of whole remote files, shared by all of a user's processes on a machine."""

    def __init__(self, folder: Path, limit: float, processes: int = 1) -> None:
        """
        Args:
            folder: may hold other files: copies lie in a subfolder of the user's.
            limit: total bytes of all copies, complete or not. Above it the least recently used copies are evicted.
            processes: how many copy shards on this machine, each within its share of the limit.
        """
        self.folder = folder / f"pycls_fast_shards_{os.getuid()}"
        self.limit = limit
        self.processes = processes
        with refusing(f"data.shard_cache: {self.folder} cannot be written"):
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._lock():
                pass

    def place(self, address: str, version: str) -> Path:
        """The path of a file's copy, whether it exists or not; each version has its own."""
        name = digest(f"{address}\0{version}")
        return self.folder / f"{name}-{address.rpartition('/')[2]}"

    def read_range(self, address: str, version: str, start: int, size: int) -> bytes:
        """Bytes of the local copy; of the remote file if there is no (whole) copy."""
        with suppress(OSError), self.place(address, version).open("rb", buffering=0) as file:
            os.utime(file.fileno())
            data = os.pread(file.fileno(), size, start)
            # A power cut may have truncated the copy.
            if len(data) == size:
                return data
        return read_range(address, start, size)

    def touch(self, place: Path, size: int) -> bool:
        """Whether the copy is complete. If it is, it counts as used now."""
        with suppress(OSError):
            if place.stat().st_size == size:
                os.utime(place)
                return True
        return False

    def begin(self, place: Path, size: int) -> Path | None:
        """A new draft for which there is room; None if there is none, or another process is making this copy."""
        draft = place.with_name(f".{place.name}.{size}.part")
        with self._lock():
            if not self._make_room(size) or draft.exists() or self.touch(place, size):
                return None
            draft.touch()
            return draft

    def download(self, address: str, place: Path, size: int, draft: Path) -> None:
        def fetch() -> None:
            files.get_file(path, str(draft))
            if draft.stat().st_size != size:
                raise OSError(f"{draft.stat().st_size:,} bytes arrived instead of {size:,}; was the file replaced?")

        try:
            files, path = file_system(address)
            attempt(f"fetching {address}", fetch)
            # A power cut must not leave a truncated copy under the final name.
            with draft.open("rb+") as written:
                flush(written)
            # Under the lock, or a process that makes room might find neither name.
            with self._lock():
                draft.rename(place)
        finally:
            draft.unlink(missing_ok=True)

    def _lock(self) -> AbstractContextManager[None]:
        """Exclude other processes while room is made or a copy named."""
        return locked(self.folder / ".room.lock")

    def _make_room(self, size: int) -> bool:
        held, idle, now = 0, [], time.time()
        for file in self.folder.iterdir():
            # Other processes give drafts up meanwhile.
            with suppress(OSError):
                about, draft = file.stat(), _DRAFT.fullmatch(file.name)
                if not draft and file.name.startswith("."):
                    continue
                if draft and about.st_mtime < now - _STALE_SECONDS:
                    file.unlink()
                    continue
                held += int(draft[1]) if draft else about.st_size
                if not draft and about.st_mtime < now - _IN_USE_SECONDS:
                    idle.append((about.st_mtime, about.st_size, file))
        for _, own, file in sorted(idle):
            if held + size <= self.limit:
                break
            file.unlink(missing_ok=True)
            held -= own
        return held + size <= self.limit


class CachedShards(Images):
    """A source of remote shards with local copies; what `fetch_ahead` knows of it."""

    cache: ShardCache | None
    block_ends: np.ndarray

    def shard(self, number: int) -> tuple[str, str, int | None]:
        """Address, version and size in bytes (None if unknown) of a shard."""
        raise NotImplementedError


# Downloads at the same time, of each rank.
_THREADS = 8
_PAUSE, _STOP_SECONDS = 0.1, 5.0
# A lane of `block_order` reads one shard after the other: of 64 lanes each has its next one here.
_MOST_SHARDS, _MOST_BATCHES = 128 + _THREADS, 10_000


class Fetcher:
    """Copies the shards of a rank's next batches, in the order of their first use."""

    def __init__(self, source: CachedShards, batches: Iterable[Sequence[int]]) -> None:
        """`batches`: the numbers of each batch's shards, without repetitions."""
        assert source.cache is not None
        self._source = source
        self._cache = source.cache
        self._batches = enumerate(batches)
        self._seen = -1
        # The last batch known to use each shard, in the order of first use.
        self._needed: dict[int, int] = {}
        self._running: dict[int, tuple[Path, Future[None]]] = {}
        # Left to the workers, which read single images of them and say what is wrong. So are shards of unknown size.
        self._failed: set[int] = set()
        self._has_told = False
        self._pool = ThreadPoolExecutor(_THREADS)

    def step(self, consumed: int) -> None:
        """Start and finish copies; `consumed` is the number of batches that the workers have finished."""
        for number in [number for number, (_, copying) in self._running.items() if copying.done()]:
            self._finish(number, self._running.pop(number)[1].exception())
        self._look_ahead(consumed)
        self._failed.intersection_update(self._needed)
        for number in self._needed:
            address, version, size = self._source.shard(number)
            place = self._cache.place(address, version)
            # Touching keeps a copy from being evicted before it is used.
            if number in self._running or size is None or number in self._failed or self._cache.touch(place, size):
                continue
            if len(self._running) == _THREADS:
                continue
            try:
                draft = self._cache.begin(place, size)
            except OSError as error:
                self._finish(number, error)
                continue
            # None: another process copies it, or there is no room, which may be enough for a smaller one.
            if draft is not None:
                copying = self._pool.submit(self._cache.download, address, place, size, draft)
                self._running[number] = draft, copying

    def stop(self) -> None:
        """Remove what is incomplete. The process has to end now: its threads are still writing."""
        for draft, _ in self._running.values():
            draft.unlink(missing_ok=True)

    def _look_ahead(self, consumed: int) -> None:
        """Find the needed shards: those of the next batch, and of as many more as this process may keep copies of."""
        self._needed = {number: last for number, last in self._needed.items() if last >= consumed}
        budget = self._cache.limit / self._cache.processes
        size = sum(self._source.shard(number)[2] or 0 for number in self._needed)
        while (size < budget and len(self._needed) < _MOST_SHARDS and self._seen < consumed + _MOST_BATCHES) or (
            self._seen < consumed
        ):
            self._seen, numbers = next(self._batches, (sys.maxsize, ()))
            if self._seen < consumed:
                continue
            for number in numbers:
                size += 0 if number in self._needed else self._source.shard(number)[2] or 0
                self._needed[number] = self._seen

    def _finish(self, number: int, error: BaseException | None) -> None:
        if error is None:
            return
        if not self._has_told:
            self._has_told = True
            print(f"note: data.shard_cache: {self._source.shard(number)[0]} is not copied ({error})", file=sys.stderr)
        self._failed.add(number)


@contextmanager
def fetch_ahead(source: Images, sampler: Iterable[Sequence[tuple[int, int]]]) -> Iterator[Callable[[], None]]:
    """Copy the remote shards of a sampler's batches ahead of their use, as long as the context lasts.

    Yields the function to call when a batch has arrived.

    Args:
        source: if it has no copies of shards, nothing is done.
        sampler: yields the same batches of (epoch, position) in each iteration; position % len(source) is an image's
            index.
    """
    stored = source.origin(np.arange(0))[0]
    if not isinstance(stored, CachedShards) or stored.cache is None:
        yield lambda: None
        return
    # Plain memory: setting an event waits for those who wait for it, for ever if one of them was killed.
    arrived, is_over = multiprocessing.RawValue("q", 0), multiprocessing.RawValue("b", 0)
    # A process: threads would take turns with the training step, and be missing in forked workers.
    process = multiprocessing.Process(target=_fetch, args=(source, stored, sampler, arrived, is_over), daemon=True)
    process.start()

    def count_batch() -> None:
        arrived.value += 1

    try:
        yield count_batch
    finally:
        is_over.value = 1
        process.join(_STOP_SECONDS)
        if process.is_alive():
            process.kill()


def _fetch(source: Images, stored: CachedShards, sampler: Iterable[Any], arrived: Any, is_over: Any) -> None:
    parent = os.getppid()
    # A launcher signals the whole process group; only the end of the parent or of its loader ends this process, and
    # multiprocessing's SIGTERM at exit.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    fetcher = Fetcher(stored, _shards_of_batches(source, stored.block_ends, sampler))
    while os.getppid() == parent and not is_over.value:
        fetcher.step(arrived.value)
        time.sleep(_PAUSE)
    fetcher.stop()
    # Without waiting for downloads.
    os._exit(0)


def _shards_of_batches(source: Images, ends: np.ndarray, sampler: Iterable[Any]) -> Iterator[tuple[int, ...]]:
    for keys in sampler:
        indices = np.fromiter((position for _, position in keys), np.int64, len(keys)) % len(source)
        numbers = np.searchsorted(ends, source.origin(indices)[1], side="right")
        yield tuple(dict.fromkeys(numbers.tolist()))
