"""Which process this is, by what started it."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pycls_fast.errors import UserError
from pycls_fast.parallel.launch import choose_device, start_world
from pycls_fast.parallel.rendezvous import open_store
from pycls_fast.parallel.world import World


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


def test_models_that_do_not_divide_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    world = start_world(device="cpu", backend="auto", timeout_seconds=60, strategy="fsdp", tensor_degree=4)
    with pytest.raises(UserError, match=r"use parallel.tensor_degree=3, or 8 ranks$"), world:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_a_node_that_does_not_come(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int
) -> None:
    """One line and a status at which a launcher starts again."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for name, value in (("RANK", rank), ("WORLD_SIZE", 3), ("LOCAL_RANK", 0), ("MASTER_PORT", store.port)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    second = timedelta(seconds=1)
    monkeypatch.setattr(
        "pycls_fast.parallel.launch.open_store", lambda rank, size, timeout: open_store(rank, size, second)
    )
    with (
        pytest.raises(SystemExit) as ended,
        start_world(device="cpu", backend="auto", timeout_seconds=60, strategy="ddp"),
    ):
        pass
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        f"error: rank {rank}: not all 3 ranks have started (waited 1 s for rank {1 - rank}); the reason may be in the "
        "output of the other nodes\n"
    )


@pytest.mark.parametrize(
    ("variables", "count", "index"),
    [
        ({}, 8, 3),
        # Slurm's --gpus-per-task=1, from release 23.11 on in the second form: each task sees one GPU as number 0.
        ({"SLURM_GPUS_PER_TASK": "1"}, 1, 0),
        ({"SLURM_TRES_PER_TASK": "cpu:12,gres/gpu:1"}, 1, 0),
        ({"SLURM_TRES_PER_TASK": "cpu:12"}, 8, 3),
        ({"SLURM_TRES_PER_TASK": "cpu:12"}, 1, None),
        # torchrun in one task: its ranks would share the GPU.
        ({"SLURM_GPUS_PER_TASK": "1", "TORCHELASTIC_RUN_ID": "7"}, 1, None),
        ({}, 2, None),
    ],
)
def test_the_gpu_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], count: int, index: int | None
) -> None:
    """Of local rank 3; None: there is none for it."""
    for name in ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    if index is not None:
        assert choose_device("auto", 3) == torch.device("cuda", index)
        return
    with pytest.raises(UserError, match=f"4 or more ranks on a node that shows each of them {count} CUDA devices"):
        choose_device("auto", 3)


def test_ranks_that_share_a_model_see_the_same_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks, two to a model: what is counted over images is counted once for each two."""
    monkeypatch.setattr(dist, "all_reduce", lambda values: values)
    worlds = [World(rank, 4, torch.device("cpu"), tensor=2) for rank in range(4)]
    assert [(world.data_rank, world.data_size) for world in worlds] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [world.sum(torch.tensor(7)).item() for world in worlds] == [7, 0, 7, 0]
