"""Concurrent training runs: which GPUs each one sees, and what lack of memory beside others means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pycls_fast.config import load_config
from pycls_fast.config.ladder import Ladder, Rung
from pycls_fast.errors import UserError
from pycls_fast.ledger import run_ladder as module
from pycls_fast.ledger import training_watch
from pycls_fast.ledger.plan import Arm
from pycls_fast.ledger.processes import Process, ProcessResult, visible_devices
from pycls_fast.ledger.run_ladder import run_ladder
from pycls_fast.ledger.settings import LadderSettings
from pycls_fast.ledger.trainings import Trainings

OOM = "error: the device is out of memory (8 GB were asked for); lower data.global_batch_size, or the model"


@dataclass
class Work:
    """What `Trainings` needs of a ledger; a run ends when `end` says so."""

    folder: Any
    arms: Sequence[Arm]
    jobs: int
    cuda_devices: Sequence[str] = ()
    untrained: dict[str, str] = field(default_factory=dict)
    started: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    reported: list[str] = field(default_factory=list)
    ended: dict[str, ProcessResult] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.logs: Path = self.folder
        self.folder = SimpleNamespace(run_dir=lambda arm, seed: self.logs / arm.name / str(seed))
        self.settings = SimpleNamespace(jobs=self.jobs)
        self.selection = SimpleNamespace(arms=lambda: self.arms, runnable=lambda: self.arms)
        self.say = self.said.append

    def seeds(self) -> range:
        return range(1)

    def start_training(self, arm: Arm, seed: int, devices: Sequence[str]) -> str:
        self.started.append((arm.name, tuple(devices)))
        return arm.name

    def finished(self, process: str) -> ProcessResult | None:
        return self.ended.pop(process, None)

    def end(self, name: str, status: int = 0, said: str = "") -> None:
        log = self.logs / f"{name}.txt"
        log.write_text(said)
        self.ended[name] = ProcessResult(status, 1.0, log)

    def note_done(self, *, training: bool) -> None:
        assert training

    def report(self, what: str, finished: ProcessResult, *, training: bool) -> None:
        self.reported.append(what)


def arm(name: str, ranks: int = 1) -> Arm:
    return Arm(name, (), ranks, None)


def test_each_run_has_gpus_of_its_own(tmp_path: Path) -> None:
    work = Work(tmp_path, [arm("a"), arm("b", 2), arm("c", 2), arm("d")], jobs=4, cuda_devices=("0", "1", "2", "3"))
    trainings = Trainings(work)  # type: ignore[arg-type]
    assert trainings.advance()
    # Two are wanted and one is free.
    assert work.started == [("a", ("0",)), ("b", ("1", "2"))]
    work.end("a")
    assert trainings.advance()
    assert trainings.advance()
    assert work.started[2:] == [("c", ("3", "0"))]
    work.end("b")
    trainings.advance()
    trainings.advance()
    assert work.started[3:] == [("d", ("1",))]
    work.end("c")
    work.end("d")
    assert not trainings.advance()
    assert len(work.reported) == 4


def test_running_trainings_are_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_watch, "_EVERY_SECONDS", 0.0)
    work = Work(tmp_path, [arm("a"), arm("b"), arm("c")], jobs=2)
    metrics = work.folder.run_dir(arm("b"), 0) / "metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    metrics.write_text('{"kind": "train", "step": 7, "epoch": 0.5, "loss": 1.25}\n')
    Trainings(work).advance()  # type: ignore[arg-type]
    assert work.said == [
        "a: training, seed 0: no step logged yet",
        "b: training, seed 0: epoch 0.50, step 7, loss 1.2500",
    ]


def test_without_gpus_to_divide_each_run_sees_what_this_process_sees(tmp_path: Path) -> None:
    work = Work(tmp_path, [arm("a"), arm("b"), arm("c")], jobs=2)
    trainings = Trainings(work)  # type: ignore[arg-type]
    trainings.advance()
    assert work.started == [("a", ()), ("b", ())]


@pytest.mark.parametrize(("status", "said"), [(2, OOM), (-9, "")])
def test_lack_of_memory_beside_others_is_not_the_rungs_fault(status: int, said: str, tmp_path: Path) -> None:
    work = Work(tmp_path, [arm("a"), arm("b"), arm("c")], jobs=2)
    trainings = Trainings(work)  # type: ignore[arg-type]
    trainings.advance()
    work.end("b", status, said)
    trainings.advance()
    assert (work.untrained, work.reported) == ({}, [])
    trainings.advance()
    work.end("a")
    trainings.advance()
    trainings.advance()
    # The one that is tried again waits until no other one runs.
    assert [name for name, _ in work.started] == ["a", "b", "c"]
    work.end("c")
    trainings.advance()
    assert trainings.advance()
    assert [name for name, _ in work.started] == ["a", "b", "c", "b"]
    work.end("b", status, said)
    assert not trainings.advance()
    assert list(work.untrained) == ["b"]
    assert work.said == [
        "b: training, seed 0: lacked memory while others ran; starting it once more by itself at the end"
    ]


def test_lack_of_memory_by_itself_is(tmp_path: Path) -> None:
    work = Work(tmp_path, [arm("a"), arm("b")], jobs=1)
    trainings = Trainings(work)  # type: ignore[arg-type]
    trainings.advance()
    work.end("a", 2, OOM)
    assert trainings.advance()
    # It is the reference, without which no other one starts.
    assert not trainings.advance()
    assert (list(work.untrained), len(work.started)) == (["a"], 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "seen"), [(None, ("0", "1", "2", "3")), ("4,5,6,7", ("4", "5", "6", "7")), ("GPU-a,9", ("GPU-a", "9"))]
)
def test_a_process_sees_its_slice_of_the_devices(
    given: str | None, seen: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert visible_devices(4) == seen
    tool = tmp_path / "tool.py"
    tool.write_text("import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))")
    for devices, expected in ((seen[-1:], seen[-1]), (seen[:2], ",".join(seen[:2])), ((), str(given))):
        log = tmp_path / "log.txt"
        assert Process(tool, [], ranks=1, log=log, devices=devices).wait().status == 0
        assert log.read_text() == f"{expected}\n"


@pytest.mark.slow
@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize(
    ("ranks", "line"),
    [
        (1, "jobs: 3 trainings at a time need 3 CUDA devices and this process sees 2; use jobs=2"),
        (2, "jobs: 3 trainings at a time of 2 ranks each need 6 CUDA devices and this process sees 2; use jobs=1"),
    ],
)
def test_more_runs_than_gpus_are_refused(
    ranks: int, line: str, dry_run: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module.torch.cuda, "device_count", lambda: 2)
    ladder = Ladder(
        description="one change", baseline=Rung(name="base"), rungs=(Rung(name="B", overrides=("seed=1",)),)
    )
    with pytest.raises(UserError) as caught:
        run_ladder(
            load_config("vit_digits"), ladder, LadderSettings(jobs=3, ranks=ranks), switches=(), base=([], []),
            compose=lambda overrides: load_config("vit_digits", ["runtime.device=cpu"]), folder=tmp_path / "report",
            tools=Path("tools"), dry_run=dry_run,
        )  # fmt: skip
    assert caught.value.lines == (line,)
    assert not (tmp_path / "report").exists()
