"""Learning rate as a pure function of the step, without state to save or restore."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from pycls_fast.choice import Choice
from pycls_fast.values import (
    EpochsOrAuto,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    PositiveIntOrAuto,
    Probability,
)


class Schedule(Choice, key="schedule", default="cosine"):
    """Learning rate per step: a linear warm-up, then a curve."""

    name: str = ""
    """The curve."""
    epochs: PositiveIntOrAuto = 100
    """The length of the run; auto: 160 steps, but 10 to 50 epochs."""
    max_steps: NonNegativeInt | None = None
    """Stop after this many steps, without changing the curve; null: at the end of the epochs; 0: only fit the head and
    evaluate (head=probe)."""
    warmup_epochs: EpochsOrAuto = 5.0
    """The length of the warm-up; auto: a tenth of the epochs, at most 2."""
    warmup_start_factor: Probability = 0.0
    """The learning rate at the start of the warm-up, as a share of optim.lr."""
    final_factor: Probability = 0.0
    """The learning rate at the end, as a share of optim.lr, for curves that fall to it (cosine, linear)."""
    curve_from: Literal["warmup_end", "start"] = "warmup_end"
    """Where the curve begins: where the warm-up ends, or at the first step, where the warm-up replaces its beginning
    (timm; nearly pycls')."""
    early_stopping_evals: PositiveInt | None = None
    """End the run after this many evaluations without a new best one; null: never."""
    best_metric: Literal["top1", "class_top1", "map", "loss"] = "top1"
    """What makes an evaluation the best one, also for checkpoints/best and summary.json: top-1, the mean of the
    classes' accuracies, that of their average precisions (where images have several labels), or the loss. The first of
    equal ones counts."""
    best_tolerance: NonNegativeFloat = 0.0
    """Among evaluations whose accuracy is within this many of its standard errors of the highest, the last is the best
    one: few validation images cannot tell good epochs from lucky ones."""

    def curve(self, step: int, steps: int, steps_per_epoch: int) -> float:
        """The share of the highest learning rate at `step` of `steps`, both counted from where the curve begins."""
        raise NotImplementedError


class Cosine(Schedule, name="cosine"):
    """Half a period of a cosine (Loshchilov and Hutter, 2017, without restarts)."""

    def curve(self, step: int, steps: int, steps_per_epoch: int) -> float:
        left = 0.5 * (1.0 + math.cos(math.pi * _progress(step, steps)))
        return self.final_factor + (1.0 - self.final_factor) * left


class Linear(Schedule, name="linear"):
    """A straight line."""

    def curve(self, step: int, steps: int, steps_per_epoch: int) -> float:
        left = 1.0 - _progress(step, steps)
        return self.final_factor + (1.0 - self.final_factor) * left


class Steps(Schedule, name="step"):
    """Multiplied by step_factor after every step_epochs epochs (He et al., 2016)."""

    step_epochs: PositiveInt = 30
    """The epochs between two steps of the curve."""
    step_factor: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """The factor of each step of the curve."""

    def curve(self, step: int, steps: int, steps_per_epoch: int) -> float:
        return float(self.step_factor ** (step // (self.step_epochs * steps_per_epoch)))


class Constant(Schedule, name="constant"):
    """The highest learning rate to the end."""

    def curve(self, step: int, steps: int, steps_per_epoch: int) -> float:
        return 1.0


def _progress(step: int, steps: int) -> float:
    return min(step / max(steps, 1), 1.0)


@dataclass(frozen=True)
class LrSchedule:
    """The learning rates of a run, whatever `max_steps` says.

    With `curve_from=start` the warm-up replaces the curve's beginning, as in timm, so that the rate after the warm-up
    is a little below `lr` (pycls multiplies the two, which makes the warm-up's rates a little smaller).
    """

    schedule: Schedule
    lr: float
    """The highest one, reached at step `warmup_steps`."""
    steps_per_epoch: int

    @property
    def curve_steps(self) -> int:
        """The length of the whole curve; the last step is one short of the final value."""
        return self.schedule.epochs * self.steps_per_epoch

    @property
    def warmup_steps(self) -> int:
        return round(self.schedule.warmup_epochs * self.steps_per_epoch)

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            start = self.schedule.warmup_start_factor
            return self.lr * (start + (1.0 - start) * step / self.warmup_steps)
        begin = 0 if self.schedule.curve_from == "start" else self.warmup_steps
        return self.lr * self.schedule.curve(step - begin, self.curve_steps - begin, self.steps_per_epoch)
