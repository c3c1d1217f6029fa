"""Mistakes that only the data, the files or the machine can show: one clear line each, nothing left behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from pycls_fast.config import load_config
from pycls_fast.errors import UserError
from pycls_fast.train import train, validation
from pycls_fast.train.step import Step
from tests.factories import class_folders
from tests.integration.runs import TINY, newest_checkpoint, records, run


def good(root: Path) -> None:
    for split in ("train", "val"):
        class_folders(root / split, cat=4, dog=4)


@pytest.mark.parametrize(
    ("overrides", "pattern"),
    [
        (["data.root=nowhere"], r"^data\.root: .* cannot be read \(No such file or directory\); give another"),
        (["data.global_batch_size=64"], r"^data\.global_batch_size: 64 is larger than the training set of 8 images"),
        (["weights=/nowhere/at/all"], r"^weights: /nowhere/at/all is neither"),
        (["runtime.device=cuda"], r"^runtime.device: cuda was asked for but torch finds no CUDA device"),
        (["run_dir=file/run"], r"^run_dir: .*file/run cannot be written .* or give another"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], pattern: str
) -> None:
    good(tmp_path / "images")
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    for own in ([], ["run_dir=mine/run"]):
        settings = [*TINY, "data=folder", "data.root=images", "data.global_batch_size=4", *own, *overrides]
        with pytest.raises(UserError, match=pattern) as caught:
            train(load_config("vit_digits", settings))
        assert len(caught.value.lines) == 1
        assert {path.name for path in tmp_path.iterdir()} == {"images", "file"}


def damage(digits: Path, folder: Path, every: int) -> tuple[Path, list[Path]]:
    """A copy of the digits in which every n-th file is cut off or is no picture."""
    shutil.copytree(digits, folder)
    bad = sorted(folder.rglob("*.png"))[::every]
    for number, path in enumerate(bad):
        path.write_bytes(path.read_bytes()[:40] if number % 2 else b"<html>not found</html>")
    return folder, bad


@pytest.mark.slow
def test_damaged_images_are_named_and_skipped(tmp_path: Path, digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, bad = damage(digits, tmp_path / "images", every=90)
    assert run(tmp_path / "run", root, "data.max_damaged=30", "schedule.epochs=3") == 0
    events = records(tmp_path / "run", "event")
    assert sorted(event["name"] for event in events) == sorted(map(str, bad))
    printed = capsys.readouterr().out
    for path in bad:
        assert printed.count(f"warning: {path}: ") == 1
    assert f"{len(bad)} damaged images were skipped; " in printed.splitlines()[-2]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["damaged_images"] == len(bad)
    # Validation counts what could be scored, nothing else.
    counts = {record["count"] for record in records(tmp_path / "run", "eval")}
    assert len(counts) == 1
    assert 359 - len(bad) <= counts.pop() < 359


@pytest.mark.slow
def test_too_many_damaged_images_stop_the_run(tmp_path: Path, digits: Path) -> None:
    root, bad = damage(digits, tmp_path / "images", every=40)
    with pytest.raises(UserError) as caught:
        run(tmp_path / "run", root, "data.max_damaged=5")
    first, *listed = caught.value.lines
    assert first.startswith("data.max_damaged: ")
    assert "images cannot be read, more than 5:" in first
    assert len(listed) > 5
    assert {line.partition(": ")[0] for line in listed[:20]} <= set(map(str, bad))
    # Nothing is lost: with a higher limit the run goes on from where it stopped.
    stopped_at = newest_checkpoint(tmp_path / "run")["step"]
    assert run(tmp_path / "run", root, "data.max_damaged=50") == 0
    assert [record["step"] for record in records(tmp_path / "run", "train")] == list(range(1, 45))
    assert stopped_at > 0
    # An image that the second process meets again is written down once.
    named = [event["name"] for event in records(tmp_path / "run", "event") if event["event"] == "damaged image"]
    assert sorted(named) == sorted(map(str, bad))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["damaged_images"] == len(bad)


def test_no_image_is_left_to_evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good(tmp_path / "images")
    for path in (tmp_path / "images" / "val").rglob("*.*"):
        path.write_bytes(b"<html>not found</html>")
    settings = [*TINY, "data=folder", "data.global_batch_size=4", f"data.root={tmp_path / 'images'}",
                "data.num_workers=0", f"run_dir={tmp_path / 'run'}"]  # fmt: skip
    with pytest.raises(UserError, match=r"^val: no image can be read; repair them"):
        train(load_config("vit_digits", settings))
    assert capsys.readouterr().out.count("left out") == 8
    assert newest_checkpoint(tmp_path / "run")["step"] == 2


def test_memory_that_does_not_suffice(tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For an evaluation in batches of its own, either."""
    with monkeypatch.context() as patched:
        patched.setattr(validation, "evaluate", lambda *arguments: torch.empty(2**60))
        with pytest.raises(UserError, match=r"^data.eval_batch_size: cpu is out of memory with 512 images at a time"):
            run(tmp_path / "evaluated", digits, "data.eval_batch_size=512", "schedule.max_steps=1")
    monkeypatch.setattr(Step, "__call__", lambda *arguments: torch.empty(2**60))
    line = r"^data.global_batch_size: 1 x cpu is out of memory with 64; use optim.accumulation_steps=2"
    with pytest.raises(UserError, match=line):
        run(tmp_path / "run", digits)
