"""Processes of a ledger: how they start, what is known of their end; concurrent trainings, their GPUs and memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from pycls_fast.build import device as build_device
from pycls_fast.config.ladder import Variant
from pycls_fast.errors import UserError
from pycls_fast.ledger.ladder import ledger as at_work
from pycls_fast.ledger.ladder import processes
from pycls_fast.ledger.ladder.processes import (
    FAILED,
    Job,
    Process,
    ProcessResult,
    _environment,
    visible_devices,
)
from tests.factories import TRAINED
from tests.unit.ledger.stand_ins import made, work

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
    # A status of a mistake; another machine may have more.
    (tmp_path / "log").write_text("error: the device is out of memory; lower data.global_batch_size\n")
    assert not ProcessResult(2, 1.0, tmp_path / "log").refused


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


def test_a_process_imports_the_package_of_its_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What the user's own path offers stays importable, after the checkout.
    for name in ("users/other.py", "users/pycls_fast.py", "pycls_fast/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "users"))
    monkeypatch.chdir(tmp_path / "users")
    shown = "pycls_fast.__file__, os.environ['CUDA_VISIBLE_DEVICES'], *sys.argv[1:]"
    (tmp_path / "pycls_fast" / "__main__.py").write_text(f"import os, other, pycls_fast, sys; print({shown})")
    log = tmp_path / "log.txt"
    finished = Process("time", ["a=1"], ranks=1, log=log, tree=tmp_path, devices=("4", "2")).wait()
    said = f"{tmp_path / 'pycls_fast' / '__init__.py'} 4,2 time a=1"
    assert (finished.status, log.read_text().strip()) == (0, said)
    with pytest.raises(UserError, match=r"^output: .*/log.txt/2.txt cannot be written \("):
        Process("time", [], ranks=1, log=log / "2.txt")


def test_all_processes_are_asked_to_save_before_the_first_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """And there is one time limit for all of them."""
    times, both = Mock(side_effect=[0.0, 0.0, 30.0]), Mock()
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=times))
    both.late.wait.side_effect = [subprocess.TimeoutExpired("x", 30.0), None]
    started: list[Any] = [SimpleNamespace(_process=each) for each in (both.late, both.saving)]
    Process.stop(started)
    assert both.mock_calls == [
        call.late.send_signal(signal.SIGTERM), call.saving.send_signal(signal.SIGTERM),
        call.late.wait(timeout=30.0), call.late.kill(), call.late.wait(), call.saving.wait(timeout=0.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "limit", "share"),
    [(1, None, None), (4, None, "4"), (32, None, "1"), (2, 4, "2")],
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


@pytest.mark.parametrize(
    ("given", "seen"), [(None, ("0", "1", "2", "3")), ("4,5,6,7", ("4", "5", "6", "7")), ("GPU-a,9", ("GPU-a", "9"))]
)
def test_a_process_sees_its_slice_of_the_devices(
    given: str | None, seen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert visible_devices(4) == seen
    for devices, expected in ((seen[-1:], seen[-1]), (seen[:2], ",".join(seen[:2])), ((), given)):
        assert _environment(1, devices).get("CUDA_VISIBLE_DEVICES") == expected


LACKS = "error: the device is out of memory (8 GB were asked for); lower data.global_batch_size, or the model"


class Scene:
    """A ledger that trains with processes that end one after the other, as they are listed; "Ctrl-C" among them is a
    request to stop."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.events: list[str] = []
        self.said: list[str] = []
        self._ends: deque[tuple[str, int, str]] = deque()
        self._ledger = made(folder)
        self._waits, self._ended = 0, True
        scene = self

        class Listed(Process):
            def __init__(self, verb: str, arguments: Sequence[str], *, log: Path, devices: Any, **_: Any) -> None:
                del verb, arguments
                self._log = log
                scene.events.append(f"start {log.stem} {','.join(devices)}".strip())

            def finished(self) -> ProcessResult | None:
                # What one leaves free is taken before the next one ends.
                if scene._ended or not scene._ends or scene._ends[0][0] != self._log.stem:
                    return None
                name, status, said = scene._ends.popleft()
                scene._ended = True
                scene.events.append(f"end {name}")
                self._log.write_text(said)
                return ProcessResult(status, 1.0, self._log)

            @staticmethod
            def stop(processes: Iterable[Any]) -> None:
                scene.events += [f"stop {process._log.stem}" for process in processes]

        monkeypatch.setattr(at_work, "Process", Listed)
        monkeypatch.setattr(at_work, "time", SimpleNamespace(monotonic=time.monotonic, sleep=self._wait))

    def train(
        self, ranks: Mapping[str, int], ends: Sequence[tuple[str, int, str]], *, jobs: int, devices: Sequence[str] = ()
    ) -> None:
        """Run trainings with so many ranks each, which end as listed: name, status, and what it printed."""
        self._ends.extend(ends)
        (self.folder / "logs").mkdir()
        self._ledger = ledger = made(self.folder, jobs=jobs)
        ledger.cuda_devices, ledger.say = devices, self.said.append
        ledger.folder.check(ledger.plan())
        variants = [Variant(name=name, ranks=n) for name, n in ranks.items()]
        ledger.train([Job(each.name, "train", each, (), self.folder / each.name) for each in variants])
        assert not self._ends

    def _wait(self, seconds: float) -> None:
        del seconds
        self._waits, self._ended = self._waits + 1, False
        assert self._waits < 20, "it waits for what has ended"
        if self._ends and self._ends[0][0] == "Ctrl-C":
            self._ledger.stop.name = "SIGINT"


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def test_each_run_has_gpus_of_its_own(scene: Scene) -> None:
    ends = [(name, 0, "") for name in "abcd"]
    scene.train({"a": 1, "b": 2, "c": 2, "d": 1}, ends, jobs=4, devices=("0", "1", "2", "3"))
    # At first two are wanted and one is free.
    assert scene.events == [
        "start a 0", "start b 1,2", "end a", "start c 3,0", "end b", "start d 1", "end c", "end d",
    ]  # fmt: skip
    assert [line for line in scene.said if "lacked memory" in line] == []


@pytest.mark.parametrize(("status", "said"), [(2, LACKS), (-9, "")])
def test_lack_of_memory_beside_others_is_not_the_variants_fault(status: int, said: str, scene: Scene) -> None:
    ends = [("b", status, said), ("a", 0, ""), ("c", 0, ""), ("b", status, said)]
    scene.train({"a": 1, "b": 1, "c": 1}, ends, jobs=2)
    # The one that is tried again waits until no other one runs.
    assert scene.events == ["start a", "start b", "end b", "start c", "end a", "end c", "start b", "end b"]
    done = [line for line in scene.said if ": started" not in line]
    assert [line.partition(":")[0] for line in done] == ["b", "a", "c", "b"]
    assert ["lacked memory" in line for line in done] == [True, False, False, False]
    assert [file.parent.name for file in scene.folder.rglob(FAILED)] == ["b"]


def test_ctrl_c_stops_all_trainings(scene: Scene) -> None:
    with pytest.raises(KeyboardInterrupt):
        scene.train({"a": 1, "b": 1, "c": 1}, [("a", 0, ""), ("Ctrl-C", 0, "")], jobs=2)
    assert scene.events == ["start a", "start b", "end a", "start c", "stop b", "stop c"]


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


def test_running_trainings_are_watched(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_work, "_PROGRESS_SECONDS", 0.0)
    (scene.folder / "b").mkdir()
    record = {"kind": "train", "step": 5, "epoch": 0.5, **TRAINED, "loss": 1.25}
    (scene.folder / "b" / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    scene.train({"a": 1, "b": 1, "c": 1}, [(name, 0, "") for name in "abc"], jobs=2)
    assert [line for line in scene.said if ": started" not in line][:2] == [
        "a: no step logged yet",
        "b: epoch 0.50, step 5, loss 1.2500",
    ]
