"""Training metrics, summed on the device and read by the host once per log interval."""

from __future__ import annotations

import gc
import math
import resource
import statistics
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pycls_fast.parallel import World


class TrainMetrics:
    """Sums over the steps of an interval, in one vector: `[loss, finite grad norms, finite steps, steps, damaged]`.

    Args:
        device: where the steps run.
        read: "interval" keeps the sums on the device, and the host reads them once an interval; with "step" the host
            reads loss and gradient norm in every step and sums them, as a plain loop does. The numbers are the same.
    """

    def __init__(self, device: torch.device, *, read: str = "interval") -> None:
        self._reads = read == "step"
        self._device = device
        place = torch.device("cpu") if self._reads else device
        self._sums = torch.zeros(5, dtype=torch.float64, device=place)
        # Views: adding to `_sums[i]` would also copy the sum onto itself.
        self._loss, self._norms, self._finite, self._steps, self._damaged = (self._sums[i] for i in range(5))

    def add_loss(self, loss: Tensor) -> None:
        """Add a microbatch's share of the step's mean loss."""
        self._loss += loss.item() if self._reads else loss.detach()

    def add_step(self, grad_norm: Tensor) -> None:
        """Count a finished step. A norm that is not finite marks a step that loss scaling skips."""
        if self._reads:
            grad_norm = torch.tensor(grad_norm.item(), dtype=torch.float64)
        finite = torch.isfinite(grad_norm)
        self._norms += torch.where(finite, grad_norm, 0.0)
        self._finite += finite
        self._steps += 1

    def read(self, world: World, *, damaged: int = 0, waited: float = 0.0) -> dict[str, float]:
        """Means over the interval and the ranks; starts a new one. With "interval", the only wait for the device.

        Args:
            world: the ranks.
            damaged: how many damaged images this rank has to report; the sum over the ranks is in the result.
            waited: seconds that this rank waited for data; the largest of the ranks' is in the result, because the
                others wait for that rank when gradients are exchanged.
        """
        self._damaged += damaged
        # A place for each rank, so that the sum over the ranks keeps them apart.
        waits = torch.zeros(world.size, dtype=torch.float64, device=self._device)
        waits[world.rank] = waited
        values = world.sum(torch.cat([self._sums.to(self._device), waits])).tolist()
        self._sums.zero_()
        # The norm is the same on every rank; the loss is not.
        loss, norms, finite, steps, reports = (value / world.size for value in values[:5])
        return {
            "loss": loss / max(steps, 1),
            "grad_norm": norms / finite if finite else float("nan"),
            "skipped_steps": round(steps - finite),
            "damaged": round(reports * world.size),
            "waited": max(values[5:]),
        }


@dataclass
class Clock:
    """Wall time of training and logging, without evaluation and checkpoints."""

    started: float = 0.0
    waited: float = 0.0
    images: int = 0
    steps: int = 0
    # (seconds per step, images per second) of every interval.
    intervals: list[tuple[float, float]] = field(default_factory=list)

    def start(self) -> None:
        """Start a new interval now."""
        self.started = time.perf_counter()
        self.waited, self.images, self.steps = 0.0, 0, 0

    def add_wait(self, seconds: float) -> None:
        """Count seconds in which a step waited for data."""
        self.waited += seconds

    def add_step(self, images: int) -> None:
        """Count a finished step with `images` over all ranks."""
        self.images += images
        self.steps += 1

    def read(self, waited: float) -> dict[str, float]:
        """Rates of the interval, in which the slowest rank `waited` for data; starts a new one.

        Call it when the device has finished.
        """
        seconds = max(time.perf_counter() - self.started, 1e-9)
        step_seconds, rate = seconds / max(self.steps, 1), self.images / seconds
        self.intervals.append((step_seconds, rate))
        rates = {
            "images_per_second": rate,
            "step_seconds": step_seconds,
            "data_wait_fraction": waited / seconds,
        }
        self.start()
        return rates

    def medians(self) -> tuple[float, float]:
        """Median (seconds per step, images per second), without the first interval (warm-up) if there are others."""
        intervals = self.intervals[1:] or self.intervals
        if not intervals:
            return math.nan, math.nan
        seconds, rates = zip(*intervals, strict=True)
        return statistics.median(seconds), statistics.median(rates)


def reset_memory_peak(device: torch.device) -> None:
    """Let `memory_peak_bytes` begin here, for each run of a process. On a CPU the kernel counts the whole process."""
    if device.type == "cuda":
        # Reference cycles keep the network of a finished run.
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def memory_peak_bytes(device: torch.device) -> int:
    """Peak memory so far: allocated on the CUDA device since `reset_memory_peak`, or resident in this process (without
    its workers)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
