"""Learning rate as a pure function of the step, without state to save or restore."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, assert_never

Shape = Literal["cosine", "linear", "step", "constant"]


@dataclass(frozen=True)
class LrSchedule:
    """Linear warm-up from `warmup_start_factor * lr`, then a curve to `final_factor * lr`.

    Attributes:
        lr: peak learning rate, reached at step `warmup_steps`.
        total_steps: length of the whole curve; the last step is `total_steps - 1`, one short of the final value.
        shape: "cosine" (half a period; Loshchilov and Hutter, 2017, without restarts), "linear", "step" (times
            `step_factor` after every `step_length` steps; He et al. 2016) or "constant".
        from_start: the curve begins at step 0 and the warm-up replaces its beginning, as in timm, so that the rate
            after the warm-up is a little below `lr` (pycls multiplies the two, which makes the warm-up's rates a little
            smaller); otherwise the curve begins where the warm-up ends.
    """

    lr: float
    total_steps: int
    warmup_steps: int = 0
    warmup_start_factor: float = 0.0
    final_factor: float = 0.0
    shape: Shape = "cosine"
    from_start: bool = False
    step_length: int = 1
    step_factor: float = 0.1

    def __call__(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            start = self.warmup_start_factor
            return self.lr * (start + (1.0 - start) * step / self.warmup_steps)
        begin = 0 if self.from_start else self.warmup_steps
        progress = min((step - begin) / max(self.total_steps - begin, 1), 1.0)
        match self.shape:
            case "constant":
                return self.lr
            case "step":
                return self.lr * float(self.step_factor ** ((step - begin) // self.step_length))
            case "cosine":
                left = 0.5 * (1.0 + math.cos(math.pi * progress))
            case "linear":
                left = 1.0 - progress
            case unknown:
                assert_never(unknown)
        return self.lr * (self.final_factor + (1.0 - self.final_factor) * left)
