"""What a sweep of learning rates says."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pycls_fast import build
from pycls_fast.config import RunConfig, load_config
from pycls_fast.errors import UserError
from pycls_fast.parallel import World
from pycls_fast.train.tasks import lr_range
from pycls_fast.train.tasks.lr_range import interpret, lr_range_test, smooth

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


def test_smoothing_of_a_constant_is_the_constant() -> None:
    assert smooth([3.0] * 20) == pytest.approx(np.full(20, 3.0))
    noisy = smooth([1.0, 3.0] * 50)
    assert noisy[20:] == pytest.approx(np.full(80, 2.0), abs=0.2)


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    verdict = interpret(RATES, [curve(rate) for rate in RATES])
    with pytest.raises(UserError, match=r"^output: .* could not be written \(Is a directory\)$"):
        lr_range._draw(tmp_path, "title", verdict, RATES, [curve(rate) for rate in RATES])


@pytest.mark.parametrize(
    ("overrides", "compiled", "training"),
    [
        ([], "off", "model"),
        (["speed=reference"], "off", "off"),
        (["speed.compile=blocks"], "blocks", "blocks"),
        # Which is as good as asking for it.
        (["speed.compile_mode=max-autotune-no-cudagraphs"], "model", "model"),
        (["speed.gelu=polynomial"], "model", "model"),
    ],
)
def test_a_sweep_compiles_what_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], compiled: str, training: str
) -> None:
    class Built(Exception): ...

    chosen: list[str] = []

    def note(config: RunConfig, world: World, display: Any) -> None:
        chosen.append(build.switches(config, world.device).compile)
        raise Built

    monkeypatch.setattr(build.switch_values, "has_compiler", lambda kind: True)
    monkeypatch.setattr(lr_range, "build_parts", note)
    config = load_config("vit_s16", ["data=synthetic", "speed=fast", "precision=amp_bf16", *overrides])
    assert build.switches(config, torch.device("cpu")).compile == training
    with pytest.raises(Built):
        lr_range_test(config, steps=10, lr_min=1e-4, lr_max=1e-2, output=str(tmp_path))
    assert chosen == [compiled]


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
