"""A run whose loss or gradients are not finite ends with an error that says what to change."""

from __future__ import annotations

import math

from pycls_fast.errors import UserError
from pycls_fast.train.run import Run

# A constant loss scale is too high if whole log intervals with at least this many steps in total are skipped.
_SKIPPED_LIMIT = 20


class DivergenceCheck:
    """Checks the numbers of each log interval of a run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._skipped_in_a_row = 0

    def check(self, done: int, loss: float, skipped: int, steps: int) -> None:
        """Check an interval's numbers, which are the same on all ranks.

        Args:
            done: steps trained so far.
            loss: the interval's mean.
            skipped: its steps whose gradients were not finite.
            steps: all of its steps.

        Raises:
            UserError: they are not finite, or with loss scaling not at any scale that is allowed.
        """
        precision, step = self._run.config.precision, self._run.step
        if step.scaler.is_enabled():
            scale = step.scaler.get_scale()
            if precision.loss_scale == "dynamic" and scale < precision.loss_scale_floor:
                raise UserError(
                    f"precision.loss_scale_floor: the loss scale fell to {scale:g} at step {done}: gradients are not "
                    "finite at any scale; lower optim.lr, set optim.clip_norm, or use precision=amp_bf16",
                    *self._first_not_finite(),
                )
            self._skipped_in_a_row = self._skipped_in_a_row + skipped if skipped == steps else 0
            if precision.loss_scale != "dynamic" and self._skipped_in_a_row >= _SKIPPED_LIMIT:
                raise UserError(
                    f"precision.loss_scale: the {self._skipped_in_a_row} steps up to step {done} had gradients that "
                    f"are not finite at the constant scale {scale:g}; lower it or use precision.loss_scale=dynamic",
                    *self._first_not_finite(),
                )
        elif not math.isfinite(loss) or skipped:
            raise UserError(
                f"optim.lr: the loss or a gradient is not finite at step {done} (loss {loss:g}); lower optim.lr, "
                "lengthen schedule.warmup_epochs or set optim.clip_norm; earlier checkpoints are kept",
                *self._first_not_finite(),
            )

    def _first_not_finite(self) -> list[str]:
        watchdog = self._run.step.watchdog
        if watchdog is None:
            return ["runtime.watchdog: set it to true and resume, and the run names the module that overflows first"]
        return [] if watchdog.last is None else [f"runtime.watchdog: {watchdog.last}"]
