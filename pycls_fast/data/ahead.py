"""Remote shards are copied before their first image is needed, by a process beside the loader's workers."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import chain, islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import numpy as np

from pycls_fast.data.sampling import Key
from pycls_fast.data.sources import copied_shards
from pycls_fast.data.sources.shard_cache import CopiedShards

# Downloads at the same time, of each rank.
_THREADS = 8
_PAUSE = 0.1
# Bounds the memory (some MB) and the work of looking ahead where few shards are in use.
_MOST_BATCHES = 10_000
_BATCHES_AT_ONCE = 500
# Together they have images of all lanes, however many microbatches a step has.
_BATCHES_OF_LANES = 64
_START_SECONDS, _STOP_SECONDS = 60.0, 5.0


class Window:
    """The shards of a rank's next batches: those in use and, as far as there is room beside them, those to come."""

    def __init__(
        self, batches: Iterator[Sequence[int]], sizes: Sequence[int | None], *, budget: float, in_flight: int
    ) -> None:
        """
        Args:
            batches: the numbers of the shards of each batch, without repetitions.
            sizes: bytes of each shard, None where unknown.
            budget: bytes of all shards in the window. The batches in flight are in it even if their shards have more.
            in_flight: batches that workers may have in progress.
        """
        self._sizes = sizes
        self._budget = budget
        self._in_flight = in_flight
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
        """The shards of the window that begins after so many batches, in the order of their first use."""
        while self._consumed < consumed and (self._held or self._next is not None):
            if not self._held:
                self._append()
            self._drop()
        for _ in range(_BATCHES_AT_ONCE):
            if self._next is None or not (len(self._held) < self._in_flight or self._fits(self._next)):
                break
            self._append()
        return list(self._uses)

    def in_flight(self) -> set[int]:
        """The shards of the batches that workers may have in progress."""
        return set(chain.from_iterable(islice(self._held, self._in_flight)))

    def bytes_of(self, shards: Iterable[int]) -> int:
        """The size of some shards together, as far as known."""
        return sum(self._sizes[number] or 0 for number in shards)

    def _fits(self, batch: Sequence[int]) -> bool:
        shards = self._uses.keys() | set(batch)
        return len(self._held) < _MOST_BATCHES and len(shards) <= self._most and self.bytes_of(shards) <= self._budget

    def _append(self) -> None:
        assert self._next is not None
        self._held.append(self._next)
        for number in self._next:
            self._uses[number] = self._uses.get(number, 0) + 1
        self._next = next(self._batches, None)

    def _drop(self) -> None:
        for number in self._held.popleft():
            self._uses[number] -= 1
            if not self._uses[number]:
                del self._uses[number]
        self._consumed += 1


class Fetcher:
    """Copies the shards of a window, in the order of their first use.

    It holds the locks of all shards in the window that have no copy yet: until there is one, workers read single images
    over the network. A shard whose download failed is left to the worker that needs it, which tries again and reports.
    """

    def __init__(self, shards: CopiedShards, window: Window) -> None:
        self._cache = shards.cache
        self._addresses = shards.addresses
        self._places = [
            shards.cache.place(shards.addresses[number], shards.versions[number])
            for number in range(len(shards.addresses))
        ]
        self._sizes = shards.sizes
        self._window = window
        self._budget = budget_of(shards)
        self._claims: dict[int, IO[str]] = {}
        self._running: dict[int, Future[None]] = {}
        self._failed: set[int] = set()
        self._pool = ThreadPoolExecutor(_THREADS)

    def step(self, consumed: int) -> None:
        """Start and finish what can be started and finished now.

        Args:
            consumed: batches that the workers have finished.
        """
        wanted = self._window.move(consumed)
        for number in [number for number, future in self._running.items() if future.done()]:
            self._finish(number)
        for number in self._claims.keys() - self._running.keys() - set(wanted):
            self._claims.pop(number).close()
        self._failed.intersection_update(wanted)
        # Touching keeps them from being evicted before they are used.
        missing = [number for number in wanted if not self._cache.touch(*self._copy(number))]
        for number in missing:
            if number not in self._claims and number not in self._failed:
                self._claim(number)
        held = set(wanted) - set(missing)
        for number in missing:
            if number in self._claims and number not in self._running and not self._start(number, held):
                break

    def stop(self) -> None:
        """Remove what is incomplete. The process has to end now: its threads are still writing."""
        for number in self._running:
            with suppress(OSError):
                self._cache.discard(*self._copy(number))

    def _copy(self, number: int) -> tuple[Path, int | None]:
        return self._places[number], self._sizes[number]

    def _claim(self, number: int) -> None:
        try:
            lock = self._cache.claim(self._places[number])
        except OSError:
            self._failed.add(number)
            return
        # None: another process fetches it.
        if lock is not None:
            self._claims[number] = lock
            # Another process may have completed it just before.
            if self._cache.touch(*self._copy(number)):
                self._claims.pop(number).close()

    def _start(self, number: int, held: set[int]) -> bool:
        """Start a download; False if no other can be started now.

        Args:
            held: shards of the window that have a copy.
        """
        place, size = self._copy(number)
        taken = held | self._running.keys()
        if len(self._running) == _THREADS:
            return False
        if taken and self._window.bytes_of(taken) + (size or 0) > self._budget:
            return False
        try:
            # Workers wait for the images of a shard in flight, one request each: for that others may be evicted.
            if not self._cache.reserve(place, size, ahead=number not in self._window.in_flight()):
                return False
        except OSError:
            self._give_up(number)
            return True
        self._running[number] = self._pool.submit(self._cache.download, self._addresses[number], place, size)
        return True

    def _finish(self, number: int) -> None:
        if self._running.pop(number).exception() is None:
            self._claims.pop(number).close()
        else:
            self._give_up(number)

    def _give_up(self, number: int) -> None:
        self._failed.add(number)
        self._claims.pop(number).close()


def budget_of(shards: CopiedShards) -> float:
    """Bytes of copies that one process may plan with."""
    limit = shards.cache.limit
    return float("inf") if limit is None else limit / shards.cache.processes


@contextmanager
def fetch_ahead(source: Any, sampler: Iterable[list[Key]], *, in_flight: int) -> Iterator[Callable[[], None]]:
    """Copy the remote shards of a sampler's batches ahead of their use, as long as the context lasts.

    Yields the function to call when a batch has arrived. Nothing is done for a source without copies of remote shards.

    Args:
        source: that of the dataset.
        sampler: yields the same batches in each iteration.
        in_flight: batches that workers may have in progress.
    """
    shards = copied_shards(source)
    if shards is None:
        yield lambda: None
        return
    arrived = multiprocessing.RawValue("q", 0)
    ours, theirs = multiprocessing.Pipe()
    # A process: threads would take turns with the training step, and be missing in forked workers.
    process = multiprocessing.Process(
        target=_run, args=(shards, sampler, len(source), in_flight, arrived, theirs, ours), daemon=True
    )
    process.start()
    theirs.close()

    def count() -> None:
        arrived.value += 1

    try:
        # Until it holds the locks, workers would fetch whole shards themselves.
        ours.poll(_START_SECONDS)
        yield count
    finally:
        ours.close()
        process.join(_STOP_SECONDS)
        if process.is_alive():
            process.kill()


def _run(
    shards: CopiedShards,
    sampler: Iterable[list[Key]],
    count: int,
    in_flight: int,
    arrived: Any,
    connection: Connection,
    parents_end: Connection,
) -> None:
    parent = os.getppid()
    # A launcher signals the whole process group; only the end of the parent or of its loader ends this process, and
    # multiprocessing's SIGTERM at exit.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Otherwise the pipe would stay open when the parent closes its end.
    parents_end.close()
    batches = _shards_of_batches(shards, sampler, count)
    window = Window(batches, shards.sizes, budget=budget_of(shards), in_flight=in_flight)
    fetcher = Fetcher(shards, window)
    fetcher.step(0)
    with suppress(BrokenPipeError):
        connection.send(None)
    while os.getppid() == parent and not connection.poll(_PAUSE):
        fetcher.step(arrived.value)
    fetcher.stop()
    # Without waiting for downloads; the locks end with the process.
    os._exit(0)


def _shards_of_batches(shards: CopiedShards, sampler: Iterable[list[Key]], count: int) -> Iterator[tuple[int, ...]]:
    for keys in sampler:
        # A repeated image's position is index + count, index + 2 count ...
        indices = np.fromiter((position for _, position in keys), np.int64, len(keys)) % count
        yield tuple(dict.fromkeys(shards.numbers(indices).tolist()))
