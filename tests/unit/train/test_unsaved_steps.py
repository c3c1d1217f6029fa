"""Steps at which a checkpoint was due, but the loss of the interval before was not finite."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from pycls_fast.config import load_config
from pycls_fast.files import step_of
from pycls_fast.train import loop, train
from pycls_fast.train.health import DivergenceCheck
from pycls_fast.train.validation import Evaluations
from tests.unit.train.test_loop import SMALL


@pytest.fixture(autouse=True)
def _every_interval_has_an_image_that_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    check = DivergenceCheck.check

    def overflows(self: DivergenceCheck, done: int, loss: float, skipped: int, steps: int) -> None:
        check(self, done, loss, skipped, steps)
        self._loss = math.nan

    monkeypatch.setattr(DivergenceCheck, "check", overflows)


def run(tmp_path: Path, *overrides: str, status: int = 0) -> list[tuple[str, int]]:
    """Kind and step of the evaluations and checkpoints."""
    assert train(load_config("vit_digits", [*SMALL, f"run_dir={tmp_path}", *overrides])) == status
    records = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    return [(record["kind"], record["step"]) for record in records if record["kind"] in ("eval", "checkpoint")]


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_step_whose_evaluation_is_finite_is_saved(tmp_path: Path, asynchronous: str) -> None:
    found = run(tmp_path, f"runtime.checkpoint_async={asynchronous}", "runtime.checkpoint_every_steps=2")
    assert [step for kind, step in found if kind == "checkpoint"] == [3, 6]
    assert [step for kind, step in found if kind == "eval"] == [3, 6]
    best = json.loads((tmp_path / "summary.json").read_text())["best"]
    assert step_of((tmp_path / "checkpoints" / "best").resolve()) == best["step"]


def test_a_step_whose_evaluation_is_stopped_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As any step after which a run stops."""

    def stopped(self: Evaluations, done: int, weights: str) -> dict[str, str]:
        raise loop.Stopped

    monkeypatch.setattr(Evaluations, "_take", stopped)
    assert run(tmp_path, status=3) == [("checkpoint", 3)]
    assert "everything up to step 3 is saved" in capsys.readouterr().out


@pytest.mark.slow
def test_a_step_with_the_weights_of_the_last_checkpoint_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor is that tried at every step that is logged."""

    def all_skipped(self: DivergenceCheck, done: int, *numbers: Any) -> None:
        self._loss, self._weights_changed = 2.0, False

    monkeypatch.setattr(DivergenceCheck, "check", all_skipped)
    found = run(tmp_path, "runtime.checkpoint_every_steps=2")
    assert found == [("eval", 3), ("eval", 6), ("checkpoint", 6)]
    assert re.findall(r"step (\d) is not saved:", capsys.readouterr().out) == ["2", "3", "4"]
