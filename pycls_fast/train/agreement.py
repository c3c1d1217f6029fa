"""Checks that all ranks, each with its own command line and disks, have the same settings and data; `on_main`."""

from __future__ import annotations

import platform
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch

from pycls_fast import __version__
from pycls_fast.config.keys import PATHS, as_typed, flat
from pycls_fast.config.run import RunConfig
from pycls_fast.data.sources.base import Images, checksum
from pycls_fast.errors import UserError, refuse
from pycls_fast.parallel.world import World
from pycls_fast.speed import Speed
from pycls_fast.train.signals import Stopped

T = TypeVar("T")

# Where a node keeps things, and what suits its host: these do not change what is computed.
_OWN = (*PATHS, "data.shard_cache_gib", "data.num_workers", "data.prefetch_factor", "runtime.threads")
# Lines of an error: another experiment differs in many settings.
_MOST = 5


BUSY = "busy"
"""What a long action of `on_main` sends now and then by `world.from_main`: the others wait only for so long."""


def on_main(world: World, action: Callable[[], T]) -> T:
    """Run an action on the main rank; on all ranks, which call this, return its result, or raise its `UserError` or
    `Stopped`."""
    found: Any = None, None
    if world.is_main:
        try:
            found = action(), None
        except (UserError, Stopped) as error:
            found = None, error
    while (told := world.from_main(found)) == BUSY:
        pass
    result, raised = told
    if raised is not None:
        raise raised
    return cast(T, result)


def check_same_settings(config: RunConfig, world: World) -> None:
    """Refuse, on all ranks, versions and settings (except paths) that differ between ranks; one line for each."""
    settings = {key: as_typed(value) for key, value in flat(config.model_dump(mode="json")).items() if key not in _OWN}
    settings |= {"version of pycls_fast": __version__, "version of torch": str(torch.__version__)}
    different = _differences(settings, world)[:_MOST]
    refuse(f"{line}; start all ranks with the same command and versions" for line in different)


def check_same_switches(switches: Speed, world: World) -> None:
    """Refuse, on all ranks, switches that differ between ranks: what a preset chooses may be missing on a node."""
    chosen = {f"speed.{key}": value for key, value in vars(switches).items()}
    refuse(f"{line}; install what is missing, or give the key" for line in _differences(chosen, world)[:_MOST])


def check_same_data(sources: Mapping[str, Images], world: World) -> None:
    """Refuse, on all ranks, data of which one rank has other images, labels or classes than rank 0.

    Labels and order are positions: ranks of a node whose copy lacks an image would train on images of other ranks, and
    of one that lacks a class's folder on wrong labels.
    """
    facts = {}
    for split, source in sources.items():
        names = zlib.crc32("\0".join(source.classes).encode("utf-8", "surrogateescape"))
        others = [checksum(() if x is None else x) for x in (source.labels, source.label_sets, source.block_ends)]
        sums = f"checksums of names, labels, sets and shards {names:08x} {' '.join(others)}"
        facts[split] = f"{len(source):,} images in {len(source.classes):,} classes, {sums}"
    # The others follow from the first.
    refuse(f"data.root: {line}; every node needs the same, complete data" for line in _differences(facts, world)[:1])


def _differences(values: dict[str, Any], world: World) -> list[str]:
    """`name: value on rank 8 (host), but value on rank 0 (host)` for each value that differs; the same on all ranks."""
    found = []
    (main, here), *others = gathered = world.gather((values, platform.node()))
    for name in dict.fromkeys(name for theirs, _ in gathered for name in theirs):
        first = main.get(name)
        for rank, (theirs, host) in enumerate(others, start=1):
            if theirs.get(name) != first:
                found.append(f"{name}: {theirs.get(name)} on rank {rank} ({host}), but {first} on rank 0 ({here})")
                break
    return found
