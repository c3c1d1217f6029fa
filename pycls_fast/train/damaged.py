"""Images that cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing

from pycls_fast.data.batch import Batch
from pycls_fast.errors import UserError
from pycls_fast.parallel.world import World
from pycls_fast.train.display import Display


class DamagedImages:
    """The damaged images that a process meets: each is told once, and left out.

    Args:
        limit: how many there may be.
        on_new: called on all ranks with a step, a name and a reason, once for each.

    Attributes:
        noted: those that this rank has met since the last report, and the reasons.
        reported: those that any rank has met before, and the reasons.
    """

    def __init__(
        self,
        limit: int,
        world: World,
        display: Display,
        on_new: Callable[[int, str, str], None] = lambda step, name, reason: None,
    ) -> None:
        self.noted: dict[str, str] = {}
        self.reported: dict[str, str] = {}
        self._limit, self._world, self._display, self._on_new = limit, world, display, on_new

    def note(self, batch: Batch) -> None:
        """Note a batch's, without those that have been reported."""
        self.noted.update((name, reason) for name, reason in batch.damaged if name not in self.reported)

    def noting(self, batches: Generator[Batch, None, None]) -> Generator[Batch, None, None]:
        """Yield the batches, and note theirs."""
        with closing(batches):
            for batch in batches:
                self.note(batch)
                yield batch

    def report(self, step: int = 0) -> None:
        """Warn of those that any rank has noted since the last call; all ranks call this.

        Raises:
            UserError: there are too many; names all.
        """
        noted, self.noted = self.noted, {}
        found = {name: reason for part in self._world.gather(noted) for name, reason in sorted(part.items())}
        new = {name: reason for name, reason in found.items() if name not in self.reported}
        self.reported |= new
        for name, reason in new.items():
            self._on_new(step, name, reason)
        if len(self.reported) > self._limit:
            raise UserError(
                f"data.max_damaged: {len(self.reported)} images cannot be read, more than {self._limit}:",
                *(f"{name}: {reason}" for name, reason in self.reported.items()),
            )
        for name, reason in new.items():
            self._display.warn(f"{name}: {reason}; left out")
