"""The learning-rate curve against timm's, at every step and beyond the last."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from timm.scheduler import CosineLRScheduler, PolyLRScheduler, StepLRScheduler

from pycls_fast.optim.schedule import LrSchedule, Schedule

LR = 0.37
CURVES = [(50, 7, 0.1, 0.02), (20, 1, 0.5, 0.0), (31, 30, 0.001, 0.3), (12, 5, 0.25, 1.0)]


def schedule(
    lr: float, total: int, warmup: int = 0, start: float = 0.0, final: float = 0.0, shape: str = "cosine", **keys: Any
) -> LrSchedule:
    """A run of one step per epoch."""
    chosen = Schedule.choices()[shape]
    shared = {"epochs": total, "warmup_epochs": warmup, "warmup_start_factor": start, "final_factor": final}
    return LrSchedule(chosen(**shared, **keys), lr, steps_per_epoch=1)


def optimizer(lr: float = LR) -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


@pytest.mark.parametrize(
    ("total", "warmup", "start", "final"), [*CURVES, (9, 0, 0.0, 0.1), (40, 10, 0.0, 0.0), (1, 0, 0.0, 0.0)]
)
def test_timm(total: int, warmup: int, start: float, final: float) -> None:
    ours = schedule(LR, total, warmup, start, final)
    theirs = CosineLRScheduler(
        optimizer(),
        t_initial=total - warmup,
        lr_min=final * LR,
        warmup_t=warmup,
        warmup_lr_init=start * LR,
        warmup_prefix=True,
    )
    for step in range(total + 5):
        assert ours(step) == pytest.approx(theirs._get_lr(step)[0], rel=1e-12, abs=1e-15), step


@pytest.mark.parametrize(("total", "warmup", "start", "final"), CURVES)
def test_timm_without_a_prefix_counts_the_curve_from_the_start(
    total: int, warmup: int, start: float, final: float
) -> None:
    ours = schedule(LR, total, warmup, start, final, curve_from="start")
    theirs = CosineLRScheduler(
        optimizer(), t_initial=total, lr_min=final * LR, warmup_t=warmup, warmup_lr_init=start * LR
    )
    for step in range(total + 5):
        assert ours(step) == pytest.approx(theirs._get_lr(step)[0], rel=1e-12, abs=1e-15), step
    if final < 1:
        assert ours(warmup) < schedule(LR, total, warmup, start, final)(warmup) == LR


@pytest.mark.parametrize("begin", ["warmup_end", "start"])
@pytest.mark.parametrize(("total", "warmup", "start", "final"), CURVES)
def test_lines_and_steps_are_timms(total: int, warmup: int, start: float, final: float, begin: str) -> None:
    shared = {"warmup_t": warmup, "warmup_lr_init": start * LR, "warmup_prefix": begin == "warmup_end"}
    length = total if begin == "start" else total - warmup
    pairs = [
        (
            schedule(LR, total, warmup, start, final, shape="linear", curve_from=begin),
            PolyLRScheduler(optimizer(), t_initial=length, power=1.0, lr_min=final * LR, **shared),
        ),
        (
            schedule(LR, total, warmup, start, shape="step", curve_from=begin, step_epochs=4, step_factor=0.3),
            StepLRScheduler(optimizer(), decay_t=4, decay_rate=0.3, **shared),
        ),
    ]
    for ours, theirs in pairs:
        for step in range(total):
            assert ours(step) == pytest.approx(theirs._get_lr(step)[0], rel=1e-12, abs=1e-15), step
