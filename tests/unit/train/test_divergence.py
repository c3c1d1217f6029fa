"""Which intervals of steps without finite gradients end a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pycls_fast.config import load_config
from pycls_fast.errors import UserError
from pycls_fast.train.divergence import DivergenceCheck

NAN = float("nan")
ALL, SOME, NONE = (2.0, 10, 10), (2.0, 9, 10), (2.0, 0, 10)
CONSTANT = ("precision=amp_fp16", "precision.loss_scale=1024")


@pytest.mark.parametrize(
    ("overrides", "intervals", "ends", "key"),
    [
        # A constant scale may be too high.
        (CONSTANT, [ALL, ALL], 2, "precision.loss_scale"),
        (CONSTANT, [(2.0, 19, 19), (2.0, 1, 1)], 2, "precision.loss_scale"),
        (CONSTANT, [(NAN, 20, 20)], 1, "precision.loss_scale"),
        (CONSTANT, [NONE, ALL, NONE, ALL, NONE, ALL, ALL], 7, "precision.loss_scale"),
        # Now and then a step is skipped in any run.
        (CONSTANT, [(2.0, 19, 19), NONE, (2.0, 19, 19)], None, ""),
        (CONSTANT, [ALL, SOME, ALL, SOME], None, ""),
        (CONSTANT, [SOME] * 10, None, ""),
        # A dynamic one falls until it fits, or to its floor.
        (("precision=amp_fp16",), [ALL] * 10, None, ""),
        (("precision=amp_fp16", "precision.loss_scale_floor=2048"), [NONE], 1, "precision.loss_scale_floor"),
        (("precision=fp32",), [NONE, (NAN, 0, 10)], 2, "optim.lr"),
        (("precision=fp32",), [NONE, (2.0, 1, 10)], 2, "optim.lr"),
        (("precision=amp_bf16",), [NONE] * 10, None, ""),
    ],
)
def test_the_interval_that_ends_a_run(
    overrides: tuple[str, ...], intervals: list[tuple[float, int, int]], ends: int | None, key: str
) -> None:
    scaled = "precision=amp_fp16" in overrides
    scaler = SimpleNamespace(is_enabled=lambda: scaled, get_scale=lambda: 1024.0)
    run: Any = SimpleNamespace(
        config=load_config("vit_digits", overrides), step=SimpleNamespace(scaler=scaler, watchdog=None)
    )
    check = DivergenceCheck(run)
    for number, (loss, skipped, steps) in enumerate(intervals, start=1):
        if number == ends:
            with pytest.raises(UserError) as caught:
                check.check(10 * number, loss, skipped, steps)
            assert caught.value.lines[0].startswith(f"{key}: ")
        else:
            check.check(10 * number, loss, skipped, steps)
