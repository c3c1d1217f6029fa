"""Signals that ask a run to stop: it finishes the step, saves everything, prints a message and exits."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

from pycls_fast.config import scheduler
from pycls_fast.errors import UserError, end_import, is_first_of_node, refusing, say_at_once

# A signal that comes again sooner is the same one: `timeout` and others signal a process, then its group.
_ECHO_SECONDS = 1.0
# A signal whose exception was lost comes again after so long, when what lost it is over.
_LOST_SECONDS = 0.05
# Other ranks wait so long for one that has no data yet: torchrun kills all 30 s after a signal.
_LATE_SECONDS = 20.0
# Within this time the first task draws the last curves, ends its trackers and requeues the job.
_REQUEUE_SECONDS = 60


class Stopped(Exception):
    """Raised once all ranks have agreed to stop, because a signal has asked one of them to."""


class StopRequest:
    """Whether a signal has asked this process to stop; `name` is the first signal's.

    Set `training` as soon as there is something to save. Before that a signal ends the process at once. Set `finished`
    when the training is done: then Ctrl-C does so again, and of other signals only a second SIGTERM.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.asked_at = 0.0
        self.training = False
        self.finished = False
        self.launcher_handler: Callable[[], object] | None = None

    def __bool__(self) -> bool:
        return self.name is not None

    def check(self, ranks: int = 1) -> None:
        """Raise `Stopped` if a signal has asked for it; to be called where waiting takes long, or forever, as for data.
        If other ranks wait for this one to finish the step, a `UserError` some time after the signal."""
        if self and ranks == 1:
            raise Stopped
        if self and time.monotonic() - self.asked_at >= _LATE_SECONDS:
            raise UserError(f"{self.name}: this rank waits for data and cannot finish the step; see why nothing comes")

    def call_launcher(self) -> None:
        """Call the scheduler launcher's own signal handler, if we intercepted its signal.

        In the first task it requeues the job and ends the process, or refuses (a `UserError`) as the job has timed out
        too often. In others it returns: they wait to be ended, because Slurm may end the whole job when a task ends.
        """
        if self.launcher_handler is None:
            return
        way_out = "everything is saved: resume with the same run_dir"
        # The launcher's own class of errors may not be importable here.
        with refusing("hydra.launcher.max_num_timeout: the job ends", Exception, use=way_out):
            self.launcher_handler()
        time.sleep(_REQUEUE_SECONDS)


@contextmanager
def stop_requests(answer: str = "stopping when this step is done and saved") -> Iterator[StopRequest]:
    """Catch SIGTERM, SIGINT, SIGHUP (unless `nohup` made it ignored) and the warnings of a scheduler or its launcher.

    The first one is answered by a line. A second Ctrl-C or SIGTERM ends the process at once. Outside the main
    thread, where Python catches no signals, nothing is caught.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    warnings = scheduler.warning_signals()
    numbers = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *warnings}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        numbers -= {signal.SIGHUP}
    before = {number: signal.getsignal(number) for number in numbers}
    terminated: list[float] = []

    def handle(number: int, frame: FrameType | None) -> None:
        former = before[signal.Signals(number)]
        if not request.training:
            if callable(former):
                if former is end_import:
                    # The tools' own handler may end the process without the cleanup.
                    raise KeyboardInterrupt
                former(number, frame)
            elif former != signal.SIG_IGN:
                # Exit as the bare signal would, but run the cleanup.
                raise SystemExit(128 + number)
            return
        if number == signal.SIGINT and (request or request.finished):
            raise KeyboardInterrupt
        if number == signal.SIGTERM:
            terminated.append(time.monotonic())
            if terminated[-1] - terminated[0] > _ECHO_SECONDS:
                _say("interrupted: SIGTERM again ended this at once")
                raise SystemExit(128 + number)
        if request.finished:
            return
        if scheduler.is_task() and number in warnings and callable(former):
            request.launcher_handler = partial(former, number, None)
        if not request:
            request.name, request.asked_at = signal.Signals(number).name, time.monotonic()
            # torchrun forwards only the first one.
            alone = "TORCHELASTIC_RUN_ID" not in os.environ and request.name in ("SIGINT", "SIGTERM")
            again = f"; {'Ctrl-C' if number == signal.SIGINT else request.name} again ends at once" if alone else ""
            _say(f"{request.name}: {answer}{again}")

    hook = sys.unraisablehook
    for number in before:
        signal.signal(number, handle)
    sys.unraisablehook = partial(_send_again, hook)
    try:
        yield request
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


def _send_again(hook: Callable[[sys.UnraisableHookArgs], object], lost: sys.UnraisableHookArgs) -> None:
    """What a handler raises in a destructor or in a weak reference's callback is lost; `hook` gets all else."""
    number = {KeyboardInterrupt: signal.SIGINT, SystemExit: signal.SIGTERM}.get(lost.exc_type)
    if number is None:
        hook(lost)
    else:
        threading.Timer(_LOST_SECONDS, os.kill, (os.getpid(), number)).start()


def _say(line: str) -> None:
    """Print it at once: a step may take long, and a user who sees nothing presses Ctrl-C again."""
    if is_first_of_node():
        say_at_once(f"\n{line}")
