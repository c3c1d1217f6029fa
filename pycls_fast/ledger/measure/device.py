"""How a device is measured: the seconds of calls, memory, and the rate of a large matrix product."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from pycls_fast.ledger.report.statistics import spread
from pycls_fast.parallel.world import World


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_calls(action: Callable[[], object], count: int, device: torch.device) -> list[float]:
    """The seconds of each of `count` consecutive calls; on CUDA by events in its stream, while the host runs ahead."""

    def mark() -> Any:
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    synchronize(device)
    marks = [mark()]
    for _ in range(count):
        action()
        marks.append(mark())
    synchronize(device)
    if device.type == "cuda":
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]
    return [after - before for before, after in pairwise(marks)]


@dataclass
class DeviceMemory:
    """CUDA memory of one of several variants in a process: what it holds, and its highest peak by part."""

    device: torch.device
    held: int = 0
    peaks: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Count memory that is allocated inside the context towards `part`."""
        if self.device.type != "cuda":
            yield
            return
        synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        yield
        synchronize(self.device)
        rise = torch.cuda.max_memory_allocated(self.device) - before
        self.peaks[part] = max(self.peaks.get(part, 0), self.held + rise)
        self.held += torch.cuda.memory_allocated(self.device) - before


def sustained_seconds(action: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Seconds of a call in the last half of a series that lasts about so long: a GPU that was idle clocks higher for
    its first tenths of a second than its power allows it to go on."""
    _, first = time_calls(action, 2, device)
    calls = max(int(seconds / first), 4)
    return spread(time_calls(action, calls, device)[calls // 2 :]).p50


# Large enough to reach the device's peak rate, small enough to be quick.
_MATMUL_SIZE = {"cpu": 2048, "cuda": 8192}
_MATMULS = 3
# On a GPU, before those that count.
_BUSY_SECONDS = 0.5


class MatmulPeak:
    """The rate of a square matrix product of random values (zeros would draw less power and run faster).

    Measured repeatedly between the turns, so that its median is of the same machine state as theirs.
    """

    def __init__(self, dtype: torch.dtype, world: World, size: int | None = None) -> None:
        """All ranks multiply at the same time, as they train; `size` is the side, 2048 or on CUDA 8192 by default."""
        self.dtype, self.size, self._world = dtype, size or _MATMUL_SIZE[world.device.type], world
        self._seconds: list[float] = []
        self._generator = torch.Generator(world.device).manual_seed(0)

    def measure(self) -> None:
        """Time a few products; of each, the slowest rank's time is kept."""
        device, shape = self._world.device, (self.size, self.size)
        a_NN, b_NN = (torch.randn(shape, device=device, generator=self._generator).to(self.dtype) for _ in range(2))
        out_NN = torch.empty_like(a_NN)
        self._world.barrier()
        if device.type == "cuda":
            sustained_seconds(lambda: torch.mm(a_NN, b_NN, out=out_NN), device, _BUSY_SECONDS)
        # The first one warms up.
        _, *seconds = time_calls(lambda: torch.mm(a_NN, b_NN, out=out_NN), 1 + _MATMULS, device)
        self._seconds += [max(each) for each in zip(*self._world.gather(seconds), strict=True)]

    def record(self) -> dict[str, Any]:
        """The values for JSON; `flops_per_second` of all ranks together, a multiply-add counts 2."""
        seconds = spread(self._seconds).p50
        return {
            "size": self.size,
            "dtype": str(self.dtype).removeprefix("torch."),
            "seconds_p50": seconds,
            "samples": len(self._seconds),
            "flops_per_second": 2 * self.size**3 / seconds * self._world.size,
        }
