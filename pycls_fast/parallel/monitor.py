"""Hang detection: when a rank makes no progress, print where every rank is and end the process.

A rank that waits in a collective does not know which rank is missing: when their timeout ends, gloo and NCCL name only
an operation. So each rank records what it is doing (`at`), a thread writes that to the rendezvous store as a
heartbeat, and a rank that has waited too long reads where the others are.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from pycls_fast.errors import first_line

_FOR_OTHERS = ", waiting for other ranks"
_LEFT = "has left the run"
_WAITING = ("torch/distributed", "torch/autograd/graph.py", "torch/nn/parallel/distributed.py")
# A rank in these modules reads or writes files and waits for nobody: the collectives are in other modules.
_FILES = "torch/distributed/checkpoint"


@dataclass(frozen=True)
class Heartbeat:
    """What a rank last said of itself.

    Attributes:
        doing: from `Monitor.at`.
        seconds: time since it began that.
        waited: for how many of these seconds every heartbeat found it waiting for other ranks; 0 if this one did not.
        function: where its main thread is.
        number: counted from 1.
    """

    doing: str
    seconds: float
    waited: float
    function: str
    number: int


def _interval(timeout_seconds: float) -> float:
    return min(max(timeout_seconds / 20, 0.1), 5.0)


def report_seconds(timeout_seconds: float) -> float:
    """How long after the timeout the report may come: twice four heartbeats, and some time for a busy machine."""
    return 8 * _interval(timeout_seconds) + 5.0


class Monitor:
    """Watches the progress of this rank's main thread; a context manager.

    Args:
        store: a connection to the store that the ranks share, only for the monitor's thread.
        timeout_seconds: how long all ranks may make no progress while they are at different places, or some wait for
            others. Ranks that are all at the same place may be compiling; the backend's own timeout decides whether
            they hang.
        end: called after the report; ends the process.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        timeout_seconds: float,
        end: Callable[[], None] = lambda: os._exit(1),
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout_seconds
        self._interval = _interval(timeout_seconds)
        self._end = end
        self._main = threading.get_ident()
        self._doing = ("starting", time.monotonic())
        # Time of the last heartbeat that did not find the main thread waiting for other ranks.
        self._not_waiting = time.monotonic()
        self._beats = 0
        self._stop = threading.Event()
        self._left = False
        self._thread = threading.Thread(target=self._watch, daemon=True, name="monitor")

    def at(self, doing: str) -> None:
        """Record what the main thread starts doing. Only an assignment: nothing is sent from here."""
        self._doing = (doing, time.monotonic())

    @property
    def doing(self) -> str:
        return self._doing[0]

    def __enter__(self) -> Monitor:
        self._thread.start()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._left = error is None
        self._stop.set()
        # The thread may be waiting for a store that is gone.
        self._thread.join(timeout=2 * self._interval)

    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            try:
                sent = self._send_heartbeat()
                # `_hangs` takes a while: if the monitor was stopped meanwhile, the main thread made progress.
                if sent.seconds >= self._timeout and self._hangs() and not self._stop.is_set():
                    self._report()
            except RuntimeError as error:
                said = f"rank {self._rank} has lost its connection to the other ranks' monitors"
                only = "if ranks hang, only the timeouts of NCCL and gloo end them"
                print(f"note: {said} ({first_line(error)}); {only}", file=sys.stderr, flush=True)
                return
        if self._left:
            # Ranks that still write their results do not hang. If the store is gone, so are the other ranks.
            with suppress(RuntimeError):
                self._set(Heartbeat(_LEFT, 0, 0, "", self._beats))

    def _set(self, heartbeat: Heartbeat) -> None:
        self._store.set(f"heartbeat/{self._rank}", json.dumps(asdict(heartbeat)))

    def _send_heartbeat(self) -> Heartbeat:
        doing, since = self._doing
        now = time.monotonic()
        function = _function(sys._current_frames().get(self._main))
        if not function.endswith(_FOR_OTHERS):
            self._not_waiting = now
        self._beats += 1
        heartbeat = Heartbeat(doing, now - since, now - max(since, self._not_waiting), function, self._beats)
        self._set(heartbeat)
        return heartbeat

    def _heartbeats(self) -> list[Heartbeat | None]:
        """The last heartbeat of each rank; None if it has not sent any."""
        keys = [f"heartbeat/{rank}" for rank in range(self._size)]
        return [Heartbeat(**json.loads(self._store.get(key))) if self._store.check([key]) else None for key in keys]

    def _hangs(self) -> bool:
        """Whether no rank makes progress and they are at different places or some wait for others, or one is silent."""
        last = self._heartbeats()
        stuck = [each for each in last if each and (each.doing == _LEFT or each.seconds >= self._timeout)]
        if len(stuck) == self._size:
            waited = [each.waited for each in stuck]
            waits_for_others = max(waited) >= self._timeout and min(waited) == 0
            if waits_for_others or len({each.doing for each in stuck} - {_LEFT}) > 1:
                return True
        # A rank that makes progress is slow, not lost; the backend's timeout limits how long others wait for it.
        return None in last or bool(self._silent(last))

    def _silent(self, before: Sequence[Heartbeat | None]) -> list[int]:
        """Ranks that have not left but have sent no heartbeat since those of `before`."""
        self._pause(4)
        silent = []
        for rank, (then, now) in enumerate(zip(before, self._heartbeats(), strict=True)):
            never_came = then is now is None
            has_stopped = then and now and then.number == now.number and now.doing != _LEFT
            if never_came or has_stopped:
                silent.append(rank)
        return silent

    def _report(self) -> None:
        # One rank prints; the others wait until it has.
        if self._store.add("reported", 1) == 1:
            silent = self._silent(self._heartbeats())
            print(*report(self._heartbeats(), silent, self._timeout), sep="\n", file=sys.stderr, flush=True)
        else:
            self._pause(8)
        self._end()

    def _pause(self, beats: int) -> None:
        for _ in range(beats):
            self._stop.wait(self._interval)
            self._send_heartbeat()


def report(heartbeats: Sequence[Heartbeat | None], silent: Sequence[int], timeout_seconds: float) -> list[str]:
    """The lines that show what each rank is doing or waiting for."""
    lines = [f"error: parallel.timeout_seconds: ranks have waited for others for {timeout_seconds:g} s; where each is:"]
    for rank, last in enumerate(heartbeats):
        if last is None:
            said = "has not reported yet"
        elif last.doing == _LEFT:
            said = _LEFT
        elif rank in silent:
            said = f"no sign of life; last seen at: {last.doing}"
        else:
            said = f"for {last.seconds:.0f} s: {last.doing}" + (f", in {last.function}" if last.function else "")
        lines.append(f"error:   rank {rank}: {said}")
    return lines


def _function(frame: FrameType | None) -> str:
    """A thread's innermost function, or the distributed operation in which it waits for other ranks."""
    if frame is None:
        return ""
    frames = [outer for outer, _ in traceback.walk_stack(frame)]
    waiting = [f for f in frames if any(part in f.f_code.co_filename for part in _WAITING)]
    waiting = [f for f in waiting if _FILES not in f.f_code.co_filename]
    if not waiting:
        return _name(frame)
    return _name(next((f for f in waiting if _WAITING[0] in f.f_code.co_filename), waiting[0])) + _FOR_OTHERS


def _name(frame: FrameType) -> str:
    parts = Path(frame.f_code.co_filename).parts
    return f"{frame.f_code.co_name} ({'/'.join(parts[-3:])}:{frame.f_lineno})"
