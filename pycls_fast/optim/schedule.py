"""Learning rate as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up from `warmup_start_factor * lr`, then a curve to `final_factor * lr`.

    Attributes:
        lr: peak learning rate, reached at step `warmup_steps`.
        total_steps: length of the whole curve; the last step is `total_steps - 1`, one short of the final value.
        shape: "cosine" (half a period; Loshchilov and Hutter, 2017, without restarts) or "constant".
    """

    lr: float
    total_steps: int
    warmup_steps: int = 0
    warmup_start_factor: float = 0.0
    final_factor: float = 0.0
    shape: Literal["cosine", "constant"] = "cosine"

    def __call__(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            start = self.warmup_start_factor
            return self.lr * (start + (1.0 - start) * step / self.warmup_steps)
        if self.shape == "constant":
            return self.lr
        progress = (step - self.warmup_steps) / max(self.total_steps - self.warmup_steps, 1)
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))
        return self.lr * (self.final_factor + (1.0 - self.final_factor) * cosine)
