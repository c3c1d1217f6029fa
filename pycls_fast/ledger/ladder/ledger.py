"""A ladder at work: time every variant in turns, measure its rounding, train with and without it.

Each measurement is a separate process that writes a file. Measurements whose file exists are not repeated, so that a
killed ledger resumes where it was; only a round of timings that it has cut short is timed anew.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pycls_fast.config.keys import text_override
from pycls_fast.config.ladder import Ladder, LadderSettings, Variant
from pycls_fast.ledger.ladder.folder import LedgerFolder, SavedRounding, SavedTiming, read_measurement
from pycls_fast.ledger.ladder.plan import (
    Family,
    Selection,
    combination,
    families,
    find_factors,
    merged,
    pairs_of,
    tree_path,
    with_parents,
)
from pycls_fast.ledger.ladder.processes import (
    FAILED,
    ONE_PROCESS,
    OURS,
    Job,
    Process,
    ProcessResult,
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
        ended = self._time(reference, 0)
        took = None if ended is None else ended.seconds
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
        """Measure each variant's rounding, and the reference's gradients, as far as they are asked for and missing; one
        that fails is left out alone."""
        for job in (*self._roundings(), *self._gradients()):
            ended = self._measure(job)
            if ended is not None and ended.status != 0:
                self.unmeasured[job.what] = ended.reason()

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

    def train(self, runs: Sequence[Job]) -> None:
        """Run those trainings that are not done, `jobs` at a time, and wait for them. One that lacked memory beside
        others is started again by itself."""
        # Two families may share a run.
        missing, again = list({run.path: run for run in runs if not run.is_done}.values()), list[Job]()
        for at_once, jobs in ((self.settings.jobs, missing), (1, again)):
            with closing(self._each(jobs, at_once)) as each:
                for run, ended in each:
                    if ended.lacked_memory and at_once > 1:
                        self.say(f"{run.what}: lacked memory; starting it once more by itself at the end")
                        again.append(run)
                    else:
                        self._training_done(run, ended)

    def _training_done(self, run: Job, ended: ProcessResult) -> None:
        if ended.status != 0:
            # One that is refused leaves no folder.
            write_json(output_file(run.path / FAILED), {"reason": ended.reason()})
        self._training_seconds.append(ended.seconds)
        self._report(run.what, ended)

    def measurements(self) -> dict[str, list[Job]]:
        """All of them by kind; trainings are not among them."""
        rounds = range(self.settings.rounds)
        return {
            "timings": [self._timing(variant, number) for variant in self.selection.runnable() for number in rounds],
            "rounding": self._roundings(),
            "gradients": self._gradients(),
        }

    def missing(self) -> dict[str, int]:
        """How many measurements of each kind are not done, and the most trainings that may be left."""
        trained = sum(run.is_done for run in self.trainings.planned()) if self.trainings is not None else 0
        missing = {kind: sum(not job.is_done for job in jobs) for kind, jobs in self.measurements().items()}
        return {**missing, "training": self.trainings_at_most() - trained}

    def total(self) -> int:
        """Number of measurements and trainings in the whole plan, as far as it is known."""
        return sum(map(len, self.measurements().values())) + self.trainings_at_most()

    def trainings_at_most(self) -> int:
        """The most trainings that the plan may take, as far as it is known."""
        if self.trainings is not None:
            return len(self.trainings.planned())
        return len({(pair.seed, on) for pair in pairs_of(self.families()) for on in pair.on})

    def families(self) -> list[list[Family]]:
        """The families of trainings, if there are any, as far as it is known what can be combined."""
        if not self.settings.trains:
            return []
        _, *variants = self.selection.runnable()
        # Which combinations are refused is known before the trainings, after many seconds; they are hardly fewer.
        names = [variant.name for variant in variants]
        factors = self.folder.factors or find_factors(self.ladder, names, lambda variant: None)
        return families(self.ladder, factors, self.settings.runs_at_most, self.settings.first_seed)

    def start(self, job: Job, *, log: Path, devices: Sequence[str] = ()) -> Process:
        """Start a job with its variant's code, ranks and overrides; the last of those of one key stays."""
        variant = job.variant
        return Process(
            job.verb,
            [*self.flags, *merged(self.typed, variant.overrides, job.own)],
            ranks=variant.ranks or 1,
            log=log,
            tree=OURS if variant.tree is None else tree_path(variant.tree),
            devices=devices,
        )

    def _timing(self, variant: Variant, number: int) -> Job:
        s, file = self.settings, self.folder.timing_file(variant, number)
        own = timing_arguments(file, steps=s.steps, warmup_steps=s.warmup_steps, seconds=s.seconds)
        return Job(f"{variant.name}: timing {number + 1} of {s.rounds}", "time", variant, own, file)

    def _roundings(self) -> list[Job]:
        """Those of variants with one rank: one process cannot round as several do."""
        steps = self.settings.numerics_steps
        variants = [v for v in self.selection.runnable() if v.ranks == 1 and steps is not None]
        return [self._alone(f"{v.name}: rounding", "numerics", v, f"steps={steps}") for v in variants]

    def _gradients(self) -> list[Job]:
        first = self.selection.variants()[0]
        # In float32, so that nothing has rounded them.
        return [self._alone("gradients", "gradients", first, "precision=fp32")] if self.settings.gradients else []

    def _alone(self, what: str, verb: Literal["numerics", "gradients"], variant: Variant, own: str) -> Job:
        """A measurement that one process makes."""
        file = self.folder.file(verb, variant)
        arguments = (*ONE_PROCESS, own, text_override("output", str(file)))
        return Job(what, f"ledger {verb}", variant.model_copy(update={"ranks": 1}), arguments, file)

    def _time(self, variant: Variant, number: int) -> ProcessResult | None:
        job = self._timing(variant, number)
        # In later rounds it has run before: another program may have been in its way.
        ended = self._measure(job, again=number > 0)
        if ended is not None and ended.status != 0:
            self.selection.leave_out(
                variant, "cannot run" if ended.refused else "failed", ended.reason(), below=number > 0
            )
        elif ended is not None:
            self._timed.add(job.path)
            # Between starts the machine's speed drifts: what an earlier one timed of this round is timed again.
            for other in {self.folder.timing_file(each, number) for each in self.selection.runnable()} - self._timed:
                other.unlink(missing_ok=True)
        return ended

    def _measure(self, job: Job, *, again: bool = False) -> ProcessResult | None:
        """Run one process to its end, unless its file exists; with `again`, once more if it fails."""
        if job.is_done:
            return None
        ((_, ended),) = self._each([job], at_once=1)
        if again and ended.status != 0:
            self.say(f"{job.what}: failed with status {ended.status}: {ended.reason()}; trying once more")
            ((_, ended),) = self._each([job], at_once=1)
        self._measurement_seconds.append(ended.seconds)
        self._report(job.what, ended)
        return ended

    def _each(self, jobs: Sequence[Job], at_once: int) -> Generator[tuple[Job, ProcessResult]]:
        """Run jobs, so many at once, and yield each with how it ended. If a stop is requested, or anything raises, all
        end."""
        waiting, free = deque(jobs), list(self.cuda_devices)
        running: dict[Job, tuple[Process, list[str]]] = {}
        progress_due = time.monotonic() + _PROGRESS_SECONDS

        def fits(ranks: int) -> bool:
            return not running or (len(running) < at_once and (not self.cuda_devices or len(free) >= ranks))

        try:
            while waiting or running:
                while waiting and fits(ranks := waiting[0].variant.ranks or 1):
                    job, devices = waiting.popleft(), free[:ranks]
                    del free[:ranks]
                    self.folder.note_code()
                    log = self.folder.log_file(job.path)
                    self.say(f"{job.what}: started (log: {log})")
                    running[job] = self.start(job, log=log, devices=devices), devices
                for job, (process, devices) in list(running.items()):
                    ended = process.finished()
                    # If it has ended, it may be by the same signal.
                    if self.stop:
                        raise KeyboardInterrupt
                    if ended is not None:
                        del running[job]
                        free += devices
                        yield job, ended
                if time.monotonic() >= progress_due:
                    progress_due = time.monotonic() + _PROGRESS_SECONDS
                    for job in running:
                        if job.verb == "train":
                            self.say(f"{job.what}: {progress_of(RunFolder(job.path))}")
                time.sleep(_POLLING_SECONDS)
        finally:
            Process.stop(process for process, _ in running.values())

    def _report(self, what: str, ended: ProcessResult) -> None:
        """Say how a process ended."""
        self.folder.save()
        if ended.status == 0:
            missing, total = self.missing(), self.total()
            done = total - sum(missing.values())
            self.say(f"{what}: {ended.seconds:.0f} s  ({done} of {total}, {self._left(missing)})")
        elif ended.refused:
            self.say(f"{what}: cannot run: {ended.reason()}")
        else:
            self.say(f"{what}: failed with status {ended.status}: {ended.reason()} (full log: {ended.log})")

    def _left(self, missing: Mapping[str, int]) -> str:
        """The remaining time in words; how long a training takes is not known before one has ended."""
        runs = missing["training"]
        each, run = (sum(s) / max(len(s), 1) for s in (self._measurement_seconds, self._training_seconds))
        seconds = (sum(missing.values()) - runs) * each + runs * run / self.settings.jobs
        unknown = runs > 0 and not self._training_seconds
        return f"about {duration(seconds)} left{' before the training' if unknown else ''}"
