"""Checkpoints on disk: whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from pycls_fast.errors import UserError
from pycls_fast.train import checkpoint


def state(step: int) -> dict[str, object]:
    return {"step": step, "model": {"weight": torch.randn(50, 50)}, "classes": ["a", "b"]}


def test_keeps_the_newest(tmp_path: Path) -> None:
    for step in (5, 10, 100, 95):
        checkpoint.save(state(step), tmp_path, step, keep=2)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == [
        "step_000000100.pt",
        "step_000000095.pt",
    ]


def test_round_trip_has_the_same_bits(tmp_path: Path) -> None:
    saved = state(3)
    loaded = checkpoint.load(checkpoint.save(saved, tmp_path, 3, keep=2))
    assert torch.equal(loaded["model"]["weight"], saved["model"]["weight"])  # type: ignore[index]
    assert loaded["step"] == 3


def test_best_outlives_its_checkpoint(tmp_path: Path) -> None:
    checkpoint.keep_as_best(checkpoint.save(state(1), tmp_path, 1, keep=2))
    for step in (2, 3, 4):
        checkpoint.save(state(step), tmp_path, step, keep=2)
    assert checkpoint.load(tmp_path / "best.pt")["step"] == 1
    checkpoint.keep_as_best(tmp_path / "step_000000004.pt")
    assert checkpoint.load(tmp_path / "best.pt")["step"] == 4


def test_best_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError("this file system has no links")

    monkeypatch.setattr(os, "link", refuse)
    checkpoint.keep_as_best(checkpoint.save(state(1), tmp_path, 1, keep=2))
    assert checkpoint.load(tmp_path / "best.pt")["step"] == 1


def cut(data: bytearray) -> bytes:
    return bytes(data[: len(data) // 2])


def flip_one_bit(data: bytearray) -> bytes:
    # In the middle of the tensor's bytes, where nothing but the checksum can notice it.
    data[len(data) // 2] ^= 1
    return bytes(data)


def nothing(data: bytearray) -> bytes:
    return b""


@pytest.mark.parametrize("harm", [cut, flip_one_bit, nothing])
def test_damaged_file_is_passed_over_with_a_warning(tmp_path: Path, harm: object) -> None:
    good = checkpoint.save(state(1), tmp_path, 1, keep=2)
    bad = checkpoint.save(state(2), tmp_path, 2, keep=2)
    bad.write_bytes(harm(bytearray(bad.read_bytes())))  # type: ignore[operator]
    warnings: list[str] = []
    assert checkpoint.newest(tmp_path, warnings.append) == good
    (warning,) = warnings
    assert warning.startswith(f"{bad}: the checkpoint is damaged (")
    with pytest.raises(UserError, match="the checkpoint is damaged"):
        checkpoint.load(bad)


def test_a_save_that_dies_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = checkpoint.save(state(1), tmp_path, 1, keep=2)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match=r"step_000000002.pt: the checkpoint could not be written .*No space left"):
        checkpoint.save(state(2), tmp_path, 2, keep=2)
    assert list(tmp_path.iterdir()) == [good]


def test_leftovers_of_a_killed_save_are_not_taken_and_go_away(tmp_path: Path) -> None:
    leftover = tmp_path / ".step_000000009.pt.123.tmp"
    leftover.write_bytes(b"half a file")
    assert checkpoint.newest(tmp_path, print) is None
    checkpoint.save(state(1), tmp_path, 1, keep=2)
    assert not leftover.exists()


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.pt"
    torch.save({"weights": torch.ones(2)}, other)
    with pytest.raises(UserError, match="not a checkpoint of pycls_fast"):
        checkpoint.load(other)
    with pytest.raises(UserError, match="no such checkpoint"):
        checkpoint.load(tmp_path / "missing.pt")


def test_no_code_is_run_from_a_file(tmp_path: Path) -> None:
    class Malicious:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path / 'ran'}",)

    torch.save({"format": checkpoint.FORMAT, "model": Malicious()}, tmp_path / "bad.pt")
    with pytest.raises(UserError, match="not a checkpoint that can be read"):
        checkpoint.load(tmp_path / "bad.pt")
    assert not (tmp_path / "ran").exists()
