"""Numbers that are not finite: they end a run with a one-line message, and are not saved."""

from __future__ import annotations

import math

import torch

from pycls_fast.errors import UserError
from pycls_fast.files import checkpoints, step_of
from pycls_fast.optim.owned_weights import local
from pycls_fast.train.run_state import Run

# A constant loss scale is too high if whole log intervals with at least this many steps in total are skipped.
_SKIPPED_LIMIT = 20


class DivergenceCheck:
    """Checks the numbers of each log interval of a run, and what it saves."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._skipped_in_a_row = 0
        self.finite = True
        """Whether the loss of the latest interval was: a loss scaler skips steps for a while before it gives up, and
        until then the state, which has diverged, should not replace older checkpoints."""

    def check(self, done: int, loss: float, skipped: int, steps: int) -> None:
        """Refuse an interval whose numbers, the same on all ranks, are not finite; with loss scaling, only if they are
        not at any scale that is allowed. In `skipped` of its `steps` gradients were not finite."""
        precision, scaler = self._run.config.precision, self._run.step.scaler
        self.finite = math.isfinite(loss)
        self._skipped_in_a_row = self._skipped_in_a_row + skipped if skipped == steps else 0
        scale, dynamic = scaler.get_scale(), precision.loss_scale == "dynamic"
        if not scaler.is_enabled():
            if not self.finite or skipped:
                raise self._error(
                    f"optim.lr: the loss or a gradient is not finite at step {done} (loss {loss:g}); lower optim.lr, "
                    "lengthen schedule.warmup_epochs or set optim.clip_norm"
                )
        elif dynamic and scale < precision.loss_scale_floor:
            raise self._error(
                f"precision.loss_scale_floor: the loss scale fell to {scale:g} at step {done}: gradients are not "
                "finite at any scale; lower optim.lr, set optim.clip_norm, or use precision=amp_bf16"
            )
        elif not dynamic and self._skipped_in_a_row >= _SKIPPED_LIMIT:
            raise self._error(
                f"precision.loss_scale: the {self._skipped_in_a_row} steps up to step {done} had gradients that are "
                f"not finite at the constant scale {scale:g}; lower it or use precision.loss_scale=dynamic"
            )

    def check_weights(self, done: int) -> None:
        """Refuse to save weights and buffers that are not finite after `done` steps: no later step can be better, as
        batch norm's statistics stay so, too. All ranks call this."""
        if not all(self._run.world.gather(all(map(_is_finite, self._run.saved_weights())))):
            raise self._error(
                f"optim.lr: weights or batch norm's statistics are not finite after step {done}, which is not saved; "
                "lower optim.lr, lengthen schedule.warmup_epochs or set optim.clip_norm"
            )

    def _error(self, line: str) -> UserError:
        """The error, with the checkpoint before the newest one, which may be bad as well, and the module where it
        began."""
        lines, newest, watchdog = [], self._run.saved_step, self._run.step.watchdog
        if newest is not None:
            line += "; earlier checkpoints are kept"
            saved = checkpoints(self._run.folder.checkpoints)
            # The same on all ranks: a mistake of all of them is printed once.
            before = self._run.world.from_main(next((path for path in saved if step_of(path) < newest), None))
            if before is not None:
                lines.append(f"resume: if step {newest} has diverged, too, go back with resume={before}")
        if watchdog is None:
            lines.append("runtime.watchdog: with true the resumed run names the module that overflows first")
        elif watchdog.last is not None:
            lines.append(f"runtime.watchdog: {watchdog.last}")
        return UserError(line, *lines)


def _is_finite(values: torch.Tensor) -> bool:
    if not values.is_floating_point():
        return True
    share = local(values.detach())
    # The extremes are NaN if any number is; `isfinite` would allocate tensors of the size of the weights.
    return share.numel() == 0 or all(bool(extreme.isfinite()) for extreme in torch.aminmax(share))
