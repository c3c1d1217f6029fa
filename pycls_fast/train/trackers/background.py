"""A tracker in a thread of its own: training neither waits for a server nor ends when it fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

from pycls_fast.errors import first_line

if TYPE_CHECKING:
    from pycls_fast.train.trackers.board import Tracker


class Background:
    """Calls a tracker from a thread, in order. After its first failure, which is one warning, it is not called again.

    Args:
        tracker: the tracker; see `Tracker`.
        name: for messages.
        warn: called with a warning, from the thread of the caller.
        patience_seconds: how long `end` waits for what has not been sent.
    """

    def __init__(
        self, tracker: Tracker, name: str, warn: Callable[[str], None], *, patience_seconds: float = 60.0
    ) -> None:
        self._tracker, self._name, self._warn, self._patience_seconds = tracker, name, warn, patience_seconds
        self._failure: Exception | None = None
        self._warned = False
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # A daemon: a server that does not answer must not keep the process alive.
        self._thread = Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Queue the numbers of a step."""
        self._calls.put(partial(self._tracker.add, step, values))
        self._warn_once()

    def end(self, status: int, final: Mapping[str, float]) -> None:
        """Queue the end, and wait until everything is sent."""
        self._calls.put(partial(self._tracker.end, status, final))
        self._calls.put(None)
        self._thread.join(self._patience_seconds)
        if self._thread.is_alive():
            self._failure = self._failure or TimeoutError(f"no answer for {self._patience_seconds:g} s")
        self._warn_once()

    def _work(self) -> None:
        for call in iter(self._calls.get, None):
            if self._failure is None:
                try:
                    call()
                except Exception as error:  # noqa: BLE001  # the network's, the server's or the package's own
                    self._failure = error

    def _warn_once(self) -> None:
        if self._failure is not None and not self._warned:
            self._warned = True
            what = f"{type(self._failure).__name__}: {first_line(self._failure)}"
            self._warn(f"runtime.tracker: {self._name} failed ({what}); the run continues without it")
