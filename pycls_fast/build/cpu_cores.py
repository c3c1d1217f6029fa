"""The CPU cores that this process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from pycls_fast.config import launch

_MOUNT = Path("/sys/fs/cgroup")
_GROUPS = Path("/proc/self/cgroup")


def cores() -> int:
    """Number of cores that the run may use: its CPU affinity, or a lower CPU limit."""
    allowed = len(os.sched_getaffinity(0))
    limit = cpu_limit()
    return allowed if limit is None else min(allowed, limit)


def cores_per_rank() -> int:
    """This rank's share of `cores()`, at least 1."""
    # Ranks of a node share its cores, but a scheduler may have assigned each task its own.
    own = os.environ.get("SLURM_CPUS_PER_TASK") if launch.is_task() else None
    return max(min(cores(), int(own)) if own else cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


def cpu_limit(mount: Path = _MOUNT, groups: Path = _GROUPS) -> int | None:
    """The container's CPU quota in cores (`docker run --cpus`, a pod's `limits.cpu`), rounded up; None without one.

    It is the lowest quota of the process's control groups (the kernel's admin-guide/cgroup-v2, `cpu.max`;
    scheduler/sched-bwc for version 1).

    Args:
        mount: where control groups are mounted.
        groups: lists the process's groups in lines `number:controllers:path`; version 2 has no controllers.
    """
    try:
        lines = groups.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    limits = (_cores(folder) for line in lines for folder in _folders(mount, line))
    return min((limit for limit in limits if limit is not None), default=None)


def _folders(mount: Path, line: str) -> Iterator[Path]:
    """The group that a line names, and all its parents, whose limits apply too."""
    _, controllers, path = line.split(":", 2)
    if controllers and "cpu" not in controllers.split(","):
        return
    top = mount / "cpu" if controllers else mount
    # A container may see the host's path, which does not exist inside, and has its own group at the top.
    group = top / path.lstrip("/")
    yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(top))


def _cores(folder: Path) -> int | None:
    names = ("cpu.max",) if (folder / "cpu.max").is_file() else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    try:
        quota, period = (int(word) for name in names for word in (folder / name).read_text(encoding="utf-8").split())
        limit = math.ceil(quota / period)
    except (OSError, ValueError, ZeroDivisionError):
        # No limit: the file is missing or says "max".
        return None
    # Version 1 says -1 for no limit.
    return limit if limit > 0 else None
