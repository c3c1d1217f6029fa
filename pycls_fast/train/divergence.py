"""A run whose loss, gradients or weights are not finite ends with an error that says what to change."""

from __future__ import annotations

import math

import torch

from pycls_fast.errors import UserError
from pycls_fast.optim import local
from pycls_fast.train import checkpoint
from pycls_fast.train.run import Run

# A constant loss scale is too high if whole log intervals with at least this many steps in total are skipped.
_SKIPPED_LIMIT = 20


class DivergenceCheck:
    """Checks the numbers of each log interval of a run, and what it saves."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._skipped_in_a_row = 0
        # Of the latest interval, and since the latest checkpoint.
        self._loss, self._weights_changed = 0.0, run.saved_step is None

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
        self._loss, self._weights_changed = loss, self._weights_changed or skipped < steps
        if step.scaler.is_enabled():
            scale = step.scaler.get_scale()
            if precision.loss_scale == "dynamic" and scale < precision.loss_scale_floor:
                raise UserError(
                    f"precision.loss_scale_floor: the loss scale fell to {scale:g} at step {done}: gradients are not "
                    "finite at any scale; lower optim.lr, set optim.clip_norm, or use precision=amp_bf16"
                    f"{self._kept()}",
                    *self._before_newest(),
                    *self._first_not_finite(),
                )
            self._skipped_in_a_row = self._skipped_in_a_row + skipped if skipped == steps else 0
            if precision.loss_scale != "dynamic" and self._skipped_in_a_row >= _SKIPPED_LIMIT:
                raise UserError(
                    f"precision.loss_scale: the {self._skipped_in_a_row} steps up to step {done} had gradients that "
                    f"are not finite at the constant scale {scale:g}; lower it or use precision.loss_scale=dynamic"
                    f"{self._kept()}",
                    *self._before_newest(),
                    *self._first_not_finite(),
                )
        elif not math.isfinite(loss) or skipped:
            raise UserError(
                f"optim.lr: the loss or a gradient is not finite at step {done} (loss {loss:g}); lower optim.lr, "
                f"lengthen schedule.warmup_epochs or set optim.clip_norm{self._kept()}",
                *self._first_not_finite(),
            )

    def not_worth_saving(self, *, evaluated: bool = False) -> str | None:
        """Why the state after the interval checked last should not replace older checkpoints; None if it may.

        A loss scaler skips steps for a while before it gives up. Until then the state is the one that diverged.

        Args:
            evaluated: the state has been evaluated with a finite loss, so it has not diverged: an image overflowed.
        """
        if not (evaluated or math.isfinite(self._loss)):
            return "the loss is not finite"
        return None if self._weights_changed else "every step since the last checkpoint was skipped"

    def check_weights(self, done: int) -> None:
        """Check the weights and buffers that are about to be saved after `done` steps; all ranks call this.

        Raises:
            UserError: one is not finite, so that no later step can be better: batch norm's statistics stay so, too.
        """
        run = self._run
        finite = all(map(_is_finite, (*run.network.parameters(), *run.step.weights.live().values())))
        if not all(self._run.world.gather(finite)):
            raise UserError(
                f"optim.lr: weights or batch norm's statistics are not finite after step {done}, which is not saved; "
                f"lower optim.lr, lengthen schedule.warmup_epochs or set optim.clip_norm{self._kept()}",
                *self._before_newest(),
            )

    def saved(self) -> None:
        """Note that the run's state is saved."""
        self._weights_changed = False

    def _kept(self) -> str:
        return "" if self._run.saved_step is None else "; earlier checkpoints are kept"

    def _before_newest(self) -> list[str]:
        """A line that names the checkpoint before the newest one, which may have been saved just after a bad step."""
        newest, all_saved = self._run.saved_step or 0, checkpoint.checkpoints(self._run.folder.checkpoints)
        # The same on all ranks: a mistake of all of them is printed once.
        before = self._run.world.from_main(
            next((path for path in all_saved if checkpoint.step_of(path) < newest), None)
        )
        return [] if before is None else [f"resume: if step {newest} has diverged, too, go back with resume={before}"]

    def _first_not_finite(self) -> list[str]:
        watchdog = self._run.step.watchdog
        if watchdog is None:
            return ["runtime.watchdog: set it to true and resume, and the run names the module that overflows first"]
        return [] if watchdog.last is None else [f"runtime.watchdog: {watchdog.last}"]


def _is_finite(values: torch.Tensor) -> bool:
    if not values.is_floating_point():
        return True
    share = local(values.detach())
    # The extremes are NaN if any number is; `isfinite` would allocate tensors of the size of the weights.
    return share.numel() == 0 or all(bool(extreme.isfinite()) for extreme in torch.aminmax(share))
