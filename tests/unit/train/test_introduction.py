"""What is told at the start of a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.data.sources.arrays import SyntheticImages
from pycls_fast.plan.race import Race
from pycls_fast.train import start
from pycls_fast.train.start import _notes

SOURCES = {"train": SyntheticImages(4, 8, 2, 0)}


@pytest.fixture(autouse=True)
def race(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine both formats are equally fast."""
    monkeypatch.setattr(start, "race", lambda config: Race("fp32", 1.0, None, 0.0))


@pytest.mark.parametrize(
    ("precision", "ratio", "told"),
    [
        ("fp32", 3.0, "precision: a step takes 3 times as long as with precision=amp_bf16 on this CPU"),
        ("amp_bf16", 0.025, "precision: a step takes 40 times as long as with precision=fp32 on this CPU"),
        ("fp32", 1.9, None),
        ("bf16", 0.6, None),
    ],
)
def test_a_precision_that_is_slow_here(
    monkeypatch: pytest.MonkeyPatch, precision: str, ratio: float, told: str | None
) -> None:
    monkeypatch.setattr(start, "race", lambda config: Race("fp32", ratio, None, 0.0))
    config = load_config("vit_digits", [f"precision={precision}", "speed.compile=off"])
    world = SimpleNamespace(size=1, data_size=1, device=torch.device("cpu"), is_main=True)
    switches = build.switches(config, world.device)
    run: Any = SimpleNamespace(config=config, world=world, parts=SimpleNamespace(speed=switches, sources=SOURCES))
    notes = list(_notes(run))
    assert notes == [] if told is None else notes[0].startswith(told)


@pytest.mark.parametrize(("counts", "told"), [((60, 20), 0), ((61, 20), 1), ((10, 0), 1)])
def test_unbalanced_classes_are_told(counts: tuple[int, int], told: int) -> None:
    config = load_config("vit_digits", ["precision=fp32", "speed.compile=off"])
    world = SimpleNamespace(size=1, data_size=1, device=torch.device("cpu"), is_main=True)
    switches = build.switches(config, world.device)
    train = SimpleNamespace(labels=np.repeat([0, 1], counts), classes=("a", "b"))
    run: Any = SimpleNamespace(
        config=config, world=world, parts=SimpleNamespace(speed=switches, sources={"train": train})
    )
    assert [note.startswith(f"classes have {counts[1]} to {counts[0]} images") for note in _notes(run)] == [True] * told


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["precision=fp32"], []),
        (["precision=fp32", "speed.compile=model"], ["speed.compile: compiling"]),
        (["precision=amp_bf16", "speed.compile=off"], []),
        (["precision=fp8", "precision.fp8_emulate=true"], []),
        (["precision=fp16_master"], ["precision: fp16_master computes in float16, which CPUs do slowly"]),
        # 0.99 ** 100 is 0.366.
        (
            ["precision=fp32", "optim.ema_decay=0.99", "optim.ema_warmup=false"],
            ["optim.ema_decay: after all 100 steps the initial weights are still 37% of the average"],
        ),
        (["precision=fp32", "optim.ema_decay=0.95", "optim.ema_warmup=false"], []),
        (["precision=fp32", "optim.ema_decay=0.99"], []),
    ],
)
def test_notes(overrides: list[str], told: list[str]) -> None:
    config = load_config("vit_digits", overrides)
    switches = build.switches(config, torch.device("cpu"))
    world = SimpleNamespace(size=1, data_size=1, device=torch.device("cpu"), is_main=True)
    run: Any = SimpleNamespace(
        config=config, total_steps=100, world=world, parts=SimpleNamespace(speed=switches, sources=SOURCES)
    )
    for note, begins in zip(_notes(run), told, strict=True):
        assert note.startswith(begins)
