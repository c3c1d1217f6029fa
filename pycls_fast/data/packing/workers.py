"""Applies a function to a source's images in several processes, with results in order."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from typing import Any, TypeVar

from pycls_fast.data.sources import Source
from pycls_fast.errors import UserError

R = TypeVar("R")

_CHUNK = 32
# Chunks in progress or not yet consumed, per process: bounds the memory.
_AHEAD = 3

_worker: tuple[Source, Callable[[Source, int], Any]] | None = None


def map_images(
    source: Source, function: Callable[[Source, int], R], *, start: int = 0, workers: int
) -> Iterator[tuple[int, R]]:
    """Yield (index, function(source, index)) for every index from `start` on, in order.

    Args:
        function: a module's function or a `functools.partial` of one.
        workers: processes; 0 works in this one.

    Raises:
        UserError: a process died.
    """
    indices = range(start, len(source))
    if workers == 0:
        for index in indices:
            yield index, function(source, index)
        return
    chunks = iter(indices[at : at + _CHUNK] for at in range(0, len(indices), _CHUNK))
    # "spawn": this process has threads (the bar, torch), with which a fork may hang.
    context = get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_start, initargs=(source, function)) as pool:
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
