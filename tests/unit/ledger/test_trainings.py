"""Concurrent training runs: which GPUs each one sees, what lack of memory beside others means, how far they are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from pycls_fast.config.ladder import Variant
from pycls_fast.errors import UserError
from pycls_fast.ledger.ladder import processes as module
from pycls_fast.ledger.ladder.processes import ProcessResult, TrainingRun, trainings
from tests.factories import TRAINED
from tests.unit.ledger.stand_ins import work

OOM = "error: the device is out of memory (8 GB were asked for); lower data.global_batch_size, or the model"


@pytest.fixture(autouse=True)
def _stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module.Process, "stop", lambda processes: None)
    yield
    while Scene.made:
        Scene.made.pop().trainings.close()


class Scene:
    """Trainings whose processes are names; a run ends when `end` says so."""

    made: ClassVar[list[Scene]] = []

    def __init__(self, folder: Path, ranks: dict[str, int], *, jobs: int, devices: Sequence[str] = ()) -> None:
        self.folder = folder
        self.started: list[tuple[str, tuple[str, ...]]] = []
        self.said: list[str] = []
        self.done: list[str] = []
        self.ended: dict[str, ProcessResult] = {}
        runs = [TrainingRun(Variant(name=name, ranks=n), 0, folder / name) for name, n in ranks.items()]
        self.trainings = trainings(
            runs, jobs=jobs, devices=devices, start=self.start, finished=self.finished,
            done=lambda run, finished: self.done.append(run.variant.name), say=self.said.append,
        )  # fmt: skip
        self.made.append(self)

    def start(self, run: TrainingRun, devices: Sequence[str]) -> Any:
        self.started.append((run.variant.name, tuple(devices)))
        return run.variant.name

    def finished(self, process: Any) -> ProcessResult | None:
        return self.ended.pop(process, None)

    def end(self, name: str, status: int = 0, said: str = "") -> bool:
        """A run ends; returns whether any is left after two looks."""
        log = self.folder / f"{name}.txt"
        log.write_text(said)
        self.ended[name] = ProcessResult(status, 1.0, log)
        self.advance()
        return self.advance()

    def advance(self) -> bool:
        """Look once; returns whether any run is left."""
        return next(self.trainings, self) is not self


def test_each_run_has_gpus_of_its_own(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {"a": 1, "b": 2, "c": 2, "d": 1}, jobs=4, devices=("0", "1", "2", "3"))
    assert scene.advance()
    # Two are wanted and one is free.
    assert scene.started == [("a", ("0",)), ("b", ("1", "2"))]
    scene.end("a")
    assert scene.started[2:] == [("c", ("3", "0"))]
    scene.end("b")
    assert scene.started[3:] == [("d", ("1",))]
    assert scene.end("c")
    assert not scene.end("d")
    assert scene.done == ["a", "b", "c", "d"]


@pytest.mark.parametrize(("status", "said"), [(2, OOM), (-9, "")])
def test_lack_of_memory_beside_others_is_not_the_variants_fault(status: int, said: str, tmp_path: Path) -> None:
    scene = Scene(tmp_path, {"a": 1, "b": 1, "c": 1}, jobs=2)
    scene.advance()
    scene.end("b", status, said)
    assert scene.done == []
    scene.end("a")
    # The one that is tried again waits until no other one runs.
    assert [name for name, _ in scene.started] == ["a", "b", "c"]
    assert scene.end("c")
    assert [name for name, _ in scene.started] == ["a", "b", "c", "b"]
    assert not scene.end("b", status, said)
    assert scene.done == ["a", "c", "b"]
    assert len(scene.said) == 1


@pytest.mark.parametrize(
    ("ranks", "line"),
    [
        (1, "jobs: 3 trainings at a time need 3 CUDA devices and this process sees 2; use jobs=2"),
        (2, "jobs: 3 trainings at a time of 2 ranks each need 6 CUDA devices and this process sees 2; use jobs=1"),
    ],
)
def test_more_runs_than_gpus_are_refused(
    ranks: int, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError) as caught:
        work(tmp_path / "report", runs_at_most=8, jobs=3, ranks=ranks)
    assert caught.value.lines == (line,)
    assert not (tmp_path / "report").exists()


def test_running_trainings_are_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_EVERY_SECONDS", 0.0)
    scene = Scene(tmp_path, {"a": 1, "b": 1, "c": 1}, jobs=2)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "metrics.jsonl").write_text(line(5, 1.25))
    scene.advance()
    assert scene.said == [
        "a: training, seed 0: no step logged yet",
        "b: training, seed 0: epoch 0.50, step 5, loss 1.2500",
    ]


def line(step: int, loss: float | None) -> str:
    record = {"kind": "train", "step": step, "epoch": step / 10, **TRAINED, "loss": loss}
    return json.dumps(record) + "\n"
