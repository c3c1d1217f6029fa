"""Which steps are evaluated, and which evaluation is the best."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pycls_fast.config import load_config
from pycls_fast.files import step_of
from pycls_fast.train.folder import RunFolder
from pycls_fast.train.metrics import Clock
from pycls_fast.train.trackers import Board
from pycls_fast.train.validation import Evaluations, best_evaluation, summary_values
from tests.factories import save_checkpoint


@pytest.mark.parametrize(("every", "steps"), [(1, [22, 44, 66, 70]), (2, [44, 70]), (4, [70])])
def test_epochs_between_evaluations(tmp_path: Path, every: int, steps: list[int]) -> None:
    """And at the end."""
    config = load_config("vit_digits", ["data.root=x", f"runtime.eval_every_epochs={every}"])
    run: Any = SimpleNamespace(config=config, parts=SimpleNamespace(steps_per_epoch=22), total_steps=70)
    evaluations = Evaluations(run, Board(), lambda: None)
    assert [step for step in range(71) if evaluations.due(step)] == steps


def test_steps_between_evaluations(tmp_path: Path) -> None:
    """They replace the epochs."""
    config = load_config("vit_digits", ["data.root=x", "runtime.eval_every_steps=30"])
    run: Any = SimpleNamespace(config=config, parts=SimpleNamespace(steps_per_epoch=22), total_steps=70)
    evaluations = Evaluations(run, Board(), lambda: None)
    assert [step for step in range(71) if evaluations.due(step)] == [30, 60, 70]


def test_the_first_of_the_best() -> None:
    records = [
        {"top1": 10.0, "loss": 3.0},
        {"top1": 30.0, "loss": 2.0, "class_top1": None},
        {"top1": 30.0, "loss": 1.0},
        {"top1": 20.0, "loss": None, "class_top1": 40.0},
        {"top1": 20.0, "loss": 1.0, "class_top1": 40.0},
    ]
    assert best_evaluation(records, "top1") == 1
    assert best_evaluation(records, "loss") == 2
    assert best_evaluation(records, "class_top1") == 3
    assert best_evaluation([], "top1") is None
    assert best_evaluation([{"top1": 0.0, "loss": float("nan")}, {"top1": 0.0, "loss": 9.0}], "loss") == 1


def test_the_last_within_a_standard_error() -> None:
    """Of 64 images at 80% that is 5 points."""
    tops = [74.0, 70.0, 80.0, 74.9, 75.1, 74.5]
    records = [{"top1": top1, "loss": step, "count": 64, "step": step} for step, top1 in enumerate(tops, start=1)]
    assert best_evaluation(records, "top1") == 2
    assert best_evaluation(records, "top1", 1.0) == 4
    assert best_evaluation(records, "top1", 1.2) == 5
    assert best_evaluation(records, "loss", 1.0) == 0
    assert best_evaluation([{**records[0], "count": 10**9}, *records[1:]], "top1", 0.5) == 2


def test_few_images_that_are_all_right_have_an_error() -> None:
    records = [{"top1": top1, "count": 10} for top1 in (100.0, 90.0, 80.0)]
    assert best_evaluation(records, "top1", 1.5) == 1


@pytest.mark.parametrize(("metric", "best"), [("top1", 2), ("loss", 4)])
def test_the_best_is_one_for_the_link_and_the_summary(tmp_path: Path, metric: str, best: int) -> None:
    """By the metric of early stopping, and the first where several are as good."""
    folder = RunFolder(tmp_path)
    world = SimpleNamespace(size=1, device=torch.device("cpu"))
    run: Any = SimpleNamespace(
        folder=folder,
        parts=SimpleNamespace(
            step=SimpleNamespace(ema=None), complexity=SimpleNamespace(parameters=1, forward_flops=1)
        ),
        config=load_config("vit_digits", ["data.root=x", f"schedule.best_metric={metric}"]),
        world=world,
        total_steps=5,
        epoch=float,
        seconds=lambda: 1.0,
    )
    evaluations = Evaluations(run, Board(), lambda: None)
    for step, (top1, loss) in enumerate([(10.0, 3.0), (30.0, 2.0), (30.0, 1.5), (20.0, 1.0), (30.0, 1.0)], start=1):
        save_checkpoint({"step": step}, folder.checkpoints, step, keep=2)
        folder.add_record("eval", step, step, split="val", weights="model", count=9, top1=top1, loss=loss)
        evaluations.keep_if_best()
    assert step_of((folder.checkpoints / "best").resolve()) == best
    assert summary_values(run, evaluations.records(), Clock(), 1)["best"]["step"] == best
