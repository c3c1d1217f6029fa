"""A profile of a few training steps: a trace for https://ui.perfetto.dev and the operators that take longest."""

from __future__ import annotations

from pathlib import Path

from torch import profiler

from pycls_fast.train.display import Display
from pycls_fast.train.run_folder import writing

STEPS = 3
_OPERATORS = 15


class StepProfile:
    """Profiles `STEPS` steps of one rank; they are slower than others.

    Args:
        folder: gets `step_N.json.gz`, a Chrome trace.
        first: the first of the steps, counted from 1; None profiles nothing.
        cuda: whether the steps run on CUDA.
        display: shows the operators.
    """

    def __init__(self, folder: Path, first: int | None, *, cuda: bool, display: Display) -> None:
        self._folder = folder
        self._first = first
        self._cuda = cuda
        self._display = display
        self._running: profiler.profile | None = None
        self._is_written = False

    def before(self, step: int) -> None:
        """Start if this is the first of the steps, counted from 1."""
        if step == self._first:
            kinds = [profiler.ProfilerActivity.CPU] + [profiler.ProfilerActivity.CUDA] * self._cuda
            self._running = profiler.profile(activities=kinds)
            self._running.start()

    def after(self, step: int) -> None:
        """Write and show the profile if this was the last of the steps.

        Raises:
            UserError: the trace cannot be written.
        """
        if self._running is None or self._first is None or step < self._first + STEPS - 1:
            return
        running, self._running = self._running, None
        running.stop()
        file = self._folder / f"step_{self._first}.json.gz"
        with writing(file):
            self._folder.mkdir(exist_ok=True)
            running.export_chrome_trace(str(file))
        self._is_written = True
        title = f"steps {self._first} to {step}: operators by time on the {'GPU' if self._cuda else 'CPU'}, ms per step"
        self._display.table(title, self._longest(running))
        self._display.note(f"profile: {file} (open it in https://ui.perfetto.dev)")

    def _longest(self, running: profiler.profile) -> list[tuple[str, str]]:
        """Names of the longest operators, their own time (without the operators that they call), share and calls."""
        name = "self_device_time_total" if self._cuda else "self_cpu_time_total"
        # In microseconds.
        times = [(getattr(event, name), event) for event in running.key_averages()]
        whole = max(sum(time for time, _ in times), 1e-9)
        longest = sorted(times, key=lambda item: -item[0])[:_OPERATORS]
        return [
            (event.key, f"{time / 1000 / STEPS:9.3f}  {time / whole:4.0%}  {event.count / STEPS:g} calls")
            for time, event in longest
        ]

    def close(self) -> None:
        """Stop a profile that the end of the run has cut off; a note says that there is none."""
        if self._running is not None:
            self._running.stop()
        if self._first is not None and not self._is_written:
            last = self._first + STEPS - 1
            self._display.note(f"runtime.profile_step: no profile; steps {self._first} to {last} were not all trained")
