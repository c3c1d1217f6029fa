"""Which arms of a ladder run: all but those that cannot run on this machine or with this model, or have failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pycls_fast.config.ladder import Ladder, Mode
from pycls_fast.errors import UserError
from pycls_fast.ledger.plan import Arm, arms
from pycls_fast.ledger.processes import ProcessResult


class Selection:
    """The arms of a ladder, which change as it becomes known what cannot run.

    Args:
        ladder: the changes to the experiment.
        mode: how its rungs become arms.
        ranks: processes per arm, unless the ladder sets them.
        device: "cpu" or "cuda": where the arms run.

    Attributes:
        impossible: arms that cannot run on this machine or with this model, and why.
        failed: arms whose process failed, and why.

    Raises:
        UserError: a baseline that is not for this device.
    """

    def __init__(self, ladder: Ladder, mode: Mode, ranks: int, device: str) -> None:
        self.impossible: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self._ladder, self._mode, self._ranks = ladder, mode, ranks
        # Rungs that later arms do not include, and rungs for which no process is started.
        self._excluded: set[str] = set()
        self._untried: set[str] = set()
        for rung in (ladder.baseline, *ladder.rungs):
            if rung.needs not in (None, device):
                self.impossible[rung.name] = f"needs {str(rung.needs).upper()}"
                self._excluded.add(rung.name)
                self._untried.add(rung.name)
        if ladder.baseline.name in self.impossible:
            why = self.impossible[ladder.baseline.name]
            raise UserError(f"ladder: the baseline '{ladder.baseline.name}' {why}")

    def arms(self) -> list[Arm]:
        """The arms, given what is known so far about which can run here."""
        return arms(self._ladder, self._mode, ranks=self._ranks, impossible=self._excluded)

    def runnable(self) -> list[Arm]:
        """The arms that are not known to fail and are not overridden."""
        return [arm for arm in self.arms() if self.why_not(arm) is None]

    def why_not(self, arm: Arm) -> str | None:
        """Why an arm is not run; None if it is."""
        return self.impossible.get(arm.name) or self.failed.get(arm.name) or arm.overridden

    def alone(self) -> list[Arm]:
        """The rungs one at a time, in mode leave_one_out only: shows which cannot be part of "everything"."""
        if self._mode != "leave_one_out":
            return []
        made = arms(self._ladder, "one_at_a_time", ranks=self._ranks)[1:]
        return [arm for arm in made if self.why_not(arm) is None]

    def in_order(self) -> Iterator[Arm]:
        """The arms, recomputed after each one: leaving one out changes the arms after it, but not their number."""
        for position in range(len(self.arms())):
            yield self.arms()[position]

    def tried_in_vain(self) -> int:
        """Number of arms whose process was started and did not measure anything."""
        return len(self.impossible) + len(self.failed) - len(self._untried)

    def rule_out(self, refusal: Callable[[Arm], str | None]) -> dict[str, str]:
        """Leave out, in the ladder's order, the arms for which `refusal` gives a reason.

        In mode leave_one_out only the single rungs are checked.

        Returns:
            The reasons by arm name.

        Raises:
            UserError: the reference arm is refused.
        """
        refused: dict[str, str] = {}
        for arm in self.alone() or self.in_order():
            why = refusal(arm) if self.why_not(arm) is None else None
            if why is None:
                continue
            if arm.before is None:
                raise UserError(f"ladder: the reference '{arm.name}' does not run: {why}")
            refused[arm.name] = self.impossible[arm.name] = why
            self._excluded.add(arm.name)
            self._untried.add(arm.name)
        return refused

    def exclude(self, arm: Arm, finished: ProcessResult) -> None:
        """Leave out an arm whose process failed, and its rung's change from all other arms.

        Raises:
            UserError: it is the reference arm.
        """
        self.blame(arm, finished)
        self._excluded.add(arm.name)

    def blame(self, arm: Arm, finished: ProcessResult) -> None:
        """Leave out an arm whose process failed.

        Raises:
            UserError: it is the reference arm.
        """
        if arm.before is None:
            raise UserError(
                f"ladder: the reference '{arm.name}' does not run: {finished.reason()} (full log: {finished.log})"
            )
        (self.impossible if finished.refused else self.failed)[arm.name] = finished.reason()
