"""What the loop does around its steps: what counts as training time, and what it does not wait for."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest

from pycls_fast.data.batch import Batch
from pycls_fast.errors import UserError
from pycls_fast.files import checkpoints, step_of
from pycls_fast.plan.race import Race
from pycls_fast.train import loop, saving, train, validation
from pycls_fast.train.display import Display
from pycls_fast.train.divergence import DivergenceCheck
from pycls_fast.train.loop import Loop
from pycls_fast.train.metrics import Clock
from pycls_fast.train.run_state import Run
from pycls_fast.train.summary import objective as objective_of
from pycls_fast.train.validation import Evaluations
from tests.factories import config_of
from tests.integration.runs import TINY

# Three steps an epoch, two epochs.
SMALL = (
    *TINY, "data=synthetic", "data.synthetic_train_images=192", "data.synthetic_val_images=64", "data.num_workers=0",
    "data.synthetic_classes=10",
)  # fmt: skip


def written_after(event: threading.Event) -> Callable[..., Path]:
    """`saving.write`, which waits for the event."""
    write = saving.write

    def slowly(*arguments: Any, **named: Any) -> Path:
        event.wait(60.0)
        return write(*arguments, **named)

    return slowly


def run(tmp_path: Path, *overrides: str) -> list[dict[str, Any]]:
    assert train(config_of(*SMALL, f"run_dir={tmp_path}", *overrides)) == 0
    return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_rates_are_those_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 3 s that wait 1 s for their data, but for the first; checkpoints and evaluations are not counted, but
    evaluations are in the time that is left."""
    now, microbatches, left = 0.0, Loop._microbatches, []

    def late(self: Loop) -> Iterator[Batch]:
        nonlocal now
        for batch in microbatches(self):
            now += 1.0
            yield batch

    def takes(seconds: float, owner: type, name: str) -> None:
        real = getattr(owner, name)

        def slowly(*arguments: Any) -> Any:
            nonlocal now
            now += seconds
            return real(*arguments)

        monkeypatch.setattr(owner, name, slowly)

    takes(3.0, Clock, "add_step")
    takes(50.0, Run, "save")
    takes(100.0, Evaluations, "evaluate")
    monkeypatch.setattr("pycls_fast.train.start.race", lambda config: Race("fp32", 1.0, None, 0.0))
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(Loop, "_microbatches", late)
    monkeypatch.setattr(Display, "training", lambda *_, seconds_left, epochs: left.append(seconds_left))
    steps = [record for record in run(tmp_path, "runtime.checkpoint_every_steps=2") if record["kind"] == "train"]
    names = ("step_seconds", "images_per_second", "data_wait_fraction")
    rates = [tuple(record[name] for name in names) for record in steps]
    assert rates == [pytest.approx((3.0, 64 / 3, 0.0)), *[pytest.approx((4.0, 16.0, 0.25))] * 5]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["step_seconds_p50"], summary["images_per_second"]) == pytest.approx((4.0, 16.0))
    assert left == pytest.approx([15.0, 16.0, 12.0, 108.0, 104.0, 100.0])


@pytest.mark.slow
def test_training_does_not_wait_for_the_checkpoint_of_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, logged = Loop._log, threading.Event()

    def note(self: Loop, done: int) -> None:
        log(self, done)
        if done == 4:
            logged.set()

    monkeypatch.setattr(saving, "write", written_after(logged))
    monkeypatch.setattr(Loop, "_log", note)
    records = run(tmp_path)
    order = [(record["kind"], record["step"]) for record in records]
    assert order.index(("train", 4)) < order.index(("checkpoint", 3))
    scores = {record["step"]: record["top1"] for record in records if record["kind"] == "eval"}
    best = min(scores, key=lambda step: (-scores[step], step))
    assert step_of((tmp_path / "checkpoints" / "best").resolve()) == best


def test_a_stopped_run_is_saved_although_the_write_before_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped in an evaluation, while the checkpoint of its step was written."""
    fails_once = Mock(wraps=saving.write, side_effect=[UserError("step_000000003: Stale file handle"), DEFAULT])
    monkeypatch.setattr(saving, "write", fails_once)
    monkeypatch.setattr(Evaluations, "evaluate", Mock(side_effect=loop.Stopped))
    assert train(config_of(*SMALL, f"run_dir={tmp_path}")) == 3
    assert [step_of(path) for path in checkpoints(tmp_path / "checkpoints")] == [3]
    assert "warning: step_000000003: Stale file handle; saving step 3 instead" in capsys.readouterr().out


def test_a_record_that_cannot_be_written_is_no_reason_to_save_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the main rank writes records: the others would not save with it."""
    write, add_record = Mock(wraps=saving.write), Run.add_record

    def full(self: Run, kind: str, step: int, **values: Any) -> dict[str, Any]:
        if kind == "checkpoint":
            raise UserError("metrics.jsonl cannot be written (No space left on device)")
        return add_record(self, kind, step, **values)

    monkeypatch.setattr(saving, "write", write)
    monkeypatch.setattr(Run, "add_record", full)
    with pytest.raises(UserError, match="No space left"):
        run(tmp_path)
    assert write.call_count == 1


def test_who_is_stopped_while_waiting_for_data_has_saved_the_steps_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    microbatches = Loop._microbatches

    def ends(self: Loop) -> Iterator[Batch]:
        yield from islice(microbatches(self), 2)
        self.stop.name = "SIGTERM"
        # As the loader does.
        self.run.world.while_waiting()

    monkeypatch.setattr(Loop, "_microbatches", ends)
    assert train(config_of(*SMALL, f"run_dir={tmp_path}")) == 3
    assert [step_of(path) for path in checkpoints(tmp_path / "checkpoints")] == [2]


@pytest.mark.slow
def test_step_0_is_saved_although_its_first_checkpoint_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process begins again, and it may be the best step."""
    run(tmp_path / "before", "schedule.max_steps=1")
    keys = ("head=probe", f"weights={tmp_path / 'before'}", "schedule.max_steps=0")
    with monkeypatch.context() as patched:
        patched.setattr(saving, "write", Mock(side_effect=UserError("step_000000000: No space left on device")))
        with pytest.raises(UserError, match="No space left"):
            run(tmp_path / "run", *keys)
    assert [record["step"] for record in run(tmp_path / "run", *keys) if record["kind"] == "eval"] == [0]
    assert step_of((tmp_path / "run" / "checkpoints" / "best").resolve()) == 0


def best_by(scores: dict[int, float]) -> Callable[..., int | None]:
    """`best_evaluation` by scores of steps."""

    def best(evaluations: list[dict[str, Any]], *_: Any) -> int | None:
        steps = [each["step"] for each in evaluations]
        return steps.index(max(steps, key=scores.__getitem__)) if steps else None

    return best


@pytest.mark.slow
def test_best_weights_of_another_step_than_the_best_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By another metric than before; the best step by it was not kept."""
    monkeypatch.setattr(validation, "best_evaluation", best_by({3: 80.0, 6: 70.0, 9: 60.0}))
    run(tmp_path, "schedule.epochs=3")
    assert "warning" not in capsys.readouterr().out
    monkeypatch.setattr(validation, "best_evaluation", best_by({3: 10.0, 6: 90.0, 9: 60.0, 12: 50.0}))
    run(tmp_path, "schedule.epochs=4", "schedule.best_metric=loss")
    told = "warning: best.safetensors: of step 3; no checkpoint is left of step 6, the best by loss\n"
    assert told in capsys.readouterr().out


@pytest.mark.slow
def test_the_best_weights_are_not_those_of_abandoned_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is there a checkpoint of the best that is left, which was removed when a later one was better."""
    scores = {3: 80.0, 6: 70.0, 9: 90.0}
    monkeypatch.setattr(validation, "best_evaluation", best_by(scores))
    run(tmp_path, "schedule.epochs=3")
    assert (tmp_path / "best.safetensors").is_file()
    scores[9] = 60.0
    run(tmp_path, "schedule.epochs=3", f"resume={tmp_path}/checkpoints/step_000000006")
    assert json.loads((tmp_path / "summary.json").read_text())["best"]["step"] == 3
    assert not (tmp_path / "best.safetensors").exists()


@pytest.mark.slow
def test_what_a_kill_at_the_end_has_left_out_is_written_by_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("pycls_fast.train.summary.write_page", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path)
    assert not (tmp_path / "summary.json").exists()
    run(tmp_path)
    assert all((tmp_path / name).exists() for name in ("best.safetensors", "index.html", "summary.json"))


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


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_step_whose_evaluation_is_finite_is_saved(
    tmp_path: Path, asynchronous: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def an_image_overflows(self: DivergenceCheck, done: int, *numbers: Any) -> None:
        self.finite = False

    monkeypatch.setattr(DivergenceCheck, "check", an_image_overflows)
    records = run(tmp_path, f"runtime.checkpoint_async={asynchronous}", "runtime.checkpoint_every_steps=2")
    for kind in ("checkpoint", "eval"):
        assert [record["step"] for record in records if record["kind"] == kind] == [3, 6]
    best = json.loads((tmp_path / "summary.json").read_text())["best"]
    assert step_of((tmp_path / "checkpoints" / "best").resolve()) == best["step"]


@pytest.mark.slow
def test_three_steps_are_profiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The memory of the first two is counted, in every operator.
    run(tmp_path, "runtime.profile_step=3", "speed=reference")
    out = capsys.readouterr().out
    assert "profile of steps 3 to 5: " in out
    assert "aten::" in out
    with gzip.open(tmp_path / "profile" / "step_3.json.gz") as file:
        trace = json.load(file)
    names = [str(event.get("name")) for event in trace["traceEvents"]]
    assert sum(name.startswith("Optimizer.step") for name in names) == 3
    # Each of the two layers has a matrix product for query, key and value.
    assert "aten::addmm" in names
    run(tmp_path, "runtime.profile_step=5", "speed=reference")
    assert "no profile; not all of the steps 5 to 7 were trained here" in capsys.readouterr().out
