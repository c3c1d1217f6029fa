"""Device meshes: "shard" within a node, "replicate" across nodes."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pycls_fast.errors import UserError


def degrees(size: int, *, shard: int | None, replicate: int | None, ranks_per_node: int) -> tuple[int, int]:
    """(replicate, shard) of `hsdp` as configured; a missing one follows from the other, or from the node.

    Args:
        size: number of ranks.
        shard: `parallel.shard_degree`.
        replicate: `parallel.replicate_degree`.
        ranks_per_node: the shard degree if neither is given.

    Raises:
        UserError: the product is not the number of ranks.
    """
    if shard is None:
        shard = ranks_per_node if replicate is None else max(size // replicate, 1)
    if replicate is None:
        replicate = max(size // shard, 1)
    if replicate * shard != size:
        usable = max(n for n in range(1, min(shard, size) + 1) if size % n == 0)
        raise UserError(
            f"parallel.shard_degree: {shard} x parallel.replicate_degree of {replicate} is not the {size} ranks of the "
            f"run; use parallel.shard_degree={usable} parallel.replicate_degree={size // usable}"
        )
    return replicate, shard


def make_mesh(device: str, replicate: int | None, shard: int, timeout: datetime.timedelta) -> DeviceMesh:
    """A mesh of all ranks in one line, or in `replicate` lines of `shard` neighbours; all ranks call this.

    The groups are created here because torch's mesh would give them its own timeout.
    """
    if replicate is None:
        line: Any = dist.new_group(timeout=timeout)
        return DeviceMesh.from_group(line, device, mesh_dim_names=("shard",))
    grid = torch.arange(replicate * shard).view(replicate, shard)
    rows: Any
    columns: Any
    rows, _ = dist.new_subgroups_by_enumeration(grid.tolist(), timeout=timeout)
    columns, _ = dist.new_subgroups_by_enumeration(grid.T.tolist(), timeout=timeout)
    return DeviceMesh.from_group([columns, rows], device, mesh=grid, mesh_dim_names=("replicate", "shard"))
