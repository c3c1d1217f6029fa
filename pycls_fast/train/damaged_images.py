"""Damaged images of the short trainings that tools make: named at the end, as a run names its own."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing

from pycls_fast.data import Batch
from pycls_fast.parallel import World
from pycls_fast.train.display import Display
from pycls_fast.train.evaluation import too_many_damaged


def noting_damage(batches: Generator[Batch, None, None], damaged: dict[str, str]) -> Generator[Batch, None, None]:
    """Yield the batches, and add the names of their damaged images, with the reasons, to `damaged`."""
    with closing(batches):
        for batch in batches:
            damaged.update(batch.damaged)
            yield batch


def report_damage(damaged: dict[str, str], limit: int, world: World, display: Display) -> None:
    """Print a warning for each damaged image that any rank has met; all ranks call this.

    Args:
        damaged: name to reason, this rank's.
        limit: `data.max_damaged`.

    Raises:
        UserError: there are more than `limit`.
    """
    everyone = {name: reason for part in world.gather(damaged) for name, reason in sorted(part.items())}
    if len(everyone) > limit:
        raise too_many_damaged(everyone, limit)
    for name, reason in everyone.items():
        display.warn(f"{name}: {reason}; skipped")
