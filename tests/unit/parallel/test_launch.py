"""Which process this is, by what started it; its place in the mesh, and its memory."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from pycls_fast.errors import UserError
from pycls_fast.parallel import launch, rendezvous
from pycls_fast.parallel.launch import choose_device, degrees, start_world
from pycls_fast.parallel.rendezvous import meet, report_mistake
from pycls_fast.parallel.world import World
from pycls_fast.strategies import Parallel

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID",
             "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK")  # fmt: skip
Variables = Callable[..., None]


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> Variables:
    """Sets what a launcher sets, and nothing of another one."""

    def set_these(**values: object) -> None:
        for name in LAUNCHERS:
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return set_these


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "0"}, True),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"}, False),
        # torchrun in each task, or the submitit launcher.
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "0", "RANK": "0", "WORLD_SIZE": "1"}, False),
    ],
)
def test_tasks_of_srun_that_nobody_joins(
    variables: Variables, capsys: pytest.CaptureFixture[str], values: dict[str, str], told: bool
) -> None:
    variables(**values)
    with start_world("cpu", Parallel(name="single")) as world:
        assert world.size == 1
    said = capsys.readouterr().err
    assert said.startswith("note: srun started 8 tasks, and each is a separate run") if told else said == ""


def test_a_rank_that_stops_once_all_have_met(
    variables: Variables, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables(RANK=0, WORLD_SIZE=2, LOCAL_RANK=0)
    monkeypatch.setattr("pycls_fast.parallel.launch.open_store", lambda rank, size, timeout: dist.HashStore())
    before = _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most - 1, most))
    try:
        with pytest.raises(SystemExit) as ended, start_world("cpu", Parallel(name="ddp", timeout_seconds=1)):
            pass
        # Many ranks have many sockets.
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("error: rank 0: the 2 ranks are not connected (")


@pytest.mark.parametrize(
    ("name", "backend", "said"),
    [
        ("hsdp", "gloo", "(gloo, bound to None, [None, None])"),
        ("hsdp", "auto", "(cpu:gloo,cuda:nccl, bound to cuda:0, [None, None])"),
        # Its exchanges have to run beside the backward pass.
        ("ddp", "auto", "(nccl, bound to cuda:0, ['0', '0'])"),
    ],
)
def test_only_nccl_is_bound_to_its_device(
    variables: Variables,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: Literal["ddp", "hsdp"],
    backend: Literal["gloo", "auto"],
    said: str,
) -> None:
    """With a device, torch splits groups, which gloo cannot."""

    def join(backends: str, *, device_id: torch.device | None, **more: Any) -> None:
        raise RuntimeError(f"{backends}, bound to {device_id}, {[os.environ.get(name) for name in own]}")

    variables(RANK=0, WORLD_SIZE=2)
    own = ("TORCH_DIST_USE_NCCL2", "TORCH_NCCL_DUMP_ON_TIMEOUT")
    for each in own:
        # Removed again after the test.
        monkeypatch.setenv(each, "")
        monkeypatch.delenv(each)
    monkeypatch.setattr("pycls_fast.parallel.launch.open_store", lambda *arguments: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", join)
    monkeypatch.setattr("pycls_fast.parallel.launch.choose_device", lambda name, rank: torch.device("cuda", rank))
    with pytest.raises(SystemExit, match="1"), start_world("cuda", Parallel(name=name, backend=backend)):
        pass
    assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "has_master"), [(0, True), (1, True), (1, False)])
def test_ranks_of_a_node_that_does_not_come(
    variables: Variables,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    rank: int,
    has_master: bool,
) -> None:
    """A note, one line, and a status at which a launcher starts again."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    port = store.port if has_master else 1
    launch = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    variables(RANK=rank, WORLD_SIZE=3, LOCAL_RANK=0, **launch)
    monkeypatch.setattr(rendezvous, "_NOTE_SECONDS", 0.1)
    with pytest.raises(SystemExit, match="1"), start_world("cpu", Parallel(name="ddp", timeout_seconds=1)):
        pass
    # torch's store warns of a wait that timed out.
    note, line = (line for line in capfd.readouterr().err.splitlines() if not line.startswith("[W"))
    assert note == f"note: rank {rank} of 3 waits for the others at localhost:{port}, for up to 1 s"
    assert line.startswith(f"error: rank {rank}: the 3 ranks are not connected (")


@pytest.mark.parametrize(
    ("values", "count", "index"),
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
    variables: Variables, monkeypatch: pytest.MonkeyPatch, values: dict[str, str], count: int, index: int | None
) -> None:
    """Of local rank 3; None: there is none for it."""
    variables(**values)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    if index is not None:
        assert choose_device("auto", 3) == torch.device("cuda", index)
        return
    with pytest.raises(UserError, match=f"4 or more ranks on a node that shows each of them {count} CUDA devices"):
        choose_device("auto", 3)


def test_degrees(monkeypatch: pytest.MonkeyPatch) -> None:
    for size, shard, replicate, here, expected in (
        (8, None, None, 4, (2, 4)),
        (8, 2, None, 4, (4, 2)),
        (8, None, 2, 8, (2, 4)),
        (6, 3, 2, 6, (2, 3)),
        # Four of a node's eight ranks have one stage of a pipeline.
        (4, None, None, 8, (1, 4)),
        (1, None, None, 1, (1, 1)),
    ):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
        assert degrees(Parallel(shard_degree=shard, replicate_degree=replicate), size) == expected


def test_the_strategy_follows_from_the_degrees() -> None:
    for chosen, name in (
        ({}, "ddp"),
        ({"pipeline_degree": 2}, "ddp"),
        ({"tensor_degree": 2}, "fsdp"),
        ({"expert_degree": 2}, "fsdp"),
        ({"shard_degree": 2}, "hsdp"),
        ({"tensor_degree": 2, "replicate_degree": 2}, "hsdp"),
    ):
        assert Parallel.model_validate(chosen).strategy(4) == name
        assert Parallel.model_validate({"name": "fairscale_fsdp", **chosen}).strategy(4) == "fairscale_fsdp"
    assert Parallel().strategy(1) == "single"


@pytest.mark.parametrize(
    ("strategy", "chosen", "way_out"),
    [
        ("fsdp", {"tensor_degree": 4}, "use parallel.tensor_degree=3, or 8 ranks"),
        ("auto", {"expert_degree": 4}, "use parallel.expert_degree=3, or 8 ranks"),
        ("auto", {"pipeline_degree": 4}, "use parallel.pipeline_degree=3, or 8 ranks"),
        ("auto", {"pipeline_degree": 2, "tensor_degree": 2}, "use parallel.tensor_degree=1, or 4 ranks"),
        ("hsdp", {"shard_degree": 4}, "use parallel.shard_degree=3 parallel.replicate_degree=2"),
        ("hsdp", {"replicate_degree": 4}, "use parallel.shard_degree=1 parallel.replicate_degree=6"),
        ("single", {}, "use parallel=ddp"),
        ("fairscale_fsdp", {}, "use parallel=fsdp"),
    ],
)
def test_what_six_ranks_cannot_do(
    monkeypatch: pytest.MonkeyPatch, strategy: str, chosen: dict[str, int], way_out: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setattr(launch, "report_mistake", lambda error: True)
    world = start_world("cpu", Parallel.model_validate({"name": strategy, **chosen}))
    with pytest.raises(UserError, match=f"{way_out}$"), world:
        pass


def test_ranks_that_share_a_model_see_the_same_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks, two to a model: what is counted over images is counted once for each two."""
    monkeypatch.setattr(dist, "all_reduce", lambda values: values)
    worlds = [World(rank, 4, torch.device("cpu"), tensor=2) for rank in range(4)]
    assert [(world.data_rank, world.data_size) for world in worlds] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [world.sum(torch.tensor(7)).item() for world in worlds] == [7, 0, 7, 0]


# Activations of a step: many at a time, then none. Prints the page faults of each way's ninth step.
SCRIPT = """
import resource, sys
import torch
from pycls_fast.parallel.launch import keep_freed_memory

def step():
    kept = [torch.ones(10 << 20) for _ in range(3)]
    return sum(float(tensor[-1]) for tensor in kept)

def faults():
    # The heap takes some steps to have found room for all.
    for _ in range(8):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    assert step() == 3
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for word in sys.argv[1:]:
    keep_freed_memory(word == "keep")
    print(faults())
"""


@pytest.mark.slow
def test_a_step_gets_the_pages_of_the_step_before_it() -> None:
    command = [sys.executable, "-c", SCRIPT, "default", "keep", "keep"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    # 3 tensors of 40 MiB are 30,720 pages of 4 KiB.
    default, kept, again = map(int, done.stdout.split())
    assert max(kept, again) < 1000 < 5000 < default


SHORT = timedelta(seconds=1)
LONG = timedelta(seconds=20)


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("localhost", 0, is_master=True, timeout=SHORT, wait_for_workers=False)


def client(store: dist.TCPStore, timeout: timedelta) -> dist.Store:
    """A connection of its own, as each process has one: a waiting one blocks others."""
    return dist.TCPStore("localhost", store.port, is_master=False, timeout=timeout, wait_for_workers=False)


def all_meet(store: dist.TCPStore, size: int) -> set[str]:
    """The rounds in which the ranks find themselves; rank 0 comes last, when the others have seen what is old."""
    with ThreadPoolExecutor(size) as pool:
        later = [pool.submit(meet, client(store, LONG), rank, size, LONG) for rank in reversed(range(size))]
        return {future.result(timeout=30) for future in later}


def test_each_round_has_its_own_name(store: dist.TCPStore) -> None:
    """One process after the other, as in a sweep, and with another number of ranks, as after the loss of a node."""
    rounds = [all_meet(store, size) for size in (3, 3, 2, 4, 4)]
    assert all(len(names) == 1 for names in rounds)
    assert len(set.union(*rounds)) == 5


@pytest.mark.slow
def test_a_round_that_ranks_of_an_earlier_attempt_did_not_finish_is_left(store: dist.TCPStore) -> None:
    with ThreadPoolExecutor(2) as pool:
        # Rank 2 died before it came.
        died = [pool.submit(meet, client(store, SHORT), rank, 3, SHORT) for rank in (0, 1)]
    assert [type(future.exception()) for future in died] == [dist.DistStoreError] * 2
    assert str(died[0].exception()).endswith("/rank 2")
    old = store.get("pycls_fast/round")
    (name,) = all_meet(store, 3)
    assert name != old.decode()


@pytest.mark.slow
def test_the_first_rank_of_a_node_speaks_for_those_with_the_same_lines(
    store: dist.TCPStore, variables: Variables, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(rank: int, *lines: str) -> list[str]:
        """What a rank of two nodes prints after all that were asked before it."""
        variables(RANK=rank, LOCAL_RANK=rank % 4, GROUP_RANK=rank // 4, WORLD_SIZE=8)
        report_mistake(UserError(*lines), timedelta(seconds=0.2))
        return capsys.readouterr().err.splitlines()

    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    # The command line prints those of rank 0, whatever they are.
    assert told(0, "the batch", "the data") == []
    assert told(1, "the batch", "the data") == []
    assert told(2, "the disk", "the fan") == ["error: rank 2: the disk", "error: rank 2: the fan"]
    # Another node hears nothing of it.
    assert told(5, "the batch", "the data") == ["error: rank 5: the batch", "error: rank 5: the data"]
    # After a restart it is told again.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert told(1, "the batch", "the data") == ["error: rank 1: the batch", "error: rank 1: the data"]
    assert told(0, "the batch", "the data") == []
    # The ranks' own name of their round counts: agents may count differently.
    monkeypatch.setattr(rendezvous, "_round", "a round")
    assert told(1, "the batch", "the data") == ["error: rank 1: the batch", "error: rank 1: the data"]
    assert told(0, "the batch", "the data") == []
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert told(1, "the batch", "the data") == []
