"""The training runs of a ledger: which one starts when, on which GPUs, and what its failure means."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pycls_fast.ledger.plan import Arm
from pycls_fast.ledger.processes import Process, ProcessResult
from pycls_fast.ledger.training_watch import TrainingWatch
from pycls_fast.train.run_folder import RunFolder

if TYPE_CHECKING:
    from pycls_fast.ledger.runner import Ledger


def training_name(arm: Arm, seed: int) -> str:
    """A training run as messages call it."""
    return f"{arm.name}: training, seed {seed}"


@dataclass(frozen=True)
class _Run:
    """A training run that waits for its turn; `alone` lets no other one run at the same time."""

    arm: Arm
    seed: int
    alone: bool = False


@dataclass
class _Running:
    run: _Run
    process: Process
    devices: list[str]
    # Whether another run was there at some time.
    shared: bool


class Trainings:
    """All training runs of a ledger, `jobs` at a time; on CUDA each has GPUs of its own.

    A run that lacked memory while others ran is started once more without them, after all others.

    Args:
        ledger: its settings, arms and folder; `untrained` is filled.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._reference = ledger.selection.arms()[0].name
        self._waiting = deque(_Run(arm, seed) for seed in ledger.seeds() for arm in ledger.selection.runnable())
        self._running: list[_Running] = []
        self._free = list(ledger.cuda_devices)
        self._watch = TrainingWatch(ledger.say)

    def processes(self) -> list[Process]:
        """The runs that have been started and not ended."""
        return [running.process for running in self._running]

    def advance(self) -> bool:
        """Start what can start, take note of what has ended; returns whether any run is left."""
        while self._waiting and self._fits(self._waiting[0]):
            self._start(self._waiting.popleft())
        for running in list(self._running):
            finished = self._ledger.finished(running.process)
            if finished is not None:
                self._running.remove(running)
                self._free += running.devices
                self._end(running, finished)
        runs = [running.run for running in self._running]
        self._watch.look((training_name(run.arm, run.seed), self._metrics(run)) for run in runs)
        return bool(self._waiting or self._running)

    def _metrics(self, run: _Run) -> Path:
        return RunFolder(self._ledger.folder.run_dir(run.arm, run.seed)).metrics

    def _fits(self, run: _Run) -> bool:
        if not self._running:
            return True
        if run.alone or any(running.run.alone for running in self._running):
            return False
        has_devices = not self._ledger.cuda_devices or len(self._free) >= run.arm.ranks
        return len(self._running) < self._ledger.settings.jobs and has_devices

    def _start(self, run: _Run) -> None:
        arm, seed = run.arm, run.seed
        if (self._ledger.folder.run_dir(arm, seed) / "summary.json").is_file():
            self._ledger.note_done(training=True)
        elif not {arm.name, self._reference} & set(self._ledger.untrained):
            devices, self._free = self._free[: arm.ranks], self._free[arm.ranks :]
            process = self._ledger.start_training(arm, seed, devices)
            self._running.append(_Running(run, process, devices, shared=False))
            for running in self._running:
                running.shared |= len(self._running) > 1

    def _end(self, running: _Running, finished: ProcessResult) -> None:
        arm, seed = running.run.arm, running.run.seed
        what = training_name(arm, seed)
        if finished.lacked_memory and running.shared:
            self._ledger.say(f"{what}: lacked memory while others ran; starting it once more by itself at the end")
            self._waiting.append(_Run(arm, seed, alone=True))
            return
        self._ledger.report(what, finished, training=True)
        if finished.status != 0:
            self._ledger.untrained[arm.name] = f"seed {seed}: {finished.reason()}"
            if arm.name == self._reference:
                self._ledger.say(f"nothing to compare with: no training is started without '{self._reference}'")
