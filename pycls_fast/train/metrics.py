"""Numbers of the training steps: loss and speed, memory, a profile."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, profiler

from pycls_fast.parallel.world import World
from pycls_fast.plan.operators import LiveMemory
from pycls_fast.train.display import Display
from pycls_fast.train.folder import writing


class TrainMetrics:
    """Sums over the steps of an interval, in one vector: `[loss, finite grad norms, finite steps, steps]`.

    Args:
        read: "interval" keeps the sums on the device, and the host reads them once an interval; with "step" the host
            reads loss and gradient norm in every step and sums them, as a plain loop does. The numbers are the same.
    """

    def __init__(self, device: torch.device, *, read: str = "interval") -> None:
        self._reads = read == "step"
        self._device = device
        place = torch.device("cpu") if self._reads else device
        self._sums = torch.zeros(4, dtype=torch.float64, device=place)
        self._facts: dict[str, Tensor | float] = {}
        # Views: adding to `_sums[i]` would also copy the sum onto itself.
        self._loss, self._norms, self._finite, self._steps = (self._sums[i] for i in range(4))

    def add_loss(self, loss: Tensor) -> None:
        """Add a microbatch's share of the step's mean loss."""
        self._loss += loss.item() if self._reads else loss.detach()

    def add_facts(self, facts: Mapping[str, Tensor]) -> None:
        """Add the network's own numbers about a step (`Network.facts`)."""
        for name, value in facts.items():
            self._facts[name] = self._facts.get(name, 0.0) + value.double()

    def add_step(self, grad_norm: Tensor) -> None:
        """Count a finished step. A norm that is not finite marks a step that loss scaling skips."""
        if self._reads:
            grad_norm = torch.tensor(grad_norm.item(), dtype=torch.float64)
        finite = torch.isfinite(grad_norm)
        self._norms += torch.where(finite, grad_norm, 0.0)
        self._finite += finite
        self._steps += 1

    def read(self, world: World) -> dict[str, Any]:
        """Means over the interval and the ranks; starts a new one. With "interval", this is the only wait for the
        device."""
        facts = [torch.as_tensor(value, device=self._device).view(1) for value in self._facts.values()]
        sums = world.sum(torch.cat([self._sums.to(self._device), *facts])).tolist()
        # Sums over the ranks, steps included. The norm is the same on every rank; the loss is not.
        loss, norms, finite, steps = sums[:4]
        means = {name: value / steps for name, value in zip(self._facts, sums[4:], strict=True)}
        self._sums.zero_()
        self._facts.clear()
        return {
            "loss": loss / max(steps, 1),
            "grad_norm": norms / finite if finite else float("nan"),
            "skipped_steps": round((steps - finite) / world.data_size),
            "facts": means,
        }


@dataclass
class Clock:
    """Wall time of training and logging, without evaluation and checkpoints."""

    started: float = 0.0
    # Seconds in which steps waited for data.
    waited: float = 0.0
    images: int = 0
    steps: int = 0

    def start(self) -> None:
        self.started = time.perf_counter()
        self.waited, self.images, self.steps = 0.0, 0, 0

    def add_step(self, images: int) -> None:
        self.images += images
        self.steps += 1

    def read(self, world: World) -> dict[str, float]:
        """Rates of the interval once the device has finished; starts anew. All ranks call this.

        Of the data the longest wait counts: the other ranks wait for that one when gradients are exchanged.
        """
        seconds = time.perf_counter() - self.started
        rates = {
            "images_per_second": self.images / seconds,
            "step_seconds": seconds / self.steps,
            "data_wait_fraction": max(world.gather(self.waited)) / seconds,
        }
        self.start()
        return rates


def reset_memory_peak(device: torch.device) -> None:
    """Let `memory_peak_bytes` count from here on, as a process may have several runs; on a CPU the kernel counts the
    whole process."""
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


STEPS = 3
_COUNTED = 2
_OPERATORS = 15


class StepMemory:
    """The peak memory of a training step on a CPU: of the tensors that are alive, not of the process with its
    libraries. The process's first two steps are counted, of which the second has the optimizer's state.

    Counting takes time in every operation. On CUDA the allocator counts, and where operations cannot be seen (compiled
    code) it is the peak of the process, as far as the system knows it.
    """

    def __init__(self, world: World, *, compiled: bool) -> None:
        self._device = world.device
        self._left = _COUNTED if world.device.type == "cpu" and not compiled else 0
        self._peak = 0

    @contextmanager
    def counting(self, persistent_tensors: Callable[[], list[Tensor]]) -> Iterator[None]:
        """A context for one step, which is counted if it is among the first, besides `Step.persistent_tensors`."""
        if not self._left:
            yield
            return
        self._left -= 1
        held = persistent_tensors()
        with LiveMemory(held) as memory:
            yield
        # A tensor and its views are one storage.
        storages = {s._cdata: s.nbytes() for s in (tensor.untyped_storage() for tensor in held)}
        self._peak = max(self._peak, sum(storages.values()) + memory.peak)

    def bytes(self) -> int:
        return self._peak or memory_peak_bytes(self._device)

    @property
    def counted(self) -> int | None:
        """The peak of live tensors; None if nothing was counted."""
        return self._peak or None


class StepProfile:
    """Profiles `STEPS` steps of one rank from the `first` on (counted from 1; None: none), which are slower than
    others, as a Chrome trace `step_N.json.gz` in a folder."""

    def __init__(self, folder: Path, first: int | None, *, cuda: bool, display: Display) -> None:
        self._first, self._cuda, self._display = first, cuda, display
        self._file = folder / f"step_{first}.json.gz"
        self._running: profiler.profile | None = None

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """A context for a step, counted from 1; at the end of the last one the profile is written and shown."""
        if step == self._first:
            kinds = [profiler.ProfilerActivity.CPU] + [profiler.ProfilerActivity.CUDA] * self._cuda
            self._running = profiler.profile(activities=kinds)
            self._running.start()
        yield
        if (running := self._running) is None or self._first is None or step < self._first + STEPS - 1:
            return
        self._running = None
        running.stop()
        with writing(self._file):
            self._file.parent.mkdir(exist_ok=True)
            running.export_chrome_trace(str(self._file))
        by = "self_cuda_time_total" if self._cuda else "self_cpu_time_total"
        self._display.note(running.key_averages().table(sort_by=by, row_limit=_OPERATORS, max_name_column_width=40))
        place = f"{self._file} (open it in https://ui.perfetto.dev)"
        self._display.note(f"profile of steps {self._first} to {step}: {place}")
        self._first = None

    def close(self) -> None:
        """Stop a profile that the end of the run has cut off, and say so if there is none."""
        if self._running is not None:
            self._running.stop()
        if self._first is not None:
            steps = f"{self._first} to {self._first + STEPS - 1}"
            self._display.note(f"runtime.profile_step: no profile; not all of the steps {steps} were trained here")
