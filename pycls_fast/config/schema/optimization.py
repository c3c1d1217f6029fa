"""Keys of what is minimised, and when: `loss` and `schedule`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pycls_fast.choice import Section
from pycls_fast.values import (
    EpochsOrAuto,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    PositiveIntOrAuto,
    Probability,
    Rate,
)


class Loss(Section):
    """The training loss. Evaluations report the same one without smoothing, threshold and weights."""

    name: Literal["cross_entropy", "bce"] = "cross_entropy"
    """Softmax cross-entropy, or binary cross-entropy with a sigmoid for each class."""
    label_smoothing: Rate = 0.0
    """The share of the target that is spread over all classes."""
    bce_reduction: Literal["mean", "sum"] = "mean"
    """bce: average the classes as timm does, or add them as big_vision does."""
    bce_threshold: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    """bce: classes with a larger share of a mixed image get the target 1, all others 0; null: the share is the
    target."""
    class_weights: Literal["none", "balanced"] = "none"
    """balanced: each image counts by the mean number of images per class divided by its own class's."""


class Schedule(Section):
    """Learning rate per step: a linear warm-up, then a curve."""

    name: Literal["cosine", "linear", "step", "constant"] = "cosine"
    """The curve: cosine and linear fall to final_factor, step is multiplied by step_factor after every step_epochs
    epochs."""
    epochs: PositiveIntOrAuto = 100
    """The length of the run; auto: 160 steps, but 10 to 50 epochs."""
    max_steps: NonNegativeInt | None = None
    """Stop after so many steps, without changing the curve; null: at the end of the epochs; 0: only fit the head and
    evaluate (head=probe)."""
    warmup_epochs: EpochsOrAuto = 5.0
    """The length of the warm-up; auto: a tenth of the epochs, at most 2."""
    warmup_start_factor: Probability = 0.0
    """The learning rate at the start of the warm-up, as a share of optim.lr."""
    final_factor: Probability = 0.0
    """The learning rate at the end, as a share of optim.lr."""
    curve_from: Literal["warmup_end", "start"] = "warmup_end"
    """Where the curve begins: where the warm-up ends, or at the first step, where the warm-up replaces its beginning
    (timm; nearly pycls')."""
    step_epochs: PositiveInt | None = None
    """The epochs between two steps of the curve `step`."""
    step_factor: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """The factor of each step of the curve `step`."""
    early_stopping_evals: PositiveInt | None = None
    """End the run when the best evaluation is so many evaluations old; null: never."""
    best_metric: Literal["top1", "class_top1", "loss"] = "top1"
    """What makes an evaluation the best one, also for checkpoints/best and summary.json: top-1, the mean of the
    classes' accuracies, or the loss. Of equal ones it is the first."""
    best_tolerance: NonNegativeFloat = 0.0
    """Of evaluations whose accuracy is within so many of its standard errors of the highest, the last is the best one:
    few validation images tell good epochs from lucky ones badly."""
