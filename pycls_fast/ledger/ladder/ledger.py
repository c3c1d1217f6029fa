"""A ladder at work: time every variant in turns, measure its rounding, train with and without it.

Each measurement is a separate process that writes a file. Measurements whose file exists are not repeated, so that a
killed ledger resumes where it was; only a round of timings that it has cut short is timed anew.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pycls_fast.config.keys import text_override
from pycls_fast.config.ladder import Ladder, LadderSettings, Variant
from pycls_fast.ledger.ladder.folder import LedgerFolder, SavedRounding, SavedTiming, read_measurement
from pycls_fast.ledger.ladder.plan import Selection, combination, default_runs, merged, tree_path, with_parents
from pycls_fast.ledger.ladder.processes import (
    FAILED,
    ONE_PROCESS,
    Process,
    ProcessResult,
    TrainingRun,
    progress_of,
    timing_arguments,
)
from pycls_fast.ledger.ladder.trainings import CrossedTrainings
from pycls_fast.train.display import duration
from pycls_fast.train.folder import RunFolder, output_file, write_json
from pycls_fast.train.signals import StopRequest

# Rare enough to leave the cores to the process that is timed.
_POLLING_SECONDS = 0.1
# Between two lines on how far the trainings are.
_PROGRESS_SECONDS = 60.0


@dataclass
class Ledger:
    """A ladder at work in its folder, which `folder.opened(ledger.plan())` opens. What runs processes raises
    `KeyboardInterrupt` once a stop is requested.

    Attributes:
        flags, typed: options and overrides that make the experiment, for every tool.
        device: "cpu" or "cuda": where the variants run.
        cuda_devices: those that concurrent training runs divide among them; empty if there is no need to.
        conditions: what else must be the same at every start, by name (`folder.conditions`).
        refused: why the settings of a combination are refused, if they are.
        unmeasured: other measurements that failed or do not apply ("VARIANT: rounding", "gradients"), and why.
        trainings: those of the ladder, once they start.
        stop: whether the processes are to be stopped.
    """

    ladder: Ladder
    settings: LadderSettings
    flags: Sequence[str]
    typed: Sequence[str]
    device: str
    folder: LedgerFolder
    say: Callable[[str], None] = print
    cuda_devices: Sequence[str] = ()
    conditions: Mapping[str, Any] = field(default_factory=dict)
    refused: Callable[[Variant], str | None] = lambda variant: None
    selection: Selection = field(init=False)
    unmeasured: dict[str, str] = field(default_factory=dict)
    trainings: CrossedTrainings | None = None
    stop: StopRequest = field(default_factory=StopRequest)

    def __post_init__(self) -> None:
        base = self.ladder.baseline
        if base.ranks is None and self.settings.ranks > 1:
            base = base.model_copy(update={"ranks": self.settings.ranks})
            self.ladder = self.ladder.model_copy(update={"baseline": base})
        self.selection = Selection(self.ladder, self.settings.mode, self.device)
        # Of this start: seconds that each measurement and each training took, and the timings.
        self._measurement_seconds: list[float] = []
        self._training_seconds: list[float] = []
        self._timed: set[Path] = set()

    def plan(self) -> dict[str, Any]:
        """What the folder belongs to."""
        # The mode is in the settings, `tree` in the variants' paths, and `against` does not affect any measurement.
        unmeasured = {"against", "tree"}
        left_out = {"mode": True, "baseline": unmeasured, "variants": {"__all__": unmeasured}}
        return {
            "ladder": self.ladder.model_dump(mode="json", exclude=left_out),  # type: ignore[arg-type]  # nested
            "base": [*self.flags, *self.typed],
            **self.settings.model_dump(mode="json"),
            **self.conditions,
        }

    def time_reference(self) -> tuple[float | None, SavedTiming]:
        """Time the reference once, unless an earlier start has; returns the seconds that its process took (None if an
        earlier start made it) and its record. A `UserError` if it does not run."""
        reference = self.selection.variants()[0]
        finished = self._time(reference, 0)
        took = None if finished is None else finished.seconds
        return took, read_measurement(self.folder.timing_file(reference, 0), SavedTiming)

    def time_variants(self) -> None:
        """Time every variant in every round, as far as it is not done; a `UserError` if the reference does not run."""
        # The first round finds what cannot run here; later variants go without it. One that fails in a later round is
        # left out alone: those after it include its change and already have timings.
        for variant in self.selection.in_order():
            self._time(variant, 0)
        for number in range(self.settings.rounds):
            # Again for those that `_time` has put aside.
            for _ in range(2):
                # Alternating order: a steady drift cancels over two rounds.
                order = self.selection.runnable()
                for variant in order if number % 2 == 0 else reversed(order):
                    self._time(variant, number)

    def measure_numerics(self) -> None:
        """Measure each variant's rounding, and the reference's gradients, as far as they are asked for and missing."""
        s = self.settings
        if s.numerics_steps is not None:
            for variant in self.with_rounding():
                file, what = self.folder.file("numerics", variant), f"{variant.name}: rounding"
                self._measure_alone(what, "numerics", variant, file, f"steps={s.numerics_steps}")
        if s.gradients:
            first = self.selection.variants()[0]
            # In float32, so that nothing has rounded them.
            self._measure_alone("gradients", "gradients", first, self.folder.file("gradients", first), "precision=fp32")

    def plan_trainings(self) -> CrossedTrainings:
        """The trainings of what is known to run."""
        _, *variants = self.selection.runnable()
        self.trainings = CrossedTrainings(
            self.ladder,
            self.settings,
            self.folder,
            names=[variant.name for variant in variants],
            alike=self._alike(),
            refused=self.refused,
            train=self.train,
            say=self.say,
        )
        factors = self.trainings.factors
        for name in (v.name for v in variants if v.name not in (*factors.crossed, *factors.alone)):
            # In a cumulative ladder it was timed on top of others, without which its settings may be refused.
            why = self.refused(combination(self.ladder, with_parents(self.ladder, [name]))) or "it did not run at first"
            self.unmeasured[f"{name}: accuracy"] = why
            self.say(f"{name}: not trained: {why}")
        return self.trainings

    def _alike(self) -> list[str]:
        """The variants whose weights are those of the one before them, bit for bit, after `numerics_steps`."""
        variants = {variant.name: variant for variant in self.selection.runnable()}
        files = {name: self.folder.file("numerics", variant) for name, variant in variants.items()}
        digests = {
            name: read_measurement(file, SavedRounding).weights for name, file in files.items() if file.is_file()
        }
        return [name for name in digests if digests[name] and digests[name] == digests.get(str(variants[name].against))]

    def files(self) -> dict[str, list[Path]]:
        """The files that measurements write, by kind; trainings are not among them."""
        s, folder, variants = self.settings, self.folder, self.selection.runnable()
        return {
            "timings": [folder.timing_file(variant, number) for variant in variants for number in range(s.rounds)],
            "rounding": [folder.file("numerics", v) for v in self.with_rounding()]
            if s.numerics_steps is not None
            else [],
            "gradients": [folder.file("gradients", self.selection.variants()[0])] if s.gradients else [],
        }

    def missing(self) -> dict[str, int]:
        """How many measurements of each kind are not done, and the most trainings that may be left."""
        trained = sum(run.is_done for run in self.trainings.planned()) if self.trainings is not None else 0
        missing = {kind: sum(not file.is_file() for file in files) for kind, files in self.files().items()}
        return {**missing, "training": self.trainings_at_most() - trained}

    def total(self) -> int:
        """Number of measurements and trainings in the whole plan, as far as it is known."""
        return sum(map(len, self.files().values())) + self.trainings_at_most()

    def trainings_at_most(self) -> int:
        """The most trainings that the plan may take, as far as it is known."""
        if self.trainings is not None:
            return len(self.trainings.planned())
        count = len(self.selection.runnable()) - 1
        most = default_runs(count) if self.settings.runs_at_most is None else self.settings.runs_at_most
        return most if count else 0

    def with_rounding(self) -> list[Variant]:
        """The variants whose rounding is measured, if any is: one process cannot round as several do."""
        return [variant for variant in self.selection.runnable() if variant.ranks == 1]

    def _time(self, variant: Variant, number: int) -> ProcessResult | None:
        s, file = self.settings, self.folder.timing_file(variant, number)
        more = timing_arguments(steps=s.steps, warmup_steps=s.warmup_steps, seconds=s.seconds)
        # In later rounds it has run before: another program may have been in its way.
        what, again = f"{variant.name}: timing {number + 1} of {s.rounds}", number > 0
        finished = self._measure(what, "time", variant, file, more, again=again)
        if finished is not None and finished.status != 0:
            self.selection.blame(variant, finished, is_first=number == 0)
        elif finished is not None:
            self._timed.add(file)
            # Between starts the machine's speed drifts: what an earlier one timed of this round is timed again.
            for other in {self.folder.timing_file(each, number) for each in self.selection.runnable()} - self._timed:
                other.unlink(missing_ok=True)
        return finished

    def _measure_alone(self, what: str, verb: str, variant: Variant, file: Path, own: str) -> None:
        """Make an optional measurement, in one process: if it fails, the variant continues without it."""
        alone = variant.model_copy(update={"ranks": 1})
        finished = self._measure(what, f"ledger {verb}", alone, file, (*ONE_PROCESS, own))
        if finished is not None and finished.status != 0:
            self.unmeasured[what] = finished.reason()

    def _measure(
        self, what: str, verb: str, variant: Variant, file: Path, more: Sequence[str], *, again: bool = False
    ) -> ProcessResult | None:
        """Run one process to its end, unless its file exists; with `again`, once more if it fails."""
        if file.is_file():
            return None
        arguments = (*more, text_override("output", str(file)))
        finished = self._wait(self._start(what, verb, variant, arguments, file))
        if again and finished.status != 0:
            self.say(f"{what}: failed with status {finished.status}: {finished.reason()}; trying once more")
            finished = self._wait(self._start(what, verb, variant, arguments, file))
        self._measurement_seconds.append(finished.seconds)
        self._report(what, finished)
        return finished

    def _wait(self, process: Process) -> ProcessResult:
        try:
            while (finished := self._poll(process)) is None:
                time.sleep(_POLLING_SECONDS)
        except BaseException:
            Process.stop([process])
            raise
        return finished

    def _poll(self, process: Process) -> ProcessResult | None:
        """How a process ended, or None while it runs; a `KeyboardInterrupt` if a stop was requested."""
        finished = process.finished()
        # If it has ended, it may be by the same signal.
        if self.stop:
            raise KeyboardInterrupt
        return finished

    def _report(self, what: str, finished: ProcessResult) -> None:
        """Say how a process ended."""
        self.folder.save_seconds()
        if finished.status == 0:
            missing, total = self.missing(), self.total()
            done = total - sum(missing.values())
            self.say(f"{what}: {finished.seconds:.0f} s  ({done} of {total}, {self._left(missing)})")
        elif finished.refused:
            self.say(f"{what}: cannot run: {finished.reason()}")
        else:
            self.say(f"{what}: failed with status {finished.status}: {finished.reason()} (full log: {finished.log})")

    def _left(self, missing: Mapping[str, int]) -> str:
        """The remaining time in words; how long a training takes is not known before one has ended."""
        runs = missing["training"]
        others = sum(missing.values()) - runs
        unknown = runs > 0 and not self._training_seconds
        if unknown and not others:
            return "the training comes next"
        each, run = (sum(s) / max(len(s), 1) for s in (self._measurement_seconds, self._training_seconds))
        seconds = others * each + runs * run / self.settings.jobs
        return f"about {duration(seconds)} left{' before the training' if unknown else ''}"

    def train(self, runs: Sequence[TrainingRun]) -> None:
        """Run those trainings that are not done, `jobs` at a time, and wait for them."""
        # Two families may share a run.
        missing = list({run.folder: run for run in runs if not run.is_done}.values())
        lacked_memory = self._train(missing, self.settings.jobs)
        self._train(lacked_memory, jobs=1)

    def _train(self, runs: Sequence[TrainingRun], jobs: int) -> list[TrainingRun]:
        """Run trainings; returns those that lacked memory while others may have run, which are to be started again by
        themselves. If one raises, or a stop is requested, all end."""
        waiting, free, again = deque(runs), list(self.cuda_devices), list[TrainingRun]()
        running: dict[TrainingRun, tuple[Process, list[str]]] = {}
        progress_due = time.monotonic() + _PROGRESS_SECONDS

        def fits(ranks: int) -> bool:
            return not running or (len(running) < jobs and (not self.cuda_devices or len(free) >= ranks))

        try:
            while waiting or running:
                while waiting and fits(ranks := waiting[0].variant.ranks or 1):
                    run, devices = waiting.popleft(), free[:ranks]
                    del free[:ranks]
                    running[run] = self._start_training(run, devices), devices
                for run, (process, devices) in list(running.items()):
                    ended = self._poll(process)
                    if ended is None:
                        continue
                    del running[run]
                    free += devices
                    if ended.lacked_memory and jobs > 1:
                        self.say(f"{run}: lacked memory; starting it once more by itself at the end")
                        again.append(run)
                    else:
                        self._training_done(run, ended)
                if time.monotonic() >= progress_due:
                    progress_due = time.monotonic() + _PROGRESS_SECONDS
                    for run in running:
                        self.say(f"{run}: {progress_of(RunFolder(run.folder))}")
                time.sleep(_POLLING_SECONDS)
        except BaseException:
            Process.stop(process for process, _ in running.values())
            raise
        return again

    def _start_training(self, run: TrainingRun, devices: Sequence[str]) -> Process:
        folder = text_override("run_dir", str(run.folder))
        own = (f"seed={run.seed}", folder, "runtime.progress=plain")
        return self._start(str(run), "train", run.variant, own, run.folder, devices)

    def _training_done(self, run: TrainingRun, finished: ProcessResult) -> None:
        if finished.status != 0:
            # One that is refused leaves no folder.
            write_json(output_file(run.folder / FAILED), {"reason": finished.reason()})
        self._training_seconds.append(finished.seconds)
        self._report(str(run), finished)

    def _start(
        self, what: str, verb: str, variant: Variant, arguments: Sequence[str], made: Path, devices: Sequence[str] = ()
    ) -> Process:
        log = self.folder.log_file(made)
        self.folder.note_code()
        self.say(f"{what}: started (log: {log})")
        return self.process(verb, variant, arguments, log=log, devices=devices)

    def process(
        self, verb: str, variant: Variant, more: Sequence[str], *, log: Path, devices: Sequence[str] = ()
    ) -> Process:
        """Start a verb with a variant's code, ranks and overrides; the last of those of one key stays."""
        return Process(
            verb,
            [*self.flags, *merged(self.typed, variant.overrides, more)],
            ranks=variant.ranks or 1,
            log=log,
            tree=None if variant.tree is None else tree_path(variant.tree),
            devices=devices,
        )
