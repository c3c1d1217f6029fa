"""SIGTERM and Ctrl-C: the step in progress ends, everything is saved, and the run leaves with a message."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether a signal has asked this process to stop; `name` is the signal's."""

    def __init__(self) -> None:
        self.name: str | None = None

    def __bool__(self) -> bool:
        return self.name is not None


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Catch SIGTERM and SIGINT inside the context. A second Ctrl-C interrupts at once, as without this."""
    request = StopRequest()

    def remember(number: int, frame: FrameType | None) -> None:
        if request.name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.name = signal.Signals(number).name

    before = {number: signal.signal(number, remember) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
