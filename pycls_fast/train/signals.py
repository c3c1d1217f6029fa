"""Signals that ask a run to stop: the step in progress ends, everything is saved, and the run leaves with a message."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType

from pycls_fast.config import scheduler
from pycls_fast.errors import UserError


class StopRequest:
    """Whether a signal has asked this process to stop; `name` is the first one's.

    Set `training` as soon as there is something to save. Before that a signal ends the process at once.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.training = False
        self.owed: Callable[[], object] | None = None

    def __bool__(self) -> bool:
        return self.name is not None

    def hand_on(self) -> None:
        """Give the launcher of a scheduler's task the signal that was caught in its place, if one was.

        It puts the job into the queue again and ends the process.

        Raises:
            UserError: it will not, for the job has run out of its time too often.
        """
        if self.owed is None:
            return
        try:
            self.owed()
        except Exception as error:  # the launcher's own, which may not be installed here
            reason = str(error).rstrip(".")
            raise UserError(
                f"hydra.launcher.max_num_timeout: {reason}; everything is saved, and the same run_dir goes on"
            ) from error


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Catch SIGTERM, SIGINT, SIGHUP (unless `nohup` has it ignored) and what a scheduler's launcher waits for.

    A second Ctrl-C interrupts at once, as without this.
    """
    request = StopRequest()
    warning = scheduler.warning_signal()
    numbers = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *([warning] if warning is not None else [])}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        numbers -= {signal.SIGHUP}
    before = {number: signal.getsignal(number) for number in numbers}

    def remember(number: int, frame: FrameType | None) -> None:
        former = before[signal.Signals(number)]
        if not request.training:
            if callable(former):
                former(number, frame)
            elif former != signal.SIG_IGN:
                # As the signal alone would, but what was begun is cleared away.
                raise SystemExit(128 + number)
            return
        if request and number == signal.SIGINT:
            raise KeyboardInterrupt
        if number == warning and callable(former):
            request.owed = partial(former, number, None)
        if not request:
            request.name = signal.Signals(number).name
            _answer(request.name)

    for number in numbers:
        signal.signal(number, remember)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _answer(name: str) -> None:
    """At once, for a step may take long: who hears nothing presses Ctrl-C again."""
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        # torchrun passes on the first one alone.
        alone = "TORCHELASTIC_RUN_ID" not in os.environ
        again = "; Ctrl-C again ends at once" if name == "SIGINT" and alone else ""
        # Not `print`: a signal may come in the middle of another one's; and the terminal may be gone.
        with suppress(OSError):
            os.write(2, f"\n{name}: stopping after this step, then saving{again}\n".encode())
