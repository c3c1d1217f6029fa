"""The ranks of a run: which one this process is, on which device, and how ranks communicate."""

from __future__ import annotations

import datetime
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pycls_fast.errors import UserError, first_line
from pycls_fast.exit_status import FAULT
from pycls_fast.parallel.devices import choose_device
from pycls_fast.parallel.mesh import degrees, make_mesh
from pycls_fast.parallel.mistakes import report_mistake
from pycls_fast.parallel.monitor import Monitor
from pycls_fast.parallel.rendezvous import connect, open_store
from pycls_fast.strategies import Strategy, strategy_of

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among the ranks of the run (a single process is rank 0 of 1)."""

    rank: int
    size: int
    device: torch.device
    # For flags and names on the host, so that exchanging them never waits for the accelerator.
    host_group: dist.ProcessGroup | None = None
    # For the thread that writes checkpoints: its messages must not mix with those of training.
    saving_group: dist.ProcessGroup | None = None
    # For strategies that shard: dimension "shard", or "replicate" and "shard".
    mesh: DeviceMesh | None = None
    monitor: Monitor | None = None
    # Of the process groups; None without any.
    timeout: datetime.timedelta | None = None
    # Among the ranks of its node.
    local_rank: int = 0

    def at(self, doing: str) -> None:
        """Record what this rank is doing, for the report if it hangs."""
        if self.monitor is not None:
            self.monitor.at(doing)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value: T) -> list[T]:
        """Gather every rank's object, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value, group=self.host_group)
        return values  # type: ignore[return-value]  # all_gather_object fills every place

    def from_main(self, value: T) -> T:
        """Broadcast rank 0's object to every rank."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.host_group)
        return values[0]

    def barrier(self) -> None:
        """Wait until every rank has reached this point."""
        if self.size > 1:
            dist.barrier(group=self.host_group)

    @torch.no_grad()
    def average_buffers(self, tensors: list[Tensor]) -> None:
        """Average floating-point buffers (BatchNorm's statistics) over the ranks, in place."""
        for tensor in tensors if self.size > 1 else []:
            if tensor.is_floating_point():
                dist.all_reduce(tensor)
                tensor.div_(self.size)


ALONE = World(rank=0, size=1, device=torch.device("cpu"))
"""One process on the CPU, for work that needs no process group."""


class Agreement:
    """A number that any rank may raise; all ranks see the largest one at the same step, without waiting for each other.

    Each step starts a reduction on the host and reads the result of the previous step's.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._pending: tuple[dist.Work, Tensor] | None = None

    def reached(self, raised_here: int) -> int:
        """Call once a step on every rank: the largest number of the previous step, 0 in the first."""
        if self._world.size == 1:
            return raised_here
        answer = 0
        if self._pending is not None:
            work, flag = self._pending
            work.wait()
            answer = int(flag.item())
        flag = torch.tensor(raised_here)
        work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._world.host_group, async_op=True)
        self._pending = (work, flag) if work is not None else None
        return answer


@contextmanager
def start_world(
    *,
    device: str,
    backend: str,
    timeout_seconds: int,
    strategy: str,
    shard_degree: int | None = None,
    replicate_degree: int | None = None,
) -> Iterator[World]:
    """Join the process group that torchrun's environment describes, or run alone; leave it on exit.

    If only some of several ranks leave with an error, the process group is not destroyed: NCCL would wait there for
    the other ranks, which wait for this one, and the error would be printed only when a timeout ends all of them. The
    process has to end then, which aborts NCCL's communicators.

    Args:
        device: "auto", "cpu" or "cuda".
        backend: "auto" (nccl on CUDA, gloo on the CPU), "nccl" or "gloo".
        timeout_seconds: ranks that wait longer for each other report where each one is and end.
        strategy: `parallel.name`; checked against the number of ranks.
        shard_degree, replicate_degree: for "hsdp"; see `mesh.degrees`.

    Raises:
        UserError: the device is not available, or the strategy or degrees do not fit the number of ranks.
        SystemExit: an earlier world of this process was left without the other ranks, or not all ranks came.
    """
    with ExitStack() as group, ExitStack() as watch:
        try:
            yield _join(
                group,
                watch,
                device=device,
                backend=backend,
                timeout_seconds=timeout_seconds,
                strategy=strategy,
                shard_degree=shard_degree,
                replicate_degree=replicate_degree,
            )
        except UserError as error:
            if not report_mistake(error):
                group.pop_all()
            raise
        except BaseException as error:
            rank, size = os.environ.get("RANK", "0"), int(os.environ.get("WORLD_SIZE", "1"))
            if size > 1:
                group.pop_all()
                error.add_note(f"(rank {rank} of {size})")
            raise


def _join(
    group: ExitStack,
    watch: ExitStack,
    *,
    device: str,
    backend: str,
    timeout_seconds: int,
    strategy: str,
    shard_degree: int | None,
    replicate_degree: int | None,
) -> World:
    rank, size, local_rank = (int(os.environ.get(name, default)) for name, default in _VARIABLES)
    _note_lone_tasks()
    facts = strategy_of(strategy)
    if strategy == "single" and size > 1:
        raise UserError(f"parallel.name: single is one process, but torchrun started {size}; use parallel=ddp")
    grid: tuple[int | None, int] = (None, size)
    if facts.has_groups:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", str(size)))
        grid = degrees(size, shard=shard_degree, replicate=replicate_degree, ranks_per_node=here)
    chosen = choose_device(device, local_rank)
    if facts.needs_cuda and chosen.type != "cuda":
        raise UserError(
            f"parallel.name: {strategy} needs CUDA (FairScale orders its collectives with CUDA streams) and this run "
            f"is on the {chosen.type.upper()}; use parallel=fsdp, which runs on both"
        )
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    # ddp with one rank runs too, on the same code path, without torchrun.
    if size == 1 and not facts.has_mesh:
        return World(rank=0, size=1, device=chosen)
    backends = _backends(backend, chosen, facts)
    # The backends' timeout is longer than the monitor's, which knows where the ranks are and so reports first.
    timeout = datetime.timedelta(seconds=timeout_seconds + max(timeout_seconds // 2, 30))
    if size > 1 and dist.is_initialized():
        print(f"error: rank {rank}: an earlier run of this process lost the other ranks; start again", file=sys.stderr)
        raise SystemExit(FAULT)
    try:
        store = open_store(rank, size, timeout)
    except dist.DistError as error:
        # A launcher that restarts ranks does so.
        print(
            f"error: rank {rank}: not all {size} ranks have started ({first_line(error)}); the reason may be in the "
            "output of the other nodes",
            file=sys.stderr,
        )
        raise SystemExit(FAULT) from None
    device_id = chosen if chosen.type == "cuda" else None
    dist.init_process_group(backends, timeout=timeout, device_id=device_id, store=store, rank=rank, world_size=size)
    group.callback(dist.destroy_process_group)
    host_group, saving_group = (dist.new_group(backend="gloo", timeout=timeout) for _ in range(2))
    # Every rank is a member.
    assert isinstance(host_group, dist.ProcessGroup)
    assert isinstance(saving_group, dist.ProcessGroup)
    mesh = make_mesh(chosen.type, *grid, timeout) if facts.has_mesh else None
    world = World(rank, size, chosen, host_group, saving_group, mesh, timeout=timeout, local_rank=local_rank)
    if size == 1:
        return world
    # A random name, which no other run of this launch uses.
    name = f"monitor/{world.from_main(secrets.token_hex(4))}"
    # Its patience must be shorter than the ranks' own.
    patience = datetime.timedelta(seconds=30)
    own = Monitor(lambda: dist.PrefixStore(name, connect(patience)), rank, size, timeout_seconds=timeout_seconds)
    monitor = watch.enter_context(own)
    return replace(world, monitor=monitor)


def _backends(backend: str, device: torch.device, facts: Strategy) -> str:
    """The backends for `init_process_group`.

    Raises:
        UserError: nccl without CUDA.
    """
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl" and device.type != "cuda":
        raise UserError("parallel.backend: nccl needs CUDA and this run is on the CPU; use parallel.backend=gloo")
    # Offloaded shards (speed.param_offload) are reduced on the host, by gloo.
    return "cpu:gloo,cuda:nccl" if backend == "nccl" and facts.has_mesh else backend


def _note_lone_tasks() -> None:
    """Note that tasks started by plain `srun` are separate runs: it sets only its own variables, not torchrun's.

    This is not an error, because a job may want just that.
    """
    tasks, task = (int(os.environ.get(f"SLURM_{name}", "0")) for name in ("STEP_NUM_TASKS", "PROCID"))
    if "RANK" not in os.environ and tasks > 1 and task == 0:
        print(
            f"note: srun started {tasks} tasks, and each is a separate run on the first GPU that it sees; for one run "
            "over all of them use torchrun in one task per node, or the submitit launcher (docs/cluster.md)",
            file=sys.stderr,
        )


def lost_ranks(error: BaseException) -> str | None:
    """torch's message if the error means that another rank is gone or does not answer; None for any other error."""
    text = str(error)
    is_lost = isinstance(error, dist.DistError) or "gloo" in text or "NCCL" in text
    return first_line(error) if is_lost else None


_VARIABLES = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))


def floating_buffers(model: nn.Module) -> list[Tensor]:
    """Floating-point buffers of the modules in training mode; frozen modules, which are not, are left out."""
    training = [module for module in model.modules() if module.training]
    return [b for module in training for b in module.buffers(recurse=False) if b.is_floating_point()]
