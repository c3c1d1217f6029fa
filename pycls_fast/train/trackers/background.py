"""A tracker in a thread of its own: training neither waits for a server nor ends when it fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from queue import SimpleQueue
from threading import Event, Thread
from typing import Protocol

from pycls_fast.errors import DONE, MISTAKE, STOPPED, UserError, first_line

_START_SECONDS = 60.0
# How long `end` waits for what has not been sent, by the exit status. A stopped run may have little time left, and its
# folder stays locked meanwhile.
_END_SECONDS = {DONE: 60.0, MISTAKE: 60.0, STOPPED: 5.0}
_END_SECONDS_ELSE = 1.0


class Tracker(Protocol):
    """Something that records the numbers of one run."""

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers by their names, such as `train/loss`."""

    def end(self, status: int, final: Mapping[str, float]) -> None:
        """Record the exit status and the final numbers (none if the run did not finish), and close."""


class Background:
    """Opens and calls a tracker in a thread, in order. After its first failure, which is one warning, it is not called
    again.

    Args:
        opened: opens the tracker; called in the thread. See `Tracker`.
        name: for messages.
        way_out: what to do if it cannot be opened.
        warn: called with a warning, in the thread of the caller.
    """

    def __init__(self, opened: Callable[[], Tracker], name: str, way_out: str, warn: Callable[[str], None]) -> None:
        self._open, self._name, self._way_out, self._warn = opened, name, way_out, warn
        self._started = Event()
        self._failure: str | None = None
        self._reported = False
        self._calls: SimpleQueue[Callable[[Tracker], None] | None] = SimpleQueue()
        # A daemon, so that Python does not wait for a server that does not answer. W&B's own process still may.
        self._thread = Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def wait_for_start(self) -> str | None:
        """Wait until the tracker is open; returns why it cannot be opened, which is then not a warning."""
        if not self._started.wait(_START_SECONDS):
            self._failure = self._failure or self._cannot_start(_no_answer(_START_SECONDS))
        self._reported = self._failure is not None
        return self._failure

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Queue the numbers of a step."""
        self._calls.put(lambda tracker: tracker.add(step, values))
        self._report("the run continues without it")

    def end(self, status: int, final: Mapping[str, float]) -> None:
        """Queue the end, and wait until everything is sent, but not for long."""
        self._calls.put(lambda tracker: tracker.end(status, final))
        self._calls.put(None)
        seconds = _END_SECONDS.get(status, _END_SECONDS_ELSE)
        if self._failure is None:
            self._thread.join(seconds)
        if self._failure is None and self._thread.is_alive():
            self._failure = self._failed(_no_answer(seconds))
        self._report("not everything was sent")

    def _work(self) -> None:
        try:
            tracker = self._open()
        except UserError as error:
            self._failure = self._failure or error.lines[0]
            return
        except Exception as error:  # noqa: BLE001  # the network's, the server's or the package's own
            self._failure = self._failure or self._cannot_start(_reason(error))
            return
        finally:
            self._started.set()
        for call in iter(self._calls.get, None):
            if self._failure is None:
                try:
                    call(tracker)
                except Exception as error:  # noqa: BLE001  # its network or server
                    self._failure = self._failed(_reason(error))

    def _cannot_start(self, reason: str) -> str:
        return f"runtime.tracker: {self._name} cannot start ({reason}); {self._way_out}"

    def _failed(self, reason: str) -> str:
        return f"runtime.tracker: {self._name} failed ({reason})"

    def _report(self, consequence: str) -> None:
        if self._failure is not None and not self._reported:
            self._reported = True
            self._warn(f"{self._failure}; {consequence}")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _no_answer(seconds: float) -> str:
    return f"no answer for {seconds:g} s"
