"""How many of the machine's cores are this process's."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from pycls_fast.config import scheduler

_MOUNT = Path("/sys/fs/cgroup")
_GROUPS = Path("/proc/self/cgroup")


def cores() -> int:
    """Cores that the run may use: those that it may be scheduled on, or fewer where a CPU limit is below them."""
    allowed = len(os.sched_getaffinity(0))
    limit = cpu_limit()
    return allowed if limit is None else min(allowed, limit)


def cores_per_rank() -> int:
    """This rank's share of them, at least 1."""
    # Ranks of a node share its cores, but a scheduler's tasks may have been given theirs.
    own = os.environ.get("SLURM_CPUS_PER_TASK") if scheduler.is_task() else None
    return max(min(cores(), int(own)) if own else cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


def cpu_limit(mount: Path = _MOUNT, groups: Path = _GROUPS) -> int | None:
    """The time on the processor that a container may take (`docker run --cpus`, a pod's `limits.cpu`), or None.

    It is the lowest quota of the process's control groups, in cores, rounded up (the kernel's admin-guide/cgroup-v2,
    `cpu.max`; scheduler/sched-bwc for version 1).

    Args:
        mount: where control groups are found.
        groups: which of them are the process's: lines `number:controllers:path`, version 2 without controllers.
    """
    try:
        lines = groups.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    limits = (_cores(folder) for line in lines for folder in _folders(mount, line))
    return min((limit for limit in limits if limit is not None), default=None)


def _folders(mount: Path, line: str) -> Iterator[Path]:
    """The group that a line names, and all above it, whose limits hold for it too."""
    _, controllers, path = line.split(":", 2)
    if controllers and "cpu" not in controllers.split(","):
        return
    top = mount / "cpu" if controllers else mount
    # A container may see the host's path, which is not there, and its own group at the top.
    group = top / path.lstrip("/")
    yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(top))


def _cores(folder: Path) -> int | None:
    names = ("cpu.max",) if (folder / "cpu.max").is_file() else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    try:
        quota, period = (int(word) for name in names for word in (folder / name).read_text(encoding="utf-8").split())
        limit = math.ceil(quota / period)
    except (OSError, ValueError, ZeroDivisionError):
        # There is none: no such file, or "max".
        return None
    # Version 1 says -1 where there is none.
    return limit if limit > 0 else None
