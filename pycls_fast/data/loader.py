"""The loader of batches: its workers, how they start and end, and what the user is shown when one dies."""

from __future__ import annotations

import atexit
import errno
import math
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from multiprocessing import connection, queues, util
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from pycls_fast.data.batch import MORE_SHARED_MEMORY, SHARED_MEMORY
from pycls_fast.data.dataset import ImageDataset
from pycls_fast.data.sampling import EvalSampler, TrainSampler
from pycls_fast.data.sources.base import Images
from pycls_fast.data.sources.fetch_ahead import fetch_ahead
from pycls_fast.errors import UserError, first_line, refusing

# Since Python 3.14 another way is the default: it imports everything again in each worker, the user's program included.
_CONTEXT = multiprocessing.get_context("fork")

# torch's attempts to get a batch end after 5 s. One that takes this long waits for a worker that stopped while sending.
_STUCK_SECONDS = 10.0


class _Workers(_MultiProcessingDataLoaderIter):
    """torch's iterator, which raises when no batch has come for too long, and leaves no worker behind."""

    # Until there are workers, or the destructor of an iterator that could not be made would print a traceback.
    _shutdown = True

    def __init__(self, loader: Loader) -> None:
        self._seconds, self._while_waiting = loader.timeout_seconds, loader.while_waiting
        self._stops_gracefully = loader.stops_gracefully
        self._waited, self._asked_at, self._is_over = 0.0, math.inf, threading.Event()
        try:
            super().__init__(loader)
            # By now torch's handler of SIGCHLD raises for a dead worker.
            _running.add(self)
            threading.Thread(target=self._kill_stuck_workers, daemon=True).start()
        except BaseException:
            self._is_over.set()
            self._kill()
            self._shutdown = True
            raise

    def stop(self) -> None:
        self._is_over.set()
        if not self._stops_gracefully:
            self._kill()
        self._shutdown_workers()
        # Some may still be reading after torch's timeout; they ignore its SIGTERM.
        self._kill()

    def _kill(self) -> None:
        for worker in getattr(self, "_workers", []):
            if worker.is_alive():
                worker.kill()

    def _try_get_data(self, *arguments: Any, **more: Any) -> Any:
        # Not torch's `timeout`, which would look for dead workers only at its end.
        self._asked_at = began = time.monotonic()
        try:
            found, data = super()._try_get_data(*arguments, **more)
        except Exception:
            self._check(self._waited + time.monotonic() - began)
            raise
        finally:
            self._asked_at = math.inf
        self._waited = 0.0 if found else self._waited + time.monotonic() - began
        if not found:
            self._check(self._waited)
        return found, data

    def _check(self, waited: float) -> None:
        self._while_waiting()
        if waited > self._seconds:
            raise UserError(
                f"no batch has come from the data workers for {self._seconds:g} s (parallel.timeout_seconds), though "
                "all live; see what they printed, and whether the data's disk answers; data.num_workers=0 shows the "
                "error"
            )

    def _kill_stuck_workers(self) -> None:
        """Kill the workers after the timeout, so that a reader that waits for the rest of a batch gets an error."""
        while not self._is_over.wait(1.0):
            since = time.monotonic() - self._asked_at
            if since < _STUCK_SECONDS:
                continue
            with suppress(Exception):
                self._check(self._waited + since)
                continue
            self._kill()
            return


# Iterators whose workers may still run.
_running: weakref.WeakSet[_Workers] = weakref.WeakSet()


@atexit.register
def _stop_all_workers() -> None:
    """End the workers of iterators that a traceback or a global variable keeps alive to the end.

    multiprocessing waits for them without a timeout, and they ignore its SIGTERM. The handler registered last runs
    first.
    """
    for iterator in list(_running):
        iterator.stop()


@contextmanager
def _without_side_effects() -> Iterator[None]:
    """Hide torch's warning about more workers than cores, which help if loading waits for a network disk, and restore
    the handler of SIGCHLD: torch's raises for a dead worker in the middle of a step or a save. Without it, a wait for
    the worker's batch ends within 5 s.
    """
    before = signal.getsignal(signal.SIGCHLD)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            yield
    finally:
        # None is a handler that Python did not set and cannot set again.
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGCHLD, before)


class Loader(DataLoader[Any]):
    """A DataLoader that raises exceptions which workers return, and says in one line why a worker has died."""

    def __init__(
        self,
        dataset: Dataset[Any],
        num_workers: int,
        *,
        prefetch_factor: int = 2,
        timeout_seconds: float = math.inf,
        while_waiting: Callable[[], None] = lambda: None,
        stops_gracefully: bool = True,
        **settings: Any,
    ) -> None:
        """
        Args:
            timeout_seconds: the longest wait for a batch of the workers.
            while_waiting: called every few seconds during a wait; may raise.
            stops_gracefully: whether workers finish their batch, for up to 5 s each, before they are killed: they may
                hold shared memory.
        """
        self.timeout_seconds, self.while_waiting = timeout_seconds, while_waiting
        self.stops_gracefully = stops_gracefully
        with _without_side_effects():
            super().__init__(
                dataset,
                num_workers=num_workers,
                multiprocessing_context=_CONTEXT if num_workers else None,
                prefetch_factor=prefetch_factor if num_workers else None,
                # Workers return whole batches.
                collate_fn=lambda batch: batch,
                worker_init_fn=_start_worker,
                **settings,
            )

    def _get_iterator(self) -> Any:
        return _Workers(self) if self.num_workers else super()._get_iterator()

    def __iter__(self) -> Any:
        if self.num_workers:
            # Otherwise each worker would make its own folder for sockets, and a killed one would leave it behind.
            util.get_temp_dir()
        way_out = f"raise the limit of files (ulimit -n); if shared memory is full, {MORE_SHARED_MEMORY}"
        workers = None
        try:
            with _without_side_effects(), refusing("data workers cannot be started", use=way_out):
                iterator = super().__iter__()
            workers = iterator if isinstance(iterator, _Workers) else None
            for batch in iterator:
                if isinstance(batch, Exception):
                    raise batch
                yield batch
        except (RuntimeError, OSError, EOFError) as error:
            message = _cause(error, workers._workers if workers else [])
            if message is None:
                raise
            raise UserError(message) from error
        finally:
            if workers is not None:
                workers.stop()


class ImageLoader(Loader):
    """Yields `Batch` in the sampler's order, the same for any number of workers; remote shards are fetched ahead.

    Raises, while iterating, a `UserError` for broken data, a dead worker or full shared memory.
    """

    def __init__(
        self, dataset: ImageDataset, sampler: TrainSampler | EvalSampler, *, num_workers: int, **settings: Any
    ) -> None:
        """
        Args:
            num_workers: processes that read and decode, no more than there are batches; 0 for the calling process.
            settings: of `Loader`, and of torch's DataLoader.
        """
        # More workers would be forked from a process with the device's memory mapped, and have nothing to do.
        workers = min(num_workers, max(len(sampler), 1))
        # Otherwise the loader would draw the workers' seeds from the global generator.
        generator = torch.Generator().manual_seed(dataset.seed)
        super().__init__(dataset, workers, batch_sampler=sampler, generator=generator, **settings)
        self._source, self._sampler = dataset.source, sampler

    def __iter__(self) -> Any:
        with fetch_ahead(self._source, self._sampler) as count_batch, closing(super().__iter__()) as batches:
            for batch in batches:
                count_batch()
                yield batch


_SHORTAGE = re.compile(r"Too many open files|unable to \w+ (?:a |the )?(?:shared memory object|file) .*")


def _lacks_files(message: str) -> bool:
    return os.strerror(errno.EMFILE) in message


def _cause(error: Exception, workers: Sequence[BaseProcess]) -> str | None:
    """The line for a user if the error is about a dead worker or a lack of resources; None for any other error."""
    message, is_cut_off = str(error), isinstance(error, ConnectionError | EOFError)
    if is_cut_off:
        # A worker died while it sent a batch: it ends a moment later, and its status is known a moment after that.
        ended = connection.wait([worker.sentinel for worker in workers], timeout=5)
        for worker in workers:
            if worker.sentinel in ended:
                worker.join(5)
    lacks_files = any(worker.exitcode == errno.EMFILE for worker in workers)
    if shortage := _SHORTAGE.search(os.strerror(errno.EMFILE) if lacks_files else message):
        way_out = "raise the limit (ulimit -n), or lower data.num_workers or data.prefetch_factor"
        return f"data workers: {shortage[0]}; {way_out if _lacks_files(shortage[0]) else MORE_SHARED_MEMORY}"
    signals = [-worker.exitcode for worker in workers if worker.exitcode is not None and worker.exitcode < 0]
    # The pinning thread ends if a worker dies while it receives that worker's batch.
    is_cut_off = is_cut_off or message.startswith("Pin memory thread")
    if not message.startswith("DataLoader worker") and not (is_cut_off and signals):
        return None
    if signal.SIGBUS in signals:
        return f"a data worker exited unexpectedly: shared memory ({SHARED_MEMORY}) is full; {MORE_SHARED_MEMORY}"
    name = f" ({(signal.strsignal(signals[0]) or str(signals[0])).lower()})" if signals else ""
    return (
        f"a data worker exited unexpectedly{name}; usually out of memory (see the kernel's log): lower "
        "data.num_workers or data.prefetch_factor"
    )


R = TypeVar("R")


class _Jobs(Dataset[Any]):
    def __init__(self, function: Callable[[Images, Any], Any], source: Images, jobs: Sequence[Any]) -> None:
        self._function, self._source, self._jobs = function, source, jobs

    def __len__(self) -> int:
        return len(self._jobs)

    def __getitem__(self, number: int) -> Any:
        try:
            return self._function(self._source, self._jobs[number])
        except Exception as error:  # noqa: BLE001  # raised in the main process
            return error


def in_processes(
    function: Callable[[Images, Any], R], source: Images, jobs: Sequence[Any], workers: int
) -> Iterator[R]:
    """Yield function(source, job) for every job, in order; a single job or worker runs in this process."""
    workers = min(workers, len(jobs))
    # All jobs are handed out at once, so that none waits for a slow one before it.
    each = max(math.ceil(len(jobs) / max(workers, 1)), 2)
    workers = workers if workers > 1 else 0
    # A job may take minutes: none is waited for at the end.
    how: dict[str, Any] = {"prefetch_factor": each, "batch_size": None, "stops_gracefully": False}
    return iter(Loader(_Jobs(function, source, jobs), workers, **how))


_ON_ERROR = "_on_queue_feeder_error"


def _end_worker(error: BaseException) -> None:
    """End a worker that cannot send a batch, with the status EMFILE if it is out of file descriptors."""
    if _lacks_files(str(error)):
        os._exit(errno.EMFILE)
    print(f"error: a data worker cannot send its batch: {first_line(error)}", file=sys.stderr, flush=True)
    os._exit(1)


def _end_with_parent() -> None:
    """End this process with its parent, which may be killed in the middle of a job."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _start_worker(worker: int) -> None:
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # An error in a thread that sends batches would only print a traceback, and the loader would wait for the batch.
    setattr(queues.Queue, _ON_ERROR, staticmethod(lambda error, batch: _end_worker(error)))
    sys.excepthook = lambda kind, error, trace: _end_worker(error)
    # A launcher signals the whole process group. Only the main process may decide what follows, e.g. to
    # finish the step and save; the workers end when it closes the loader or is gone.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
