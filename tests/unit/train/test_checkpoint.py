"""Checkpoints on disk: whole or not there, and what is wrong with them is said."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from pycls_fast.errors import UserError
from pycls_fast.files import checkpoints, step_of
from pycls_fast.parallel.world import ALONE
from pycls_fast.train import checkpoint, saving
from pycls_fast.train.run_state import Run
from pycls_fast.train.saving import Saver
from tests.factories import assert_same_bits, load_checkpoint, save_checkpoint


def state(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "model": {"blocks.0.weight": torch.randn(50, 50), "count": torch.tensor(7)},
        "ema": None,
        "optimizer": {
            "blocks.0.weight": {"exp_avg": torch.randn(50, 50).bfloat16(), "step": torch.tensor(3.0), "n": 4}
        },
        "loss_scaler": {"scale": 2.0**-14},
        "classes": ["a", "b"],
    }


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_round_trip_has_the_same_bits(tmp_path: Path) -> None:
    saved = state(3)
    opened = checkpoint.open_checkpoint(save_checkpoint(saved, tmp_path, 3, keep=2))
    loaded = load_checkpoint(opened.path)
    del loaded["format"]
    assert_same_bits(loaded, saved)
    # The optimizer's to the host: the device, here one without memory, may have no room for it.
    model = {"blocks.0.weight": torch.empty(50, 50, device="meta")}
    path = "optimizer/blocks.0.weight/exp_avg"
    assert opened.empty_optimizer_state(model)[path].is_meta
    into = opened.empty_optimizer_state(model, on_host=True)
    opened.read(into)
    assert torch.equal(into[path], saved["optimizer"]["blocks.0.weight"]["exp_avg"])


def test_lists_of_tensors_in_an_optimizers_state(tmp_path: Path) -> None:
    # A matrix for each axis, and none for one that is too long, as SOAP has them.
    saved = {"optimizer": {"weight": {"Q": [torch.randn(3, 3), [], torch.randn(5, 5)], "pair": [[torch.ones(2)], 4]}}}
    loaded = load_checkpoint(save_checkpoint(saved, tmp_path, 1, keep=2))
    assert_same_bits(loaded["optimizer"], saved["optimizer"])


def test_the_8_bit_state_of_torchao(tmp_path: Path) -> None:
    subclass = pytest.importorskip("torchao.optim.subclass_8bit").OptimState8bit
    moment = subclass.zeros((16, 32), signed=False)
    moment.codes.random_(0, 255)
    moment.scale.uniform_()
    saved = {"optimizer": {"weight": {"exp_avg_sq": moment}}}
    loaded = load_checkpoint(save_checkpoint(saved, tmp_path, 1, keep=2))["optimizer"]["weight"]["exp_avg_sq"]
    assert type(loaded) is subclass
    assert loaded.signed is False
    assert torch.equal(loaded.codes, moment.codes)
    assert torch.equal(loaded.dequantize(), moment.dequantize())


def test_best_outlives_its_turn_and_no_longer(tmp_path: Path) -> None:
    saving.keep_as_best(save_checkpoint(state(1), tmp_path, 1, keep=2))
    for step in (2, 3, 4):
        save_checkpoint(state(step), tmp_path, step, keep=2)
    assert names(tmp_path) == ["best", "step_000000001", "step_000000003", "step_000000004"]
    assert load_checkpoint(tmp_path / "best")["step"] == 1
    saving.keep_as_best(tmp_path / "step_000000004")
    saving.retire(tmp_path, 2)
    assert names(tmp_path) == ["best", "step_000000003", "step_000000004"]
    assert load_checkpoint(tmp_path / "best")["step"] == 4
    # The run folder may be moved, and copied with a folder for the link.
    shutil.move(tmp_path, tmp_path.with_name("moved"))
    moved = tmp_path.with_name("moved")
    assert load_checkpoint(moved / "best")["step"] == 4
    copied = Path(shutil.copytree(moved, tmp_path.with_name("copied"), symlinks=False))
    saving.keep_as_best(save_checkpoint(state(5), copied, 5, keep=2))
    assert load_checkpoint(copied / "best")["step"] == 5


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("harm", [cut, lambda path: path.write_bytes(b""), Path.unlink])
@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "state.json"])
def test_damaged_ones_are_passed_over_with_a_warning(tmp_path: Path, harm: Callable[[Path], None], file: str) -> None:
    good = save_checkpoint(state(1), tmp_path, 1, keep=2)
    bad = save_checkpoint(state(2), tmp_path, 2, keep=2)
    harm(bad / file)
    warnings: list[str] = []
    found = checkpoint.newest(tmp_path, warnings.append)
    assert found.path == good
    (warning,) = warnings
    assert warning.startswith(f"{bad}: ")
    assert warning.endswith("; taking the one before it")
    with pytest.raises(UserError, match=r"cannot be read|no such"):
        load_checkpoint(bad)


def test_one_of_another_version_is_one_line(tmp_path: Path) -> None:
    file = save_checkpoint(state(1), tmp_path, 1, keep=2) / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 3}))
    with pytest.raises(UserError, match=r"cannot be read \(format 3, not 4: it is of another version of pycls_fast\)"):
        load_checkpoint(file.parent)


def test_a_state_without_what_its_owners_read_is_one_line(tmp_path: Path) -> None:
    step = SimpleNamespace(optimizer=None, weights=SimpleNamespace(load_state_dict=dict))
    run: Any = SimpleNamespace(step=step, world=ALONE, state=lambda: {"model": {}})
    opened: Any = SimpleNamespace(
        path=tmp_path, empty_optimizer_state=lambda *_, **__: {}, check_fits=lambda *_: None, read=lambda _: None,
        state=lambda _: {},
    )  # fmt: skip
    with pytest.raises(UserError, match=r"the checkpoint is damaged, its state.json .*'model'.*; take another one$"):
        Run.load_state(run, opened)


def test_none_whole_is_no_new_beginning(tmp_path: Path) -> None:
    """What is saved from step 0 on would be retired before those with higher numbers."""
    for step in (900, 1000):
        cut(save_checkpoint(state(step), tmp_path, step, keep=2) / "__0_0.distcp")
    with pytest.raises(UserError) as caught:
        checkpoint.newest(tmp_path, pytest.fail)
    first, second, last = caught.value.lines
    assert first.startswith(f"{tmp_path / 'step_000001000'}: the checkpoint cannot be read")
    assert second.startswith(f"{tmp_path / 'step_000000900'}: the checkpoint cannot be read")
    assert last.startswith(f"run_dir: none of the checkpoints in {tmp_path} can be resumed from; repair one, or use")


def test_a_full_disk_leaves_the_ones_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = save_checkpoint(state(1), tmp_path, 1, keep=2)
    line = r"step_000000002: the checkpoint could not be written \(No space left on device\); those before it"
    for function in ("_begin", "_write_tensors", "_publish"):
        with monkeypatch.context() as patch:
            patch.setattr(saving, function, Mock(side_effect=OSError(28, "No space left on device")))
            with pytest.raises(UserError, match=line):
                save_checkpoint(state(2), tmp_path, 2, keep=2)
        assert list(tmp_path.iterdir()) == [good]


def test_leftovers_of_killed_saves_are_not_taken_and_go_away(tmp_path: Path) -> None:
    whole = save_checkpoint(state(8), tmp_path / "other", 8, keep=2)
    # As whole as it can be: only the name is missing.
    leftover = tmp_path / ".step_000000009.12345678.tmp"
    shutil.copytree(whole, leftover)
    assert checkpoint.newest(tmp_path, print) is None
    save_checkpoint(state(1), tmp_path, 1, keep=2)
    assert names(tmp_path) == ["other", "step_000000001"]


def test_never_written_over_a_checkpoint(tmp_path: Path) -> None:
    first, second = state(3), state(3)
    save_checkpoint(first, tmp_path, 3, keep=2)
    save_checkpoint(second, tmp_path, 3, keep=2)
    for path, saved in ((tmp_path / "step_000000003", second), (tmp_path / "set_aside_step_000000003", first)):
        assert torch.equal(load_checkpoint(path)["model"]["blocks.0.weight"], saved["model"]["blocks.0.weight"])


def test_later_ones_are_set_aside(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_checkpoint(state(step), tmp_path, step, keep=5)
    saving.keep_as_best(tmp_path / "step_000000003")
    moved = saving.set_aside(tmp_path, 1)
    assert sorted(path.name for path in moved) == ["set_aside_step_000000002", "set_aside_step_000000003"]
    assert [step_of(path) for path in checkpoints(tmp_path)] == [1]
    assert not (tmp_path / "best").is_symlink()


def test_no_code_is_run_from_a_checkpoint(tmp_path: Path) -> None:
    class Malicious:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path / 'ran'}",)

    path = save_checkpoint(state(1), tmp_path, 1, keep=2)
    (path / ".metadata").write_bytes(pickle.dumps(Malicious()))
    with pytest.raises(UserError, match=r"cannot be read \(UnpicklingError: posix.system is not allowed"):
        load_checkpoint(path)
    assert not (tmp_path / "ran").exists()


def test_a_copy_is_saved_whatever_training_does_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = state(5)
    before = saved["model"]["blocks.0.weight"].clone()
    saver = Saver(tmp_path, ALONE, keep=2, asynchronous=True)
    write = saving.write

    def late(*arguments: Any, **settings: Any) -> Path:
        saved["model"]["blocks.0.weight"].zero_()
        return write(*arguments, **settings)

    monkeypatch.setattr(saving, "write", late)
    with saver:
        saver.save(saved, 5)
        done = saver.finish()
    assert torch.equal(load_checkpoint(done)["model"]["blocks.0.weight"], before)
