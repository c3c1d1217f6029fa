"""The files of a run folder, after accidents as well."""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pycls_fast.config import load_config
from pycls_fast.errors import UserError
from pycls_fast.parallel import ALONE
from pycls_fast.train import start
from pycls_fast.train.display import Display
from pycls_fast.train.folder import RunFolder
from pycls_fast.train.metrics import Clock, TrainMetrics
from pycls_fast.train.pictures import draw_curves
from pycls_fast.train.resume import choose_run_dir
from tests.unit.train.test_evaluation import CPU

NUMBERS = {"loss": 1.0, "images_per_second": 10.0}


def test_values_that_are_no_numbers_become_null(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.add_record("train", 1, 0.5, loss=math.nan, grad_norm=math.inf, lr=0.1)
    (line,) = folder.metrics.read_text().splitlines()
    folder.write_json("summary.json", {"loss": math.nan, "grad_norm": -math.inf, "lr": 0.1})
    for text in (line, (tmp_path / "summary.json").read_text()):
        record = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert (record["loss"], record["grad_norm"], record["lr"]) == (None, None, 0.1)


def test_line_cut_off_by_a_kill_is_left_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.add_record("train", 1, 0.5, **NUMBERS)
    with folder.metrics.open("a") as file:
        file.write('{"kind": "train", "step": 2, "lo')
    assert [record["step"] for record in folder.records()] == [1]
    folder.forget_after(1)
    folder.add_record("train", 2, 1.0, **NUMBERS)
    assert [record["step"] for record in folder.records()] == [1, 2]


def test_damaged_lines_are_told_before_they_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(tmp_path)
    folder.add_record("train", 1, 0.5, **NUMBERS)
    whole = folder.metrics.read_text()
    folder.metrics.write_text(whole + '{"kind": "train", "step": "2"}\n' + whole + '{"kind": "tr')
    folder.forget_after(1)
    assert capsys.readouterr().err == f"warning: {folder.metrics}: dropped 1 damaged line\n"
    assert folder.metrics.read_text() == 2 * whole
    folder.forget_after(1)
    assert capsys.readouterr().err == ""


def test_records_are_on_disk_at_once_and_the_file_is_opened_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, system_open = [], os.open
    monkeypatch.setattr("os.open", lambda path, *more: opened.append(Path(path)) or system_open(path, *more))
    with RunFolder(tmp_path) as folder:
        for step in (1, 2, 3):
            folder.add_record("train", step, 0.5, **NUMBERS)
            assert len(folder.metrics.read_text().splitlines()) == step
        assert opened == [folder.metrics]
        # The rewritten file is another one.
        folder.forget_after(1)
        folder.add_record("train", 4, 0.5, **NUMBERS)
        assert [record["step"] for record in folder.records()] == [1, 4]


def test_forgets_steps_that_are_done_again_but_not_events(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2, 3):
        folder.add_record("train", step, step / 2, **NUMBERS)
    folder.add_record("event", 3, 1.5, event="stopped")
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
    line = rf"^run_dir: {tmp_path / name} cannot be written \(File too large\); fix this, then the same"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(UserError, match=line):
            write(RunFolder(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_links_in_the_folder_are_not_followed_when_writing(tmp_path: Path) -> None:
    (victim := tmp_path / "victim").write_text("as before")
    for name in (".lock", "metrics.jsonl", f".summary.json.{os.getpid()}.tmp"):
        run = tmp_path / f"run{name}"
        run.mkdir()
        (run / name).symlink_to(victim)
        with suppress(UserError), RunFolder(run) as folder:
            folder.occupy()
            folder.add_record("event", 1, 0.5, event="stopped")
            folder.write_json("summary.json", {})
        assert victim.read_text() == "as before"


def test_curves_are_drawn_from_records_with_gaps(tmp_path: Path) -> None:
    draw_curves([], tmp_path / "empty.png", "an experiment called a$x_$")
    train = {"kind": "train", "epoch": 1.0, "loss": None, "lr": 0.1, "images_per_second": 5.0}
    score = {
        "kind": "eval",
        "epoch": 1.0,
        "split": "val",
        "weights": "model",
        "loss": 1.0,
        "top1": 3.0,
        "top5": 9.0,
        "class_top1": 2.0,
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
    values = metrics.read(ALONE, damaged=2)
    means = {"loss": pytest.approx(2.0 / 3), "grad_norm": pytest.approx(3.0)}
    assert values == {**means, "skipped_steps": 1, "damaged": 2, "waited": 0.0}
    metrics.add_loss(torch.tensor(9.0))
    metrics.add_step(torch.tensor(1.0))
    values = metrics.read(ALONE)
    assert (values["loss"], values["damaged"]) == (9.0, 0)


def test_medians_leave_out_the_interval_that_warms_up() -> None:
    clock = Clock(intervals=[(100.0, 1.0), (2.0, 50.0), (4.0, 25.0), (3.0, 33.0)])
    assert clock.medians() == (3.0, 33.0)
    assert Clock(intervals=[(100.0, 1.0)]).medians() == (100.0, 1.0)
    assert all(math.isnan(value) for value in Clock().medians())


_HOLD = """
import sys
from pathlib import Path
from pycls_fast.train.resume import choose_run_dir
from pycls_fast.train.folder import RunFolder

with (folder := RunFolder(Path(sys.argv[1]))):
    print(folder.occupy(wait_seconds=0.0), flush=True)
    sys.stdin.readline()
"""


def _hold(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_one_run_at_a_time(tmp_path: Path) -> None:
    with _hold(tmp_path) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "None\n"
        folder = RunFolder(tmp_path)
        assert folder.occupy(wait_seconds=0.0) == f"process {first.pid} on {platform.node()}"
        # Nothing is left of it by a kill; the next one is in its place at once.
        first.kill()
        first.wait(timeout=60)
        assert folder.occupy(wait_seconds=0.0) is None
        with _hold(tmp_path) as second:
            assert second.stdout is not None
            assert second.stdout.readline() == f"process {os.getpid()} on {platform.node()}\n"
            second.communicate("\n", timeout=60)
        with folder:
            pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "number"), [("open", errno.EACCES), ("pwrite", errno.ENOSPC), ("open", errno.EROFS)])
def test_a_folder_that_cannot_be_kept_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, name, refuse)
        line = rf"^run_dir: {tmp_path} cannot be written to \({os.strerror(number)}\); give another$"
        with pytest.raises(UserError, match=line), RunFolder(tmp_path) as folder:
            folder.occupy(wait_seconds=0.0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_run_that_another_process_began_meanwhile_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder did not exist when this run looked for a checkpoint, so it could not be locked."""
    path = tmp_path / "run"
    others: list[subprocess.Popen[str]] = []

    def build_slowly(*arguments: object) -> SimpleNamespace:
        path.mkdir()
        RunFolder(path).add_record("train", 5, 0.5, loss=1.0, images_per_second=1.0)
        others.append(_hold(path))
        assert others[0].stdout is not None
        assert others[0].stdout.readline() == "None\n"
        return SimpleNamespace(world=ALONE, folder=RunFolder(path))

    at_once = partialmethod(RunFolder.occupy, wait_seconds=0.0)
    monkeypatch.setattr(RunFolder, "occupy", at_once)
    monkeypatch.setattr(start, "_build", build_slowly)
    try:
        config = load_config("vit_digits", [f"run_dir={path}"])
        with (
            pytest.raises(UserError, match="is in use by process"),
            start.started(config, ALONE, Display(speaks=False, mode="plain")),
        ):
            pass
    finally:
        for other in others:
            other.communicate("\n", timeout=60)
    assert [record["step"] for record in RunFolder(path).records()] == [5]


@pytest.mark.slow
def test_who_leaves_lets_in_who_waits(tmp_path: Path) -> None:
    with _hold(tmp_path) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "None\n"
        folder = RunFolder(tmp_path)
        threading.Timer(0.3, first.communicate, ("\n",)).start()
        with folder:
            assert folder.occupy(wait_seconds=60.0) is None
            # The file is the one that others look at, not the one that the first took along.
            with _hold(tmp_path) as third:
                assert third.stdout is not None
                assert third.stdout.readline() == f"process {os.getpid()} on {platform.node()}\n"
                third.communicate("\n", timeout=60)


def test_runs_that_start_in_the_same_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "2026-01-02_03-04-05")
    paths = [choose_run_dir(load_config("vit_digits", [f"seed={seed}"]), ALONE)[0] for seed in (0, 1)]
    assert [path.name for path in paths] == ["2026-01-02_03-04-05", "2026-01-02_03-04-05~2"]
    assert choose_run_dir(load_config("vit_digits", ["run_dir=mine"]), ALONE) == (Path("mine"), False)
    assert not Path("mine").exists()
