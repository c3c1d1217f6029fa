"""How a process joins the ranks of a run: its device, their groups and mesh, and its memory.

Read `start_world` first.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import secrets
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pycls_fast.errors import FAULT, UserError, first_line
from pycls_fast.parallel.monitor import Monitor, report_seconds
from pycls_fast.parallel.rendezvous import connect, open_store, report_mistake
from pycls_fast.parallel.world import World
from pycls_fast.strategies import Parallel

# Dimensions of a mesh that stay even if they have one rank.
_ALWAYS = ("replicate", "shard")
_VARIABLES = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))


@contextmanager
def start_world(device: str, settings: Parallel) -> Iterator[World]:
    """Join the process group that torchrun's environment describes, or run alone; leave it on exit.

    If only some of several ranks leave with an error, the process group is not destroyed: NCCL would wait there for
    the other ranks, which wait for this one, and the error would be printed only when a timeout ends all of them. The
    process has to end then, which aborts NCCL's communicators.

    Args:
        device: "auto", "cpu" or "cuda".
        settings: those of `parallel`; checked against the number of ranks.

    Raises:
        UserError: the device is not available, or the strategy or degrees do not fit the number of ranks.
        SystemExit: not all ranks came.
    """
    rank, size, local_rank = (int(os.environ.get(name, default)) for name, default in _VARIABLES)
    _note_lone_tasks()
    with ExitStack() as group, ExitStack() as watch:
        try:
            facts = settings.facts
            # Refuses degrees before ranks wait for each other.
            _grid(settings, size)
            chosen = choose_device(device, local_rank)
            if facts.needs_cuda:
                need_cuda(chosen, f"parallel.name: {facts.name}", "parallel=fsdp")
            world = World(rank, size, chosen)
            if chosen.type == "cuda":
                torch.cuda.set_device(chosen)
            # ddp with one rank runs too, on the same code path, without torchrun.
            if size > 1 or facts.has_mesh:
                backends = _backends(settings, chosen)
                # The monitor knows where the ranks are and so reports first.
                timeout = timedelta(seconds=settings.timeout_seconds + report_seconds(settings.timeout_seconds))
                world = divide(_join(group, world, backends, settings.timeout_seconds, timeout), settings)
            if size > 1:
                monitor = watch.enter_context(_monitor(world, settings.timeout_seconds))
                world = replace(world, monitor=monitor)
            yield world
        except UserError as error:
            if not report_mistake(error):
                group.pop_all()
            raise
        except BaseException as error:
            if size > 1:
                group.pop_all()
                error.add_note(f"(rank {rank} of {size})")
            raise


def divide(world: World, settings: Parallel) -> World:
    """Connected ranks with the meshes of a strategy and its degrees; all ranks call this."""
    tensor, expert, pipeline = settings.tensor_degree, settings.expert_degree, settings.pipeline_degree
    grid = _grid(settings, world.size)
    make = partial(make_mesh, world.device.type, *grid, world.timeout, tensor=tensor, pipeline=pipeline)
    mesh = make() if settings.facts.has_mesh or pipeline > 1 else None
    experts = make(expert=expert) if expert > 1 else None
    return replace(world, mesh=mesh, experts=experts, tensor=tensor, pipeline=pipeline)


def _grid(settings: Parallel, ranks: int) -> tuple[int | None, int]:
    """The number of replicas (None: the mesh has no such dimension) and of shards into which a model is divided."""
    facts, tensor = settings.facts, settings.tensor_degree
    _check_divides("parallel.pipeline_degree", settings.pipeline_degree, ranks, "of the run")
    size = ranks // settings.pipeline_degree
    if facts.name == "single" and size > 1:
        raise UserError(f"parallel.name: single is one process, but torchrun started {size}; use parallel=ddp")
    _check_divides("parallel.tensor_degree", tensor, size, "of the run" if size == ranks else "of each stage")
    grid: tuple[int | None, int] = (None, size // tensor) if facts.has_mesh else (size, 1)
    if facts.has_groups:
        grid = degrees(settings, size)
    _check_divides("parallel.expert_degree", settings.expert_degree, grid[1], "that share the weights")
    return grid


def _check_divides(key: str, degree: int, ranks: int, which: str) -> None:
    if ranks % degree:
        fits = max(n for n in range(1, min(degree, ranks) + 1) if ranks % n == 0)
        more = -(-ranks // degree) * degree
        raise UserError(f"{key}: {degree} does not divide the {ranks} ranks {which}; use {key}={fits}, or {more} ranks")


def _join(group: ExitStack, world: World, backends: str, patience: int, timeout: timedelta) -> World:
    """The world with its process groups, which get this timeout; waits `patience` seconds for the other ranks."""
    rank, size = world.rank, world.size
    # Each of gloo's groups takes a socket for every rank, and many shells begin with a limit of 1,024 files.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        store = open_store(rank, size, timedelta(seconds=patience))
        # With a device, torch makes further groups by splitting the first one, which gloo cannot (2.15).
        device_id = world.device if "nccl" in backends else None
        dist.init_process_group(backends, timeout=timeout, device_id=device_id, store=store, rank=rank, world_size=size)
        group.callback(_leave)
        host_group, saving_group = (dist.new_group(backend="gloo", timeout=timeout) for _ in range(2))
    except RuntimeError as error:
        # No UserError: a launcher that restarts ranks then does so.
        print(
            f"error: rank {rank}: the {size} ranks are not connected ({first_line(error)}); the reason may be in the "
            "output of the other nodes, or GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME have to name their network",
            file=sys.stderr,
        )
        raise SystemExit(FAULT) from None
    # Every rank is a member.
    assert isinstance(host_group, dist.ProcessGroup)
    assert isinstance(saving_group, dist.ProcessGroup)
    return replace(world, host_group=host_group, saving_group=saving_group, timeout=timeout)


def _leave() -> None:
    # Imports torch's compiler, which takes a second.
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    dist.destroy_process_group()
    # torch remembers layouts and compiled code with their meshes, and takes a mesh of the same ranks for the same
    # (2.15): the next run of this process would exchange in groups that are gone, or that have other ranks now.
    _clear_sharding_prop_cache()
    torch.compiler.reset()


def _monitor(world: World, timeout_seconds: int) -> Monitor:
    # A random name, which no other run of this launch uses.
    name = f"monitor/{world.from_main(secrets.token_hex(4))}"
    # Its patience must be shorter than the ranks' own.
    store = dist.PrefixStore(name, connect(timedelta(seconds=30)))
    return Monitor(store, world.rank, world.size, timeout_seconds=timeout_seconds)


def _backends(settings: Parallel, device: torch.device) -> str:
    backend: str = settings.backend
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl":
        need_cuda(device, "parallel.backend: nccl", "parallel.backend=gloo")
    if settings.facts.replicates and settings.pipeline_degree == 1:
        # DDP takes the futures of its exchanges. Those of torch's new NCCL back end (2.15) make the backward pass wait
        # for each exchange, those of the old one only its end.
        os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")
        # When one of its exchanges fails, it asks all ranks through the launch's store to dump their state and end. The
        # ranks of the next attempt would still read that there.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    # Offloaded shards (speed.param_offload) are reduced on the host, by gloo.
    return "cpu:gloo,cuda:nccl" if backend == "nccl" and settings.facts.has_mesh else backend


def _note_lone_tasks() -> None:
    """Note that tasks started by plain `srun` are separate runs: it sets only its own variables, not torchrun's.

    This is not an error, because a job may want just that.
    """
    tasks, task = (int(os.environ.get(f"SLURM_{name}", "0")) for name in ("STEP_NUM_TASKS", "PROCID"))
    if "RANK" not in os.environ and tasks > 1 and task == 0:
        print(
            f"note: srun started {tasks} tasks, and each is a separate run on the first GPU that it sees; for one run "
            "over all of them use torchrun in one task per node, or the submitit launcher (docs/running.md)",
            file=sys.stderr,
        )


def choose_device(name: str, local_rank: int) -> torch.device:
    """The device of this rank: the CPU, or the GPU with the number of the rank on its node.

    Raises:
        UserError: the device is not available.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UserError("runtime.device: cuda was asked for but torch finds no CUDA device; use runtime.device=cpu")
    if name == "cpu" or not available:
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 1 and _sees_only_its_own():
        return torch.device("cuda", 0)
    if local_rank >= count:
        raise UserError(
            f"runtime.device: {local_rank + 1} or more ranks on a node that shows each of them {count} CUDA devices; "
            "start fewer (torchrun --nproc_per_node, hydra.launcher.tasks_per_node), or ask for more GPUs "
            "(hydra.launcher.gpus_per_node)"
        )
    return torch.device("cuda", local_rank)


def need_cuda(device: torch.device, what: str, instead: str, capability: tuple[int, int] | None = None) -> None:
    """Refuse `what` on a CPU, or on a GPU of a lower compute capability, and propose what to take `instead`."""
    if device.type != "cuda" or (capability and torch.cuda.get_device_capability(device) < capability):
        least = " of compute capability {}.{} or higher".format(*capability) if capability else ""
        here = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
        raise UserError(f"{what} needs CUDA{least} and this run is on {here}; use {instead}")


def _sees_only_its_own() -> bool:
    """Whether this is a Slurm task with its own GPU (`--gpus-per-task`), not a rank of a torchrun in such a task."""
    bound = "SLURM_GPUS_PER_TASK" in os.environ or "gpu" in os.environ.get("SLURM_TRES_PER_TASK", "")
    return bound and "TORCHELASTIC_RUN_ID" not in os.environ


def degrees(settings: Parallel, ranks: int) -> tuple[int, int]:
    """(replicate, shard) of `hsdp` as configured; a missing one follows from the other, or from the node.

    `ranks` are those of the run or of a pipeline stage; ranks that compute blocks together count as one.

    Raises:
        UserError: the product is not the number of ranks.
    """
    size, shard, replicate = ranks // settings.tensor_degree, settings.shard_degree, settings.replicate_degree
    if shard is None:
        # A node may have the ranks of several stages.
        here = min(int(os.environ.get("LOCAL_WORLD_SIZE", ranks)), ranks) // settings.tensor_degree
        shard = max(here if replicate is None else size // replicate, 1)
    if replicate is None:
        replicate = max(size // shard, 1)
    if replicate * shard != size:
        usable = max(n for n in range(1, min(shard, size) + 1) if size % n == 0)
        raise UserError(
            f"parallel.shard_degree: {shard} x parallel.replicate_degree of {replicate} is not the {size} ranks of the "
            f"run; use parallel.shard_degree={usable} parallel.replicate_degree={size // usable}"
        )
    return replicate, shard


def make_mesh(
    device: str,
    replicate: int | None,
    shard: int,
    timeout: timedelta | None,
    *,
    tensor: int = 1,
    expert: int = 1,
    pipeline: int = 1,
) -> DeviceMesh:
    """A mesh of all ranks, with the dimensions pipeline x replicate x shard x tensor; all ranks call this.

    With `expert`, the shards are divided further by a dimension "expert" after "shard". A degree of 1, of `replicate`
    None, is no dimension. Neighbours differ in the last dimension, which exchanges the most.

    The groups are created here because torch's mesh would give them its own timeout.
    """
    wanted = {"pipeline": pipeline, "replicate": replicate, "shard": shard // expert}
    wanted |= {"expert": expert, "tensor": tensor}
    sizes = {name: size for name, size in wanted.items() if size is not None and (name in _ALWAYS or size > 1)}
    grid = torch.arange(math.prod(sizes.values())).view(*sizes.values())
    groups: list[Any] = []
    for dimension, size in enumerate(grid.shape):
        lines = grid.movedim(dimension, -1).reshape(-1, size)
        groups.append(dist.new_subgroups_by_enumeration(lines.tolist(), timeout=timeout)[0])
    return DeviceMesh.from_group(groups, device, mesh=grid, mesh_dim_names=tuple(sizes))


# From malloc.h. Large blocks come from the heap and stay there; or, because setting a threshold makes it static, the
# values that glibc's dynamic ones reach once large blocks have been freed (mallopt(3), M_MMAP_THRESHOLD).
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_KEPT = {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1}
_RETURNED = {_MMAP_MAX: 65536, _MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: 64 << 20}
_keeps = False


def keep_freed_memory(keep: bool) -> None:
    """Make this process keep freed memory, or return it to the system as usual.

    When it is kept, the process stays at its peak size. torch's CPU tensors are such blocks; by default most
    activations of a step are returned in its backward pass, and the next step gets the memory page by page, zeroed by
    the kernel. After turning this off, the process still holds part of its memory, so compare the two settings in
    separate processes.
    """
    global _keeps
    if keep == _keeps:
        return
    libc = ctypes.CDLL(None)
    for parameter, value in (_KEPT if keep else _RETURNED).items():
        libc.mallopt(parameter, value)
    _keeps = keep
