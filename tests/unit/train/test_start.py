"""What is told at the start of a run, and on the terminal."""

from __future__ import annotations

import errno
import io
import os
import re
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pycls_fast import build
from pycls_fast.data.sources.arrays import SyntheticImages
from pycls_fast.errors import UserError
from pycls_fast.plan.race import Race
from pycls_fast.train import start
from pycls_fast.train.agreement import check_same_settings
from pycls_fast.train.display import Display, plain_table, wide_console
from pycls_fast.train.start import _notes
from tests.factories import config_of

SOURCES = {"train": SyntheticImages(4, 8, 2, 0)}


@pytest.fixture(autouse=True)
def race(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine both formats are equally fast."""
    monkeypatch.setattr(start, "race", lambda config: Race("fp32", 1.0, None, 0.0))


def noted(*overrides: str, size: int = 1) -> list[str]:
    """The notes of a run of 100 steps on so many ranks."""
    config = config_of(*overrides)
    world = SimpleNamespace(size=size, data_size=1, device=torch.device("cpu"), is_main=True)
    parts = SimpleNamespace(speed=build.switches(config, world.device), sources=SOURCES)
    run: Any = SimpleNamespace(config=config, total_steps=100, world=world, parts=parts, classes=["a", "b"])
    return list(_notes(run))


@pytest.mark.parametrize(
    ("precision", "ratio", "told"),
    [
        ("fp32", 3.0, "precision: a step takes 3 times as long as with precision=amp_bf16 on this CPU"),
        ("amp_bf16", 0.025, "precision: a step takes 40 times as long as with precision=fp32 on this CPU"),
        ("fp32", 1.9, None),
        ("bf16", 0.6, None),
    ],
)
def test_a_precision_that_is_slow_here(
    monkeypatch: pytest.MonkeyPatch, precision: str, ratio: float, told: str | None
) -> None:
    monkeypatch.setattr(start, "race", lambda config: Race("fp32", ratio, None, 0.0))
    notes = noted(f"precision={precision}", "speed.compile=off")
    assert notes == [] if told is None else notes[0].startswith(told)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["precision=fp32"], []),
        (["precision=fp32", "speed.compile=model"], ["speed.compile: compiling"]),
        (["precision=amp_bf16", "speed.compile=off"], []),
        (["precision=fp8", "precision.fp8_emulate=true"], []),
        # 0.99 ** 100 is 0.366.
        (
            ["precision=fp32", "optim.ema_decay=0.99", "optim.ema_warmup=false"],
            ["optim.ema_decay: after all 100 steps the initial weights are still 37% of the average"],
        ),
        (["precision=fp32", "optim.ema_decay=0.95", "optim.ema_warmup=false"], []),
        (["precision=fp32", "optim.ema_decay=0.99"], []),
    ],
)
def test_notes(overrides: list[str], told: list[str]) -> None:
    for note, begins in zip(noted(*overrides), told, strict=True):
        assert note.startswith(begins)


@pytest.mark.parametrize(("degree", "memory", "told"), [("tensor", "1GB", 1), ("pipeline", "0.1MB", 0)])
def test_a_degree_that_is_not_needed(degree: str, memory: str, told: int) -> None:
    ranks = [f"parallel.{degree}_degree=2", "optim.accumulation_steps=2", f"runtime.device_memory={memory}"]
    notes = noted("precision=fp32", "speed.compile=off", *ranks, size=2)
    assert len(notes) == told
    assert all(f"a step fits with parallel.{degree}_degree=1," in note for note in notes)


class Failing(io.StringIO):
    """A terminal that is gone, or a file on a full disk."""

    def __init__(self, number: int, *, at: str) -> None:
        super().__init__()
        self.error = OSError(number, os.strerror(number))
        self.at = at

    def write(self, text: str) -> int:
        if self.at == "write":
            raise self.error
        return super().write(text)

    def flush(self) -> None:
        if self.at == "flush":
            raise self.error


@pytest.mark.parametrize("at", ["write", "flush"])
@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("mode", ["plain", "bar"])
def test_output_that_fails(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], mode: str, number: int, at: str
) -> None:
    monkeypatch.setattr("sys.stdout", Failing(number, at=at))
    record = {"step": 1, "loss": 1.0, "lr": 0.1, "images_per_second": 1.0, "epoch": 0.1}
    with Display(speaks=True, mode=mode) as display:
        display.table("title", [("a", "b")])
        display.begin_training(0, 2)
        display.training(record, 2, epochs=1, seconds_left=1)
        display.advance(2)
        display.warn("text")
        display.note("text")
    (line,) = capfd.readouterr().err.splitlines()
    assert line == f"warning: standard output failed ({os.strerror(number)}); nothing more is shown"


def test_square_brackets_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(speaks=True, mode="plain")
    display.table("[title]", [("run folder", "/data/[old]/:car:/x\\")])
    wide_console().print(plain_table([{"[images/s]": "optim.trainable=[head]"}]))
    out = capsys.readouterr().out
    for text in ("[title]", "/data/[old]/:car:/x\\", "optim.trainable=[head]", "[images/s]"):
        assert text in out


@pytest.mark.parametrize("mode", ["plain", "auto"])
def test_without_standard_output(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """As Python has it where a process was started with the descriptor closed."""
    monkeypatch.setattr("sys.stdout", None)
    with Display(speaks=True, mode=mode) as display:
        display.table("vit", [("steps", "7")])
        display.note("done")


@pytest.mark.parametrize("columns", ["80", "200"])
@pytest.mark.parametrize("total", [44, 1_234_567])
def test_a_bar_fits_the_terminal_and_leaves_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str, total: int
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", "xterm")
    record = {"step": 40, "loss": 1.2345, "lr": 0.1, "images_per_second": 12345.6, "epoch": 123.4}
    with ExitStack() as interrupted, Display(speaks=True, mode="bar") as display:
        display.begin_training(0, total)
        display.training(record, total, epochs=300, seconds_left=1)
        interrupted.enter_context(display.scoring("evaluating val", 50_000))
        said = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
        display.note("run folder: here")
    rows = said.splitlines()
    evaluating = next(row for row in rows if "evaluating val" in row)
    assert " 0/50000 " in evaluating
    training = next(row for row in reversed(rows) if "epoch 123.4/300" in row)
    assert f"40/{total}" in training
    assert "loss 1.2345" in training
    assert ("lr 1.00e-01" in training) == (columns == "200")
    after = capsys.readouterr().out.rpartition("run folder: here")[2]
    # The bar is drawn once more and then erased, line by line.
    assert after.endswith("\x1b[1A\x1b[2K" * 2)


def test_scoring_is_told_of_without_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("pycls_fast.train.display._PATIENCE", 0.0)
    with Display(speaks=True, mode="plain").scoring("features of train", 1_500) as advance:
        advance(1_000)
    assert capsys.readouterr().out == "features of train: 1,000 of 1,500 images\n"


@pytest.mark.parametrize(("key", "same"), [("weights", True), ("distill.teacher", True), ("seed", False)])
def test_only_paths_may_differ_between_nodes(key: str, same: bool) -> None:
    gathered: list[Any] = []
    world: Any = SimpleNamespace(gather=lambda value: gathered.append(value) or gathered)
    for value in (1, 2):
        config = config_of(f"{key}={'/node' if same else ''}{value}")
        with nullcontext() if same or not gathered else pytest.raises(UserError, match="seed: 2 on rank 1"):
            check_same_settings(config, world)


@pytest.mark.parametrize(
    ("counts", "told"),
    [([3, 3], "2 classes, 3 of each"), ([120, 20, 60], "3 classes, most of a (120), fewest of b\xe9 (20)")],
)
def test_the_table_has_the_rarest_and_the_commonest_class(counts: list[int], told: str) -> None:
    source: Any = SimpleNamespace(class_counts=lambda: np.array(counts), classes=("a", "b\xe9", "c"))
    assert start._classes(source) == told


@pytest.mark.parametrize(
    ("overrides", "called"),
    [
        (["model=deit_s16"], "deit_s16"),
        (["model=vit_s16", "model.drop_path=0.1", "data.image_size=224"], "vit_s16"),
        (["model.depth=3"], "vit"),
        (["model=timm", "model.name=convnext_tiny.fb_in22k"], "convnext_tiny.fb_in22k (timm)"),
    ],
)
def test_the_table_has_the_name_of_the_model(overrides: list[str], called: str) -> None:
    assert config_of(*overrides).model.called == called
