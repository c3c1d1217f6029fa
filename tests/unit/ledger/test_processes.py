"""Processes of a ledger: how they start, what is known of their end; concurrent trainings, their GPUs and memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from pycls_fast.build import device as build_device
from pycls_fast.config.ladder import Variant
from pycls_fast.errors import UserError
from pycls_fast.ledger.ladder import processes
from pycls_fast.ledger.ladder.processes import (
    Process,
    ProcessResult,
    TrainingRun,
    _environment,
    trainings,
    visible_devices,
)
from tests.factories import TRAINED
from tests.unit.ledger.stand_ins import work

OUT_OF_MEMORY = """Traceback (most recent call last):
  File "time_net.py", line 1, in <module>
    raise RuntimeError("nothing")
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.
"""
TORCHRUN = """[rank1]: Traceback (most recent call last):
[rank1]:     raise KeyError("x")
[rank1]: KeyError: 'x'
[rank1]: During handling of the above exception, another exception occurred:
[rank1]: RuntimeError: boom
[rank0]: torch.distributed.DistBackendError: connection closed by peer
E1121 12:00:00 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 1) local_rank: 1
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
time_net.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
============================================================
"""
KILLED = """Root Cause (first observed failure):
  traceback : Signal 9 (SIGKILL) received by PID 123
============================================================
"""


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (OUT_OF_MEMORY + "UserWarning: leaked semaphore\n", "torch.OutOfMemoryError: CUDA out of memory. Tried to"),
        (TORCHRUN, "RuntimeError: boom"),
        (KILLED, "traceback : Signal 9 (SIGKILL) received by PID 123"),
        (OUT_OF_MEMORY + "error: optim.lr: too large\n", "optim.lr: too large"),
        ("step 1\n", "step 1"),
        ("", "exit status 1"),
    ],
)
def test_what_a_process_ended_with(log: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(log)
    assert ProcessResult(1, 1.0, tmp_path / "log").reason().startswith(reason)
    # One that the system killed could not say why.
    (tmp_path / "log").write_text("epoch 3.20 of 10  loss 1.2\n")
    assert ProcessResult(-9, 1.0, tmp_path / "log").reason() == "killed by signal 9 (SIGKILL; out of memory?)"


@pytest.mark.parametrize(
    ("ranks", "exit_codes", "status"),
    [(2, (2, -15), 2), (2, (1, 2), 1), (2, (-9, 1), -9), (1, (2,), 1)],
)
def test_the_status_is_that_of_the_rank_that_failed_first(
    ranks: int, exit_codes: tuple[int, ...], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *others = (f"  rank      : {rank}\n  exitcode  : {code} (pid: 7)\n" for rank, code in enumerate(exit_codes))
    said = f"Failures:\n{''.join(others)}---\nRoot Cause (first observed failure):\n[0]:\n{first}===\n"
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: SimpleNamespace(poll=lambda: 1))
    process = Process("train", [], ranks=ranks, log=tmp_path / "log.txt")
    (tmp_path / "log.txt").write_text(said)
    finished = process.finished()
    assert finished.status == status


def checkout(folder: Path, main: str) -> None:
    """A package in the place of ours, whose main program is the text."""
    (folder / "pycls_fast").mkdir()
    (folder / "pycls_fast" / "__init__.py").touch()
    (folder / "pycls_fast" / "__main__.py").write_text(main)


def test_a_process_imports_the_package_of_its_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What the user's own path offers stays importable, after the checkout.
    for name in ("other.py", "pycls_fast.py"):
        (tmp_path / "users" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "users" / name).touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "users"))
    monkeypatch.chdir(tmp_path / "users")
    checkout(tmp_path, "import other, pycls_fast, sys; print(pycls_fast.__file__, *sys.argv[1:])")
    log = tmp_path / "log.txt"
    finished = Process("time", ["a=1"], ranks=1, log=log, tree=tmp_path).wait()
    said = f"{tmp_path / 'pycls_fast' / '__init__.py'} time a=1"
    assert (finished.status, log.read_text().strip()) == (0, said)
    with pytest.raises(UserError, match=r"^output: .*/log.txt/2.txt cannot be written \("):
        Process("time", [], ranks=1, log=log / "2.txt")


def test_all_processes_are_asked_to_save_before_the_first_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """And there is one time limit for all of them."""
    now, log = 0.0, list[tuple[object, ...]]()
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: now))

    class Asked:
        """A process that saves and ends when it is asked to, or never."""

        def __init__(self, name: str, *, saves: bool) -> None:
            self._process, self.name, self.saves = self, name, saves

        def send_signal(self, number: int) -> None:
            log.append((self.name, "asked", number))

        def wait(self, timeout: float | None = None) -> None:
            nonlocal now
            if timeout is not None:
                log.append((self.name, "waited for", timeout))
                if not self.saves:
                    now += timeout
                    raise subprocess.TimeoutExpired("x", timeout)

        def kill(self) -> None:
            log.append((self.name, "killed"))

    started: list[Any] = [Asked("a", saves=False), Asked("b", saves=False), Asked("c", saves=True)]
    Process.stop(started)
    assert log[:3] == [(name, "asked", signal.SIGTERM) for name in "abc"]
    assert log[3:] == [
        *(("a", "waited for", 30.0), ("a", "killed")), *(("b", "waited for", 0.0), ("b", "killed")),
        ("c", "waited for", 0.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "limit", "share"),
    [(1, None, None), (2, None, "8"), (4, None, "4"), (32, None, "1"), (2, 4, "2"), (2, 1, "1"), (1, 4, None)],
)
def test_ranks_share_the_cores(
    ranks: int, limit: int | None, share: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a container may take, where it has a limit."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(build_device, "cpu_limit", lambda: limit)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert _environment(ranks).get("OMP_NUM_THREADS") == share
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert _environment(ranks)["OMP_NUM_THREADS"] == "3"


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
    checkout(tmp_path, "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))")
    for devices, expected in ((seen[-1:], seen[-1]), (seen[:2], ",".join(seen[:2])), ((), str(given))):
        log = tmp_path / "log.txt"
        assert Process("train", [], ranks=1, log=log, tree=tmp_path, devices=devices).wait().status == 0
        assert log.read_text() == f"{expected}\n"


LACKS = "error: the device is out of memory (8 GB were asked for); lower data.global_batch_size, or the model"


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(processes.Process, "stop", lambda processes: None)
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


@pytest.mark.usefixtures("stopped")
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


@pytest.mark.usefixtures("stopped")
@pytest.mark.parametrize(("status", "said"), [(2, LACKS), (-9, "")])
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


@pytest.mark.usefixtures("stopped")
def test_running_trainings_are_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_EVERY_SECONDS", 0.0)
    scene = Scene(tmp_path, {"a": 1, "b": 1, "c": 1}, jobs=2)
    (tmp_path / "b").mkdir()
    record = {"kind": "train", "step": 5, "epoch": 0.5, **TRAINED, "loss": 1.25}
    (tmp_path / "b" / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    scene.advance()
    assert scene.said == [
        "a: training, seed 0: no step logged yet",
        "b: training, seed 0: epoch 0.50, step 5, loss 1.2500",
    ]
