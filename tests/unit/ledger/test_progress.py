"""What a ledger says while it works."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pycls_fast.ledger import runner, training_watch
from pycls_fast.ledger.progress import Progress
from pycls_fast.ledger.training_watch import TrainingWatch, reached
from tests.unit.ledger.test_ladder import FakeProcess, work


def record(step: int, loss: float | None) -> str:
    return json.dumps({"kind": "train", "step": step, "epoch": step / 10, "loss": loss}) + "\n"


def test_a_minute_after_the_last_time_each_training_has_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [1000.0], list[str]()
    monkeypatch.setattr(training_watch.time, "monotonic", lambda: now[0])
    watch = TrainingWatch(said.append)
    (tmp_path / "a").write_text(record(5, 0.25))
    running = [("A", tmp_path / "a"), ("B", tmp_path / "b")]
    for now[0] in (1059.0, 1060.0, 1061.0, 1119.0):
        watch.look(running)
    assert said == ["A: epoch 0.50, step 5, loss 0.2500", "B: no step logged yet"]
    now[0] = 1120.0
    watch.look(running[:1])
    assert len(said) == 3


def test_the_newest_step_is_found_whatever_is_around_it(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    evaluation = json.dumps({"kind": "eval", "step": 9, "epoch": 0.9, "loss": 1.0}) + "\n"
    # A kill left half a line, and the next process wrote after it.
    file.write_text(
        record(7, 2.0) + record(8, 1.5) + evaluation + '{"kind": "tr' + evaluation + '{"kind": "train", "st'
    )
    assert reached(file) == "epoch 0.80, step 8, loss 1.5000"
    # The first of the bytes that are read are those of half a line.
    many = "".join(record(step, None) for step in range(3000))
    file.write_text(many)
    assert len(many) > 1 << 17
    assert reached(file) == "epoch 299.90, step 2999, loss not finite"
    file.write_text("")
    assert reached(file) == "no step logged yet"


def test_no_time_is_named_that_is_not_known() -> None:
    progress = Progress()

    def after(seconds: float, *, training: bool = False) -> str:
        progress.note_done(training=training)
        progress.note_time(seconds, training=training)
        return progress.left(6, 4, 2)

    assert after(50.0) == "about 50 s left before the training"
    assert after(50.0) == "the training comes next"
    assert after(600.0, training=True) == "about 15 min left"


@pytest.mark.slow
def test_each_start_names_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "Process", FakeProcess)
    assert work(tmp_path, rounds=1) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if ": timing 1 of 1: started (log: " in line]
    assert [line.partition(":")[0] for line in said] == ["base", "B", "C"]
    assert {Path(line.partition("(log: ")[2].removesuffix(")")) for line in said} == set((tmp_path / "logs").iterdir())
