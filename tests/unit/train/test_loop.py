"""What the loop does around its steps: what counts as training time, and what it does not wait for."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pycls_fast.config import load_config
from pycls_fast.data.batch import Batch
from pycls_fast.errors import UserError
from pycls_fast.files import checkpoints, step_of
from pycls_fast.train import loop, saving, train
from pycls_fast.train.evaluate import Predictions
from pycls_fast.train.folder import RunFolder
from pycls_fast.train.health import DivergenceCheck
from pycls_fast.train.loop import Loop
from pycls_fast.train.metrics import Clock, StepMemory
from pycls_fast.train.run import Run
from pycls_fast.train.validation import Evaluations
from pycls_fast.train.validation import objective as objective_of
from tests.integration.runs import TINY

# Three steps an epoch, two epochs.
SMALL = (
    *TINY, "data=synthetic", "data.synthetic_train_images=192", "data.synthetic_val_images=64", "data.num_workers=0",
    "data.synthetic_classes=10",
)  # fmt: skip


def run(tmp_path: Path, *overrides: str) -> list[dict[str, Any]]:
    assert train(load_config("vit_digits", [*SMALL, f"run_dir={tmp_path}", *overrides])) == 0
    return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_each_run_of_a_process_has_its_own_peak_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []

    def peak(memory: StepMemory) -> int:
        steps.append("read")
        return 1

    monkeypatch.setattr(loop, "reset_memory_peak", lambda device: steps.append(f"reset {device}"))
    monkeypatch.setattr(StepMemory, "bytes", peak)
    run(tmp_path, "schedule.max_steps=1")
    run(tmp_path, "schedule.max_steps=2")
    assert [step for step, before in zip(steps, ["", *steps], strict=False) if step != before] == [
        "reset cpu", "read", "reset cpu", "read",
    ]  # fmt: skip


@pytest.mark.slow
def test_logging_counts_and_a_clean_run_exchanges_no_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add, reports = RunFolder.add_record, []

    def slowly(self: RunFolder, *arguments: Any, **values: Any) -> dict[str, Any]:
        time.sleep(0.1)
        return add(self, *arguments, **values)

    monkeypatch.setattr(RunFolder, "add_record", slowly)
    monkeypatch.setattr(Loop, "_report_damage", lambda self, done: reports.append(done))
    records = run(tmp_path, "runtime.checkpoint_async=false")
    steps = {record["step"]: record["step_seconds"] for record in records if record["kind"] == "train"}
    # The interval after an evaluation begins after it.
    assert min(steps[step] for step in (2, 3, 5, 6)) >= 0.1
    assert reports == [3, 6]


@pytest.mark.slow
def test_the_rates_are_those_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 3 s that wait 1 s for their data; checkpoints and evaluations take long, and are not counted."""
    now = 0.0
    microbatches, add_step, save, take = Loop._microbatches, Clock.add_step, Run.save, Evaluations.take

    def late(self: Loop) -> Iterator[Batch]:
        nonlocal now
        for batch in microbatches(self):
            now += 1.0
            yield batch

    def compute(self: Clock, images: int) -> None:
        nonlocal now
        now += 3.0
        add_step(self, images)

    def save_slowly(self: Run, step: int) -> None:
        nonlocal now
        now += 50.0
        save(self, step)

    def take_long(self: Evaluations, done: int) -> dict[str, str]:
        nonlocal now
        now += 100.0
        return take(self, done)

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(Loop, "_microbatches", late)
    monkeypatch.setattr(Clock, "add_step", compute)
    monkeypatch.setattr(Run, "save", save_slowly)
    monkeypatch.setattr(Evaluations, "take", take_long)
    steps = [record for record in run(tmp_path, "runtime.checkpoint_every_steps=2") if record["kind"] == "train"]
    names = ("step_seconds", "images_per_second", "data_wait_fraction")
    rates = [tuple(record[name] for name in names) for record in steps]
    assert rates == [pytest.approx((4.0, 16.0, 0.25))] * 6


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["cross_entropy", "bce"])
def test_evaluations_report_the_loss_of_the_training(tmp_path: Path, loss: str) -> None:
    """Predictions have that of a softmax in any case. Probabilities are sigmoids after a training with them."""
    records = run(tmp_path, f"loss={loss}", "schedule.max_steps=3", "optim.lr=0.01")
    (evaluation,) = (record for record in records if record["kind"] == "eval")
    found = Predictions.load(tmp_path / "predictions.npz")
    right_N = found.predicted_N == found.labels_N
    assert right_N.any()
    softmax = evaluation["loss"] == pytest.approx(found.losses_N.mean(), rel=1e-4)
    likely = np.exp(-found.losses_N[right_N]) == pytest.approx(found.probabilities_N[right_N], rel=1e-4)
    assert softmax == likely == (loss == "cross_entropy")


@pytest.mark.slow
def test_training_does_not_wait_for_the_checkpoint_of_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, log, logged = saving.write, Loop._log, threading.Event()

    def slowly(*arguments: Any, **named: Any) -> Path:
        logged.wait(60.0)
        return write(*arguments, **named)

    def note(self: Loop, done: int) -> None:
        log(self, done)
        if done == 4:
            logged.set()

    monkeypatch.setattr(saving, "write", slowly)
    monkeypatch.setattr(Loop, "_log", note)
    records = run(tmp_path)
    order = [(record["kind"], record["step"]) for record in records]
    assert order.index(("train", 4)) < order.index(("checkpoint", 3))
    scores = {record["step"]: record["top1"] for record in records if record["kind"] == "eval"}
    best = min(scores, key=lambda step: (-scores[step], step))
    assert step_of((tmp_path / "checkpoints" / "best").resolve()) == best


def test_the_best_is_linked_although_an_error_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checkpoint was still being written."""
    write, failed = saving.write, threading.Event()

    def slowly(*arguments: Any, **named: Any) -> Path:
        failed.wait(60.0)
        return write(*arguments, **named)

    def check(self: DivergenceCheck, done: int, *numbers: Any) -> None:
        if done == 4:
            failed.set()
            raise UserError("optim.lr: not finite")

    monkeypatch.setattr(saving, "write", slowly)
    monkeypatch.setattr(DivergenceCheck, "check", check)
    with pytest.raises(UserError, match="not finite"):
        run(tmp_path)
    assert step_of((tmp_path / "checkpoints" / "best").resolve()) == 3


def test_a_stopped_run_is_saved_although_the_write_before_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped in an evaluation, while the checkpoint of its step was written."""
    write = saving.write
    attempts: list[int] = []

    def fails_once(*arguments: Any, **named: Any) -> Path:
        attempts.append(1)
        if len(attempts) == 1:
            raise UserError("step_000000003: Stale file handle")
        return write(*arguments, **named)

    def stopped(self: Evaluations, done: int) -> dict[str, str]:
        raise loop.Stopped

    monkeypatch.setattr(saving, "write", fails_once)
    monkeypatch.setattr(Evaluations, "take", stopped)
    assert train(load_config("vit_digits", [*SMALL, f"run_dir={tmp_path}"])) == 3
    assert [step_of(path) for path in checkpoints(tmp_path / "checkpoints")] == [3]
    assert "warning: step_000000003: Stale file handle; saving step 3 instead" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("metric", "value", "objective"),
    [
        ("top1", 90.0, 10.0), ("class_top1", 80.0, 20.0), ("class_top1", None, None), ("loss", 0.5, 0.5),
        ("loss", None, None),
    ],
)  # fmt: skip
def test_a_sweeper_minimises_the_metric_that_chose_the_best(
    metric: str, value: float | None, objective: float | None
) -> None:
    """None for a record without the number."""
    assert objective_of({"top1": 1.0, "class_top1": 1.0, "loss": 1.0, metric: value}, metric) == objective
