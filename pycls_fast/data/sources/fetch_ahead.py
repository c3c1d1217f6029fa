"""Local copies of remote shards, made ahead of their use.

Workers never download a shard: they read its copy, or single images over the network while there is none. A process
beside the workers of each rank iterates over the same sampler further ahead, and copies shards before their first use.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pycls_fast.data.sources.base import Images
from pycls_fast.data.sources.tars import TarImages

# Downloads at the same time, of each rank.
_THREADS = 8
_PAUSE, _STOP_SECONDS = 0.1, 5.0
# A lane of `block_order` reads one shard after the other: of 64 lanes each has its next one here.
_MOST_SHARDS, _MOST_BATCHES = 128 + _THREADS, 10_000


class Fetcher:
    """Copies the shards of a rank's next batches, in the order of their first use."""

    def __init__(self, source: TarImages, batches: Iterable[Sequence[int]]) -> None:
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
            if number in self._running or size is None or number in self._failed or self._cache.touch(place):
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
    if not isinstance(stored, TarImages) or stored.cache is None:
        yield lambda: None
        return
    # Plain memory: setting an event waits for those who wait for it, for ever if one of them was killed.
    arrived, is_over = multiprocessing.RawValue("q", 0), multiprocessing.RawValue("b", 0)
    # A process: threads would take turns with the training step, and be missing in forked workers.
    arguments = (source, stored, sampler, arrived, is_over)
    process = multiprocessing.get_context("fork").Process(target=_fetch, args=arguments, daemon=True)
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


def _fetch(source: Images, stored: TarImages, sampler: Iterable[Any], arrived: Any, is_over: Any) -> None:
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
