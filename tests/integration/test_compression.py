"""Gradients exchanged as low-rank matrices: what was left out survives a restart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.factories import load_checkpoint
from tests.integration.runs import TINY, command, records, run_process, under_torchrun

KEYS = (
    *TINY,
    "parallel=ddp",
    "parallel.compression=powersgd",
    "parallel.powersgd_start_step=4",
    "schedule.max_steps=12",
    "schedule.epochs=1",
    "optim.ema_decay=null",
    "runtime.checkpoint_every_steps=8",
)


@pytest.mark.slow
def test_a_resumed_run_carries_on_what_was_left_out(tmp_path: Path, digits: Path) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    run_process(under_torchrun(command(*KEYS, f"data.root={digits}", f"run_dir={first}"), 2), cwd=tmp_path)
    saved = first / "checkpoints" / "step_000000008"
    carried = load_checkpoint(saved, ("compression",))["compression"]
    assert any(value.abs().max() > 0 for value in carried.values())
    again = command(*KEYS, f"data.root={digits}", f"run_dir={second}", f"resume={saved}")
    run_process(under_torchrun(again, 2), cwd=tmp_path)
    ours, theirs = ([r["loss"] for r in records(run, "train") if r["step"] > 8] for run in (second, first))
    assert len(ours) == 4
    assert ours == pytest.approx(theirs, abs=1e-6)
    ends = [load_checkpoint(run / "checkpoints" / "step_000000012", ("model",))["model"] for run in (second, first)]
    for name, value in ends[0].items():
        torch.testing.assert_close(value, ends[1][name], rtol=0, atol=1e-6)
    # One process has nothing to exchange, and takes the checkpoint all the same.
    run_process(command(*KEYS, f"data.root={digits}", f"run_dir={third}", f"resume={saved}"), cwd=tmp_path)
    assert [r["step"] for r in records(third, "train")] == [9, 10, 11, 12]
