"""What a folder holds reaches the report: runs in both columns, and in a few right words why an arm has none."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pycls_fast.build import cpu_cores
from pycls_fast.config.ladder import Ladder, Rung
from pycls_fast.errors import UserError
from pycls_fast.ledger import processes
from pycls_fast.ledger.folder import LedgerFolder
from pycls_fast.ledger.outcome import collect
from pycls_fast.ledger.processes import Process, ProcessResult, _environment
from pycls_fast.ledger.runner import Ledger
from pycls_fast.ledger.settings import LadderSettings
from pycls_fast.ledger.table import state
from pycls_fast.train.evaluation import Predictions
from pycls_fast.train.output_file import write_json
from pycls_fast.train.run_folder import RunFolder

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
        (OUT_OF_MEMORY, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB."),
        (
            OUT_OF_MEMORY + "UserWarning: leaked semaphore\n",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.",
        ),
        (TORCHRUN, "RuntimeError: boom"),
        (KILLED, "traceback : Signal 9 (SIGKILL) received by PID 123"),
        (OUT_OF_MEMORY + "error: optim.lr: too large\n", "optim.lr: too large"),
        ("step 1\n", "step 1"),
        ("", "exit status 1"),
    ],
)
def test_what_a_process_ended_with(log: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(log)
    assert ProcessResult(1, 1.0, tmp_path / "log").reason() == reason


@pytest.mark.parametrize(
    ("status", "log", "reason"),
    [
        (-9, "epoch 3.20 of 10  loss 1.2\n", "killed by signal 9 (SIGKILL; out of memory?)"),
        (-11, "", "killed by signal 11 (SIGSEGV)"),
        (-6, OUT_OF_MEMORY, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB."),
    ],
)
def test_the_system_gives_no_last_words(status: int, log: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "log.txt"
    file.write_text(log)
    assert ProcessResult(status, 1.0, file).reason() == reason


@pytest.mark.parametrize(
    ("ranks", "exit_codes", "status"),
    [(2, (2, -15), 2), (2, (1, 2), 1), (2, (-9, 1), -9), (1, (2,), 1)],
)
def test_the_status_is_that_of_the_rank_that_failed_first(
    ranks: int, exit_codes: tuple[int, ...], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *others = (f"  rank      : {rank}\n  exitcode  : {code} (pid: 7)\n" for rank, code in enumerate(exit_codes))
    said = f"Failures:\n{''.join(others)}---\nRoot Cause (first observed failure):\n[0]:\n{first}===\n"
    monkeypatch.setattr(subprocess, "Popen", Ended)
    process = Process(tmp_path / "tool.py", [], ranks=ranks, log=tmp_path / "log.txt")
    (tmp_path / "log.txt").write_text(said)
    finished = process.finished()
    assert finished is not None
    assert finished.status == status


def test_a_tool_imports_the_package_of_its_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What the user's own path offers stays importable, after the checkout.
    for name in ("other.py", "pycls_fast.py"):
        (tmp_path / "users" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "users" / name).touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "users"))
    (tmp_path / "pycls_fast").mkdir()
    (tmp_path / "pycls_fast" / "__init__.py").touch()
    (tmp_path / "tools").mkdir()
    tool, log = tmp_path / "tools" / "tool.py", tmp_path / "log.txt"
    tool.write_text("import other, pycls_fast; print(pycls_fast.__file__)")
    finished = Process(tool, [], ranks=1, log=log, tree=tmp_path).wait()
    assert (finished.status, log.read_text().strip()) == (0, str(tmp_path / "pycls_fast" / "__init__.py"))


def test_all_processes_are_asked_to_save_before_the_first_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_SAVING_SECONDS", 1.0)
    tool = tmp_path / "tool.py"
    tool.write_text(
        "import pathlib, signal, sys, time\n"
        "def save(*_):\n"
        "    pathlib.Path(sys.argv[1] + '_asked').touch()\n"
        "    if sys.argv[2] == 'saves': sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "pathlib.Path(sys.argv[1] + '_started').touch()\n"
        "while True: time.sleep(0.01)\n"
    )
    now = 0.0
    limits: list[float] = []
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: now))
    names = ["0", "1", "2"]
    what = ["never", "never", "saves"]
    started = [
        Process(tool, [str(tmp_path / name), does], ranks=1, log=tmp_path / f"{name}.txt")
        for name, does in zip(names, what, strict=True)
    ]
    while len(list(tmp_path.glob("*_started"))) < len(names):
        time.sleep(0.01)
    wait = subprocess.Popen.wait

    def waited(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        nonlocal now
        if timeout is None:
            return wait(process)
        while len(list(tmp_path.glob("*_asked"))) < len(names):
            time.sleep(0.01)
        limits.append(timeout)
        if process is started[2]._process:
            return wait(process)
        now += timeout
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", waited)
    Process.stop(started)
    # One time limit for all of them.
    assert limits == [1.0, 0.0, 0.0]
    assert [process.wait().status for process in started] == [-9, -9, 3]


class Ended:
    """A process that has ended as torchrun does whenever a rank fails."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def poll(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("ranks", "limit", "share"),
    [(1, None, None), (2, None, "8"), (4, None, "4"), (32, None, "1"), (2, 4, "2"), (2, 1, "1"), (1, 4, None)],
)
def test_ranks_share_the_cores(
    ranks: int, limit: int | None, share: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a container may take, where it has a limit."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(cpu_cores, "cpu_limit", lambda: limit)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert _environment(ranks).get("OMP_NUM_THREADS") == share
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert _environment(ranks)["OMP_NUM_THREADS"] == "3"


def test_only_what_cannot_run_here_needs_another_device(tmp_path: Path) -> None:
    rungs = [Rung(name=name, overrides=(f"{name}=1",)) for name in ("large", "larger", "broken", "far", "odd")]
    ladder = Ladder(description="d", baseline=Rung(name="base"), rungs=tuple(rungs))
    ledger = Ledger(ladder, LadderSettings(seeds=0), [], [], "cuda", LedgerFolder(tmp_path), tmp_path)
    for name, log in (("large", OUT_OF_MEMORY), ("broken", TORCHRUN)):
        (tmp_path / name).write_text(log)
        ledger.selection.failed[name] = ProcessResult(1, 1.0, tmp_path / name).reason()
    larger = tmp_path / "larger"
    larger.write_text("error: data.global_batch_size: 1 x NVIDIA H200 is out of memory with 64; raise it\n")
    ledger.selection.exclude(
        next(arm for arm in ledger.selection.arms() if arm.name == "larger"), ProcessResult(2, 1.0, larger)
    )
    ledger.selection.impossible |= {"far": "precision: tf32 needs CUDA from Ampere on", "odd": "model: has no head"}

    def states() -> dict[str, str]:
        return {arm["name"]: state(arm) for arm in collect(ledger, "vit")["arms"] if arm["name"] != "base"}

    # Here is CUDA: another card may do.
    there = dict.fromkeys(("large", "larger", "broken"), "failed") | dict.fromkeys(("far", "odd"), "cannot run here")
    assert states() == there
    ledger.selection.impossible["odd"] = (
        "speed.allocator: keep needs CPU and this run is on CUDA; use speed.allocator=default"
    )
    assert states() == there
    ledger.device = "cpu"
    assert states() == {**there, "far": "needs CUDA"}
    assert collect(ledger, "vit")["arms"][3]["reason"] == "RuntimeError: boom"


def test_the_matrix_product_of_each_round_is_kept(tmp_path: Path) -> None:
    """The machine's speed may differ from round to round; of folders with a round without it nothing is kept."""
    ladder = Ladder(description="d", baseline=Rung(name="base"), rungs=(Rung(name="same"),))
    ledger = Ledger(ladder, LadderSettings(seeds=0, rounds=2), [], [], "cpu", LedgerFolder(tmp_path), tmp_path)
    train = {"step_seconds_each": [[0.1]], "images_per_step": 8, "images_per_second": 80.0}
    about = dict.fromkeys(("precision", "switches", "memory_peak_bytes"), None)
    sizes = {"train_image_size": 8, "train_forward_flops_per_image": 1, "time": 0.0, "device": "cpu"}
    for number, flops in enumerate((2e11, 1e11)):
        file = ledger.folder.timing_file(ledger.selection.arms()[0], number)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"train": train, "matmul": {"flops_per_second": flops}, **about, **sizes})
    assert collect(ledger, "vit")["arms"][0]["timing"]["matmul_flops_per_second"] == [2e11, 1e11]
    write_json(file, {"train": train, **about, **sizes})
    assert collect(ledger, "vit")["arms"][0]["timing"]["matmul_flops_per_second"] is None
    # A power failure may cut a file, or leave zeros.
    for damaged in (file.read_bytes()[:99], b"", b"\0" * 99, b"[]"):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=r"^output: .*round_1\.json is damaged \(.*\); remove it, and it is"):
            collect(ledger, "vit")
    file.unlink()
    assert collect(ledger, "vit")["arms"][0]["timing"]["rounds"] == [80.0]


def make_run(path: Path, wrong: int) -> None:
    """A finished run that got the first so many of 100 images wrong."""
    labels = np.zeros(100, dtype=np.int64)
    predicted = (np.arange(100) < wrong).astype(np.int64)
    folder = RunFolder(path)
    folder.create()
    ones = np.ones(100, np.float32)
    Predictions(np.arange(100), labels, predicted, ones, ones).save(folder.predictions)
    final = {"top1": 100.0 - wrong, "top5": 100.0, "loss": 0.1, "count": 100, "weights": "model", "split": "val"}
    sizes = {"steps": 1, "epochs": 1.0, "wall_seconds": 1.0, "images_per_second": 1.0, "memory_peak_bytes": None}
    folder.write_json("summary.json", {"final": final, "best": {"top1": 100.0 - wrong}, **sizes})


def test_runs_are_compared_in_both_columns(tmp_path: Path) -> None:
    rungs = tuple(Rung(name=name, overrides=(f"{name}=1",)) for name in ("same", "worse", "far", "last"))
    ladder = Ladder(description="d", baseline=Rung(name="base"), rungs=rungs)
    ledger = Ledger(ladder, LadderSettings(seeds=3), [], [], "cpu", LedgerFolder(tmp_path), tmp_path)
    log = tmp_path / "far.txt"
    log.write_text("error: needs CUDA\n")
    ledger.selection.exclude(
        next(arm for arm in ledger.selection.arms() if arm.name == "far"), ProcessResult(status=2, seconds=1.0, log=log)
    )
    wrong = {"base": (5, 7, 6), "same": (5, 7, 6), "worse": (25, 28, 26), "last": (26, 27)}
    for arm in ledger.selection.arms():
        for seed, count in enumerate(wrong.get(arm.name, ())):
            make_run(ledger.folder.run_dir(arm, seed), count)
    arms = {arm["name"]: arm["training"] for arm in collect(ledger, "vit")["arms"]}
    assert arms["far"] is None
    assert "against_before" not in arms["base"]
    assert arms["same"]["against_reference"]["verdict"]["finding"] == "identical"
    first, before = (arms["worse"][key] for key in ("against_reference", "against_before"))
    assert (first["reference"], before["reference"]) == ("base", "same")
    assert [pair["difference"] for pair in first["images"]] == pytest.approx([-20.0, -21.0, -20.0])
    # The same runs twice, and one verdict.
    assert first["verdict"] == before["verdict"]
    assert first["verdict"]["finding"] == "loss"
    last = arms["last"]["against_before"]
    assert (last["reference"], [pair["seed"] for pair in last["images"]]) == ("worse", [0, 1])
    assert last["verdict"]["difference"] == pytest.approx(0.0)
    assert last["verdict"]["seeds"] == 2
    # Without a run's images its pair is left out.
    (ledger.folder.run_dir(ledger.selection.arms()[-1], 0) / "predictions.npz").unlink()
    last = collect(ledger, "vit")["arms"][-1]["training"]["against_before"]
    assert [pair["seed"] for pair in last["images"]] == [1]
