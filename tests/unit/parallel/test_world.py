"""Which process this is, by what started it."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from pycls_fast.parallel.world import start_world


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "0"}, True),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"}, False),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, False),
        # torchrun in each task, or the submitit launcher.
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "0", "RANK": "0", "WORLD_SIZE": "1"}, False),
        ({}, False),
    ],
)
def test_tasks_of_srun_that_nobody_joins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variables: dict[str, str], told: bool
) -> None:
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with start_world(device="cpu", backend="auto", timeout_seconds=60, strategy="single") as world:
        assert world.size == 1
    said = capsys.readouterr().err
    assert said.startswith("note: srun started 8 tasks, and each is a separate run") if told else said == ""


def test_no_run_starts_after_one_that_lost_its_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next run of a sweep: the process group of the run before it still exists."""
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with (
        pytest.raises(SystemExit) as ended,
        start_world(device="cpu", backend="auto", timeout_seconds=60, strategy="ddp"),
    ):
        pass
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("error: rank 1: an earlier run of this process lost the other ranks")
