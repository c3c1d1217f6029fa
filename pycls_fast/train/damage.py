"""Images that cannot be read: each rank notes its own, and they are reported once."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import closing

from pycls_fast.data import Batch
from pycls_fast.errors import UserError
from pycls_fast.parallel import World
from pycls_fast.train.display import Display
from pycls_fast.train.run import Run

DAMAGED_IMAGE = "damaged image"
"""The event of an image that the run met first."""


class DamagedImages:
    """The damaged images that this rank of a run has met since the last report.

    Attributes:
        noted: their names and the reasons.
    """

    def __init__(self, run: Run) -> None:
        self.noted: dict[str, str] = {}
        self._run = run
        # What earlier processes recorded is not recorded again, nor counted (it may have been repaired).
        records = run.folder.records() if run.world.is_main else ()
        self._recorded = {record["name"] for record in records if record.get("event") == DAMAGED_IMAGE}

    def note(self, damaged: Iterable[tuple[str, str]]) -> None:
        """Note (name, reason) of images, without those that have been reported."""
        self.noted.update((name, reason) for name, reason in damaged if name not in self._run.damaged)

    def report(self, done: int) -> None:
        """Report what any rank has noted, and add it to `Run.damaged`; all ranks call this."""
        run = self._run
        new, self.noted = self.noted, {}
        for part in run.world.gather(new):
            for name, reason in part.items():
                if name not in run.damaged:
                    run.damaged[name] = reason
                    run.display.warn(f"{name}: {reason}; skipped")
                    if run.world.is_main and name not in self._recorded:
                        run.folder.add_record(
                            "event", done, run.epoch(done), event=DAMAGED_IMAGE, name=name, reason=reason
                        )


def noting_damage(batches: Generator[Batch, None, None], damaged: dict[str, str]) -> Generator[Batch, None, None]:
    """Yield the batches, and add the damaged images to `damaged`, name to reason; for what is not a run."""
    with closing(batches):
        for batch in batches:
            damaged.update(batch.damaged)
            yield batch


def report_damage(
    damaged: Mapping[str, str], limit: int, world: World, display: Display, outcome: str = "skipped"
) -> None:
    """Print a warning for each damaged image that any rank has met, except in a run; all ranks call this.

    Args:
        damaged: name to reason, this rank's or all ranks'.
        limit: `data.max_damaged`.
        world: the ranks.
        display: prints the warnings.
        outcome: what was done about them.

    Raises:
        UserError: there are more than `limit`.
    """
    everyone = {name: reason for part in world.gather(damaged) for name, reason in sorted(part.items())}
    if len(everyone) > limit:
        raise too_many_damaged(everyone, limit)
    for name, reason in everyone.items():
        display.warn(f"{name}: {reason}; {outcome}")


def too_many_damaged(damaged: Mapping[str, str], limit: int) -> UserError:
    """The error for more than `data.max_damaged` images (name to reason) that cannot be read."""
    return UserError(
        f"data.max_damaged: {len(damaged)} images cannot be read, more than {limit}:",
        *(f"{name}: {reason}" for name, reason in damaged.items()),
    )
