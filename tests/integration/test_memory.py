"""Whole runs that keep less for the backward pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from pycls_fast.config import load_config
from pycls_fast.train import train
from tests.integration.runs import TINY, records

pytestmark = pytest.mark.slow


def losses(digits: Path, run_dir: Path, *overrides: str) -> list[float]:
    """Of ten steps with drop-path and two microbatches."""
    common = [*TINY, f"data.root={digits}", f"run_dir={run_dir}", "schedule.max_steps=10", "model.drop_path=0.3"]
    common += ["schedule.warmup_epochs=0", "optim.accumulation_steps=2"]
    settings = [*common, "data.num_workers=0", "optim.lr=5e-3", *overrides]
    assert train(load_config("vit_digits", settings)) == 0
    return [record["loss"] for record in records(run_dir, "train")]


def test_recomputing_and_offloading_change_no_loss(digits: Path, tmp_path: Path) -> None:
    expected = losses(digits, tmp_path / "off")
    assert len(expected) == 10
    assert expected[-1] < 0.97 * expected[0]
    for way in (("speed.recompute=selective",), ("speed.recompute=full", "speed.activation_offload=cpu")):
        assert losses(digits, tmp_path / str(len(way)), *way) == expected
    skipped = losses(digits, tmp_path / "skip", "speed.drop_path_compute=skip")
    assert skipped == pytest.approx(expected, rel=1e-4)


def test_compression_stays_near(digits: Path, tmp_path: Path) -> None:
    expected = losses(digits, tmp_path / "off")
    found = losses(digits, tmp_path / "on", "speed.activation_compression=8bit")
    assert found[0] == expected[0]
    assert found != expected
    assert found == pytest.approx(expected, rel=0.02)
