"""The training runs of a ledger: which one starts when, on which GPUs, what its failure means, and how far it is."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pycls_fast.config.ladder import Variant
from pycls_fast.ledger.ladder.processes import Process, ProcessResult
from pycls_fast.train.folder import RunFolder

_EVERY_SECONDS = 60.0

FAILED = "failed.json"
"""Why a training failed, in its folder: a result, which is not tried again."""


@dataclass(frozen=True)
class TrainingRun:
    """A training run that waits for its turn; `alone` lets no other one run at the same time."""

    variant: Variant
    seed: int
    folder: Path
    alone: bool = False

    def __str__(self) -> str:
        return f"{self.variant.name}: training, seed {self.seed}"

    @property
    def is_done(self) -> bool:
        """Whether an earlier start has finished it."""
        return (self.folder / "summary.json").is_file() or (self.folder / FAILED).is_file()


@dataclass
class _Running:
    run: TrainingRun
    process: Process
    devices: list[str]
    # Whether another run was there at some time.
    shared: bool


@dataclass
class Trainings:
    """Training runs of a ledger, `jobs` at a time; on CUDA each has GPUs of its own.

    `devices` are the CUDA devices to divide among them, empty if there is no need to. A run that lacked memory while
    others ran is started once more without them, after all others.
    """

    runs: Sequence[TrainingRun]
    jobs: int
    devices: Sequence[str]
    start: Callable[[TrainingRun, Sequence[str]], Process]
    finished: Callable[[Process], ProcessResult | None]
    done: Callable[[TrainingRun, ProcessResult], None]
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self._waiting, self._running, self._free = deque(self.runs), list[_Running](), list(self.devices)
        self._watch_due = time.monotonic() + _EVERY_SECONDS

    def processes(self) -> list[Process]:
        """The runs that have been started and not ended."""
        return [running.process for running in self._running]

    def advance(self) -> bool:
        """Start what can start, take note of what has ended; returns whether any run is left."""
        while self._waiting and self._fits(self._waiting[0]):
            self._start(self._waiting.popleft())
        for running in list(self._running):
            finished = self.finished(running.process)
            if finished is not None:
                self._running.remove(running)
                self._free += running.devices
                self._end(running, finished)
        if time.monotonic() >= self._watch_due:
            self._watch_due = time.monotonic() + _EVERY_SECONDS
            for running in self._running:
                self.say(f"{running.run}: {reached(RunFolder(running.run.folder))}")
        return bool(self._waiting or self._running)

    def _fits(self, run: TrainingRun) -> bool:
        if not self._running:
            return True
        if run.alone or any(running.run.alone for running in self._running):
            return False
        has_devices = not self.devices or len(self._free) >= (run.variant.ranks or 1)
        return len(self._running) < self.jobs and has_devices

    def _start(self, run: TrainingRun) -> None:
        ranks = run.variant.ranks or 1
        devices, self._free = self._free[:ranks], self._free[ranks:]
        self._running.append(_Running(run, self.start(run, devices), devices, shared=False))
        for running in self._running:
            running.shared |= len(self._running) > 1

    def _end(self, running: _Running, finished: ProcessResult) -> None:
        run = running.run
        if finished.lacked_memory and running.shared:
            self.say(f"{run}: lacked memory while others ran; starting it once more by itself at the end")
            self._waiting.append(TrainingRun(run.variant, run.seed, run.folder, alone=True))
        else:
            self.done(run, finished)


def reached(folder: RunFolder) -> str:
    """The newest step in a run's metrics, with its epoch and loss."""
    for record in deque(folder.records("train"), maxlen=1):
        loss = "not finite" if record["loss"] is None else f"{record['loss']:.4f}"
        return f"epoch {record['epoch']:.2f}, step {record['step']}, loss {loss}"
    return "no step logged yet"
