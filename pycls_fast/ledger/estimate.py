"""Roughly how long the rest of a ledger takes, if every arm is as fast as the first."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass

from pycls_fast.ledger.plan import Arm
from pycls_fast.ledger.runner import Ledger

# Two passes of a batch in float64, in training steps; explicit attention and small chunks make them slow.
_FLOAT64_STEPS = 10
# `mode=gradients` by default: half of them to warm up.
_GRADIENT_STEPS = 40


@dataclass(frozen=True)
class Pace:
    """How long the parts of the work take, in seconds.

    Attributes:
        start: a process, apart from its steps: imports, building, writing.
        step: a training step on images that are on the device.
        fed_step: a training step together with the loading of its images.
        core_seconds: what a fed step takes of the processor, over all its cores.
        cores: number of cores.
        steps: training steps of a run.
        evaluation_steps: as many steps take as long as all evaluations of a run.
        compiling: what a process of an arm takes longer because it is compiled.
        compiled: names of the arms that are.
    """

    start: float
    step: float
    fed_step: float
    core_seconds: float
    cores: int
    steps: int
    evaluation_steps: float = 0.0
    compiling: float = 0.0
    compiled: Set[str] = frozenset()

    def process(self, arm: Arm) -> float:
        """A process of an arm, apart from its steps."""
        return self.start + (self.compiling if arm.name in self.compiled else 0.0)


def estimate(ledger: Ledger, pace: Pace) -> dict[str, float]:
    """Seconds by kind of measurement ("timings", "rounding", ...) for what the folder does not have yet."""
    return {
        "timings": _timings(ledger, pace),
        "rounding": _rounding(ledger, pace),
        "gradients": _gradients(ledger, pace),
        "training": _training(ledger, pace),
    }


def _timings(ledger: Ledger, pace: Pace) -> float:
    s, selection = ledger.settings, ledger.selection
    turn = max(s.steps * pace.step, s.seconds) + max(s.warmup_steps * pace.step, s.seconds / 2)
    pieces = [(arm, number) for number in range(s.rounds) for arm in selection.runnable()]
    pieces += [(arm, 0) for arm in selection.alone()]
    missing = [arm for arm, number in pieces if not ledger.folder.timing_file(arm, number).is_file()]
    return sum(pace.process(arm) + turn for arm in missing)


def _rounding(ledger: Ledger, pace: Pace) -> float:
    steps = ledger.settings.numerics_steps
    if steps is None:
        return 0.0
    missing = [arm for arm in ledger.with_rounding() if not ledger.folder.numerics_file(arm).is_file()]
    return sum(pace.process(arm) + (steps + _FLOAT64_STEPS) * pace.fed_step for arm in missing)


def _gradients(ledger: Ledger, pace: Pace) -> float:
    first = ledger.selection.arms()[0]
    if not ledger.settings.gradients or ledger.folder.gradients_file(first).is_file():
        return 0.0
    return pace.start + _GRADIENT_STEPS * pace.fed_step


def _training(ledger: Ledger, pace: Pace) -> float:
    """Training time: concurrent runs share the cores, which are busy with loading even if a GPU computes."""
    runs = [(arm, seed) for seed in ledger.seeds() for arm in ledger.selection.runnable()]
    missing = [arm for arm, seed in runs if not (ledger.folder.run_dir(arm, seed) / "summary.json").is_file()]
    if not missing:
        return 0.0
    steps = pace.steps + pace.evaluation_steps
    starting = sum(map(pace.process, missing)) / len(missing)
    by_clock = math.ceil(len(missing) / ledger.settings.jobs) * (starting + steps * pace.fed_step)
    by_cores = len(missing) * (starting + steps * pace.core_seconds) / pace.cores
    return max(by_clock, by_cores)
