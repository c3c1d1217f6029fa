"""The files of a run folder, after accidents as well."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pycls_fast.errors import UserError
from pycls_fast.train.curves import draw_curves
from pycls_fast.train.evaluation import Predictions
from pycls_fast.train.evaluations import Evaluations
from pycls_fast.train.metrics import Clock, TrainMetrics
from pycls_fast.train.run_folder import RunFolder, environment
from tests.unit.train.test_evaluation import ALONE, CPU


def test_values_that_are_no_numbers_become_null(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.add_record("train", 1, 0.5, loss=math.nan, grad_norm=math.inf, lr=0.1)
    (line,) = folder.metrics.read_text().splitlines()
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (record["loss"], record["grad_norm"], record["lr"]) == (None, None, 0.1)


def test_line_cut_off_by_a_kill_is_left_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.add_record("train", 1, 0.5, loss=1.0)
    with folder.metrics.open("a") as file:
        file.write('{"kind": "train", "step": 2, "lo')
    assert [record["step"] for record in folder.records()] == [1]
    folder.forget_after(1)
    folder.add_record("train", 2, 1.0, loss=0.5)
    assert [record["step"] for record in folder.records()] == [1, 2]


def test_forgets_steps_that_are_done_again_but_not_events(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2, 3):
        folder.add_record("train", step, step / 2, loss=1.0)
    folder.add_record("event", 3, 1.5, event="damaged image")
    folder.forget_after(2)
    assert [(r["kind"], r["step"]) for r in folder.records()] == [("train", 1), ("train", 2), ("event", 3)]


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (lambda folder: folder.add_record("train", 1, 0.5, loss=1.0), "metrics.jsonl"),
        (lambda folder: folder.write_json("summary.json", {}), "summary.json"),
    ],
)
def test_a_full_disk_is_one_line(tmp_path: Path, write: Callable[[RunFolder], None], name: str) -> None:
    """/dev/full takes a name, and no byte."""
    for file in ("metrics.jsonl", f".summary.json.{os.getpid()}.tmp"):
        (tmp_path / file).symlink_to("/dev/full")
    line = rf"^run_dir: {tmp_path / name} cannot be written \(No space left on device\); mend it, and the same command"
    with pytest.raises(UserError, match=line):
        write(RunFolder(tmp_path))


def test_the_other_files_of_a_run_on_a_full_disk(tmp_path: Path) -> None:
    full = tmp_path / f".predictions.npz.{os.getpid()}.tmp"
    full.symlink_to("/dev/full")
    folder: Any = RunFolder(tmp_path)
    nobody = SimpleNamespace(folder=folder, classes=("a", "b"), config=SimpleNamespace(config_name="x"))
    number = np.zeros(1, dtype=np.int64)
    result: Any = SimpleNamespace(predictions=Predictions(number, number, number, np.zeros(1, dtype=np.float32)))
    evaluations = Evaluations(nobody, None, lambda: None)  # type: ignore[arg-type]  # what is written, and no more
    with pytest.raises(UserError, match=r"predictions.npz cannot be written \(No space left"):
        evaluations._write_down(1, "model", result)
    (tmp_path / "curves.png").mkdir()
    with pytest.raises(UserError, match=r"curves.png cannot be written \(Is a directory"):
        evaluations.draw()


def test_environment_names_the_versions_and_the_machine() -> None:
    values = environment(CPU, 1)
    assert values["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert values["memory_bytes"] > 1e9
    assert values["processor"]
    assert json.loads(json.dumps(values)) == values


def test_curves_are_drawn_from_records_with_gaps(tmp_path: Path) -> None:
    draw_curves([], tmp_path / "empty.png", "nothing yet")
    train = {"kind": "train", "epoch": 1.0, "loss": None, "lr": 0.1, "images_per_second": 5.0}
    score = {
        "kind": "eval",
        "epoch": 1.0,
        "split": "val",
        "weights": "model",
        "loss": 1.0,
        "top1": 3.0,
        "top5": 9.0,
    }
    draw_curves([train, score], tmp_path / "curves.png", "a run")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 2


def test_metrics_are_means_over_steps_and_skipped_steps_are_counted() -> None:
    metrics = TrainMetrics(CPU)
    for losses, norm in (((0.5, 0.7), 2.0), ((0.1, 0.3), math.inf), ((0.2, 0.2), 4.0)):
        for loss in losses:
            metrics.add_loss(torch.tensor(loss))
        metrics.add_step(torch.tensor(norm))
    values = metrics.read(ALONE)
    assert values == {"loss": pytest.approx(2.0 / 3), "grad_norm": pytest.approx(3.0), "skipped_steps": 1}
    metrics.add_loss(torch.tensor(9.0))
    metrics.add_step(torch.tensor(1.0))
    assert metrics.read(ALONE)["loss"] == 9.0


def test_medians_leave_out_the_interval_that_warms_up() -> None:
    clock = Clock(intervals=[(100.0, 1.0), (2.0, 50.0), (4.0, 25.0), (3.0, 33.0)])
    assert clock.medians() == (3.0, 33.0)
    assert Clock(intervals=[(100.0, 1.0)]).medians() == (100.0, 1.0)
    assert all(math.isnan(value) for value in Clock().medians())
