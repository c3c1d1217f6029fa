"""Applies a function to a source's images in several processes, with results in order."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver, get_context, parent_process, resource_tracker
from multiprocessing.context import ForkServerContext
from typing import Any, TypeVar

from pycls_fast.data.sources import Source
from pycls_fast.errors import UserError

R = TypeVar("R")

_CHUNK = 32
# Chunks in progress or not yet consumed, per process: bounds the memory.
_AHEAD = 3
# Processes take seconds to start. Few or small images are done sooner without them.
_SECONDS_WITHOUT = 3.0

_worker: tuple[Source, Callable[[Source, int], Any]] | None = None


def map_images(
    source: Source, function: Callable[[Source, int], R], *, start: int = 0, workers: int
) -> Iterator[tuple[int, R]]:
    """Yield (index, function(source, index)) for every index from `start` on, in order.

    Args:
        function: a module's function or a `functools.partial` of one.
        workers: processes; 0 works in this one, where the work of the first seconds is always done.

    Raises:
        UserError: a process died.
    """
    started = time.monotonic()
    while start < len(source) and (workers == 0 or time.monotonic() - started < _SECONDS_WITHOUT):
        yield start, function(source, start)
        start += 1
    if start == len(source):
        return
    indices = range(start, len(source))
    chunks = iter(indices[at : at + _CHUNK] for at in range(0, len(indices), _CHUNK))
    with ProcessPoolExecutor(workers, _context(), initializer=_start, initargs=(source, function)) as pool:
        waiting: deque[tuple[Sequence[int], Future[list[Any]]]] = deque()
        try:
            for chunk in itertools.chain(chunks, [None]):
                if chunk is not None:
                    waiting.append((chunk, pool.submit(_run, chunk)))
                while waiting and (chunk is None or len(waiting) >= workers * _AHEAD):
                    done, future = waiting.popleft()
                    yield from zip(done, future.result(), strict=True)
        except BrokenProcessPool as error:
            raise UserError(
                "a process that reads images died, most likely because memory ran out; lower data.num_workers"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _context() -> ForkServerContext:
    """The context of the processes: forks of one server, which imports this package once for them and for later calls.

    Forks of this process may hang: it has threads (the bar, torch).
    """
    forkserver.set_forkserver_preload(["pycls_fast.data.packing"])
    # Launchers and terminals signal all processes; only this one decides what follows. The others inherit the mask.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        resource_tracker.ensure_running()
        # Starting the tracker unblocks it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    context = get_context("forkserver")
    # The first process starts when the server has imported. An interrupt until then ends this one, not one of the pool,
    # which would find the pool's locks gone.
    first = context.Process()
    first.start()
    first.join()
    return context


def _start(source: Source, function: Callable[[Source, int], Any]) -> None:
    global _worker
    # The main process decides what an interrupt means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = (source, function)


def _end_with_parent() -> None:
    """End this process with its parent: holding both ends of its queue, it would wait forever for a killed one."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run(chunk: Sequence[int]) -> list[Any]:
    assert _worker is not None
    source, function = _worker
    return [function(source, index) for index in chunk]
