"""What a sweep of learning rates says."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pycls_fast.config import load_config
from pycls_fast.train.tasks import lr_range
from pycls_fast.train.tasks.lr_range import interpret, lr_range_test

RATES = np.geomspace(1e-6, 10, 141).tolist()


def curve(rate: float) -> float:
    """Falls fastest per factor at 1e-3, is lowest at about 0.1, and back above its start a little later."""
    return 2.3 - 1.5 / (1 + (1e-3 / rate) ** 2) + 40 * rate**3


def test_finds_the_steepest_place_and_the_divergence() -> None:
    verdict = interpret(RATES, [curve(rate) for rate in RATES])
    assert verdict.suggested is not None
    assert verdict.lowest is not None
    assert verdict.diverges is not None
    # Smoothing lags by some steps, each a factor of 1.12.
    assert 1e-3 < verdict.suggested < 4e-3
    assert 0.03 < verdict.lowest < 0.3
    assert verdict.lowest < verdict.diverges < 1.0


def test_a_loss_that_blows_up_diverges_there() -> None:
    rates = [rate for rate in RATES if rate < 0.02]
    verdict = interpret(rates, [*(curve(rate) for rate in rates[:-1]), math.nan])
    assert verdict.diverges == rates[-1]
    assert verdict.suggested is not None


def test_a_loss_that_never_falls_suggests_nothing() -> None:
    verdict = interpret(RATES, [1 + rate for rate in RATES])
    assert verdict.suggested is None
    assert verdict.diverges is not None
    assert interpret(RATES[:1], [math.inf]).suggested is None


@pytest.mark.slow
def test_the_rates_grow_with_the_batch_and_are_told_as_optim_lr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: list[dict[str, Any]] = []

    def note(step: Any, **changed: Any) -> Any:
        changes.append(changed)
        return dataclasses.replace(step, **changed)

    monkeypatch.setattr(lr_range, "replace", note)
    config = load_config(
        "vit_digits",
        [
            "data=synthetic", "data.image_size=16", "data.num_workers=0", "data.synthetic_train_images=24",
            "data.synthetic_classes=3", "data.global_batch_size=8", "optim.lr_batch_size=4", "runtime.progress=plain",
        ],
    )  # fmt: skip
    assert lr_range_test(config, steps=3, lr_min=1e-4, lr_max=1e-2, output=str(tmp_path)) == 0
    assert json.loads((tmp_path / "lr_find.json").read_text())["lr"] == pytest.approx([1e-4, 1e-3, 1e-2])
    (changed,) = changes
    assert [changed["schedule"](number) for number in range(3)] == pytest.approx([2e-4, 2e-3, 2e-2])
