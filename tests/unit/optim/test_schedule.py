"""The learning-rate curve against timm's, at every step and beyond the last."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from timm.scheduler import CosineLRScheduler, PolyLRScheduler, StepLRScheduler

from pycls_fast.optim.schedule import LrSchedule, Schedule

LR = 0.37
CURVES = [
    (50, 7, 0.1, 0.02),
    (20, 1, 0.5, 0.0),
    (31, 30, 0.001, 0.3),
    (12, 5, 0.25, 1.0),
    (9, 0, 0.0, 0.1),
    (40, 10, 0.0, 0.0),
    (1, 0, 0.0, 0.0),
]


def optimizer() -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)


@pytest.mark.parametrize("begin", ["warmup_end", "start"])
@pytest.mark.parametrize(("total", "warmup", "start", "final"), CURVES)
def test_the_rates_are_timms(total: int, warmup: int, start: float, final: float, begin: str) -> None:
    own = {"epochs": total, "warmup_epochs": warmup, "warmup_start_factor": start, "final_factor": final}
    shared = {"warmup_t": warmup, "warmup_lr_init": start * LR, "warmup_prefix": begin == "warmup_end"}
    length = total if begin == "start" else total - warmup
    pairs: list[tuple[str, dict[str, Any], Any]] = [
        ("cosine", {}, CosineLRScheduler(optimizer(), t_initial=length, lr_min=final * LR, **shared)),
        ("linear", {}, PolyLRScheduler(optimizer(), t_initial=length, power=1.0, lr_min=final * LR, **shared)),
        ("step", {"step_epochs": 4, "step_factor": 0.3}, StepLRScheduler(optimizer(), 4, 0.3, **shared)),
    ]
    for shape, keys, theirs in pairs:
        chosen = Schedule.choices()[shape](**own, curve_from=begin, **keys)
        ours = LrSchedule(chosen, LR, steps_per_epoch=1)
        for step in range(total + 5):
            assert ours(step) == pytest.approx(theirs._get_lr(step)[0], rel=1e-12, abs=1e-15), (shape, step)
