"""A ladder at work: time every variant in turns, measure its rounding, train with and without it.

Each measurement is a separate process that writes a file. Measurements whose file exists are not repeated, so that a
killed ledger resumes where it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pycls_fast.config.ladder import Ladder, LadderSettings, Variant
from pycls_fast.ledger.ladder import processes
from pycls_fast.ledger.ladder.accuracy import CrossedTrainings
from pycls_fast.ledger.ladder.crossed import default_runs
from pycls_fast.ledger.ladder.folder import LedgerFolder, read_measurement
from pycls_fast.ledger.ladder.plan import Selection, merged, tree_path
from pycls_fast.ledger.ladder.processes import Process, ProcessResult
from pycls_fast.ledger.ladder.trainings import FAILED, Progress, TrainingRun, Trainings
from pycls_fast.train.folder import write_json

# Rare enough to leave the cores to the process that is timed.
_POLLING_SECONDS = 0.1


@dataclass
class Ledger:
    """A ladder at work in its folder.

    Attributes:
        flags, typed: options and overrides that make the experiment, for every tool.
        device: "cpu" or "cuda": where the variants run.
        say: called with a message at the start and the end of each measurement, and every minute for each training.
        cuda_devices: names of the CUDA devices that concurrent training runs divide among them; empty if there is no
            need to.
        conditions: what else must be the same at every start, by name (`folder.conditions`).
        selection: the variants, and which of them run.
        unmeasured: other measurements that failed or do not apply ("VARIANT: rounding", "gradients"), and why.
        refused: whether the settings of a combination are refused.
        crossed: the trainings, once they start.
        stop_requested: may be set while `run` works, which then stops its processes and raises `KeyboardInterrupt`.

    Raises:
        UserError: a baseline that is not for this device.
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
    selection: Selection = field(init=False)
    unmeasured: dict[str, str] = field(default_factory=dict)
    refused: Callable[[Variant], bool] = lambda variant: False
    crossed: CrossedTrainings | None = None
    stop_requested: bool = False
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        self.selection = Selection(self.ladder, self.settings.mode, self.settings.ranks, self.device)

    def open(self) -> None:
        """Create the folder, or resume in it, and lock it until `close`, which must be called even after an error.

        Raises:
            UserError: it holds results of a different plan, another ledger is using it, or it cannot be written to.
        """
        self.folder.open(self._plan())

    def check_folder(self) -> None:
        """Check that the folder is new or belongs to this plan; writes nothing.

        Raises:
            UserError: it holds results of a different plan or of different code.
        """
        self.folder.check(self._plan())

    def close(self) -> None:
        """Save the time of this start, and unlock the folder."""
        self.folder.close()

    def _plan(self) -> dict[str, Any]:
        # The mode is in the settings, `tree` in the variants' paths, and `against` does not affect any measurement.
        unmeasured = {"against", "tree"}
        left_out = {"mode": True, "baseline": unmeasured, "variants": {"__all__": unmeasured}}
        return {
            "ladder": self.ladder.model_dump(mode="json", exclude=left_out),  # type: ignore[arg-type]  # nested
            "base": [*self.flags, *self.typed],
            **self.settings.model_dump(mode="json"),
            **self.conditions,
        }

    def run(
        self,
        after_phase: Callable[[], object] = lambda: None,
        after_first: Callable[[float | None], object] = lambda seconds: None,
    ) -> None:
        """Do everything that is not done yet.

        Args:
            after_phase: called after the timings and before the trainings.
            after_first: called after the first timing with the seconds that its process took, or None if an earlier
                start made it.

        Raises:
            UserError: the reference does not run.
            KeyboardInterrupt: a stop was requested.
        """
        self._try_out(after_first)
        s = self.settings
        for number in range(1, s.rounds):
            # Alternating order: a steady drift cancels over two rounds.
            order = self.selection.runnable()
            for variant in order if number % 2 == 0 else reversed(order):
                self._time(variant, number)
        after_phase()
        if s.numerics_steps is not None:
            with_rounding = self.with_rounding()
            for variant in self.selection.runnable():
                what, file = f"{variant.name}: rounding", self.folder.numerics_file(variant)
                if variant in with_rounding:
                    arguments = processes.rounding_arguments(variant, file, steps=s.numerics_steps)
                    self._extra(what, variant, arguments, file)
                else:
                    self.unmeasured[what] = "one process measures it, which has no parallel settings"
        if s.gradients:
            first = self.selection.variants()[0]
            file = self.folder.gradients_file(first)
            self._extra("gradients", first, processes.gradients_arguments(first, file), file)
        if not s.trains:
            return
        after_phase()
        self.plan_trainings().run()

    def plan_trainings(self) -> CrossedTrainings:
        """The trainings of what is known to run."""
        names = [variant.name for variant in self.selection.runnable()[1:]]
        self.crossed = CrossedTrainings(
            self.ladder,
            self.settings,
            self.folder,
            names,
            alike=self._alike(),
            refused=self.refused,
            train=self.train,
            say=self.say,
        )
        return self.crossed

    def _alike(self) -> list[str]:
        """The variants whose weights are those of the one before them, bit for bit, after `numerics_steps`."""
        variants = {variant.name: variant for variant in self.selection.runnable()}
        files = {name: self.folder.numerics_file(variant) for name, variant in variants.items()}
        digests = {name: read_measurement(file).get("weights") for name, file in files.items() if file.is_file()}
        return [name for name in digests if digests[name] and digests[name] == digests.get(str(variants[name].against))]

    def total(self) -> int:
        """Number of processes in the whole plan, as far as it is known."""
        s, count = self.settings, len(self.selection.runnable())
        pieces = count * s.rounds + self.trainings()
        rounding = 0 if s.numerics_steps is None else len(self.with_rounding())
        return pieces + rounding + self.selection.tried_in_vain() + s.gradients

    def trainings(self) -> int:
        """The most trainings that the plan may take, as far as it is known."""
        if self.crossed is not None:
            return len(self.crossed.planned())
        count = len(self.selection.runnable()) - 1
        most = default_runs(count) if self.settings.runs_at_most is None else self.settings.runs_at_most
        return most if count else 0

    def with_rounding(self) -> list[Variant]:
        """The variants whose rounding is measured, if any is: one process can do it, and it is not another's."""
        return processes.with_own_rounding(self.selection.runnable(), self.typed)

    def _try_out(self, after_first: Callable[[float | None], object]) -> None:
        """Time the first round, in the ladder's order, which finds what cannot run here; later variants go without it.

        If a variant fails in a later round, only that one is left out: those after it include its change and already
        have timings.
        """
        for variant in self.selection.in_order():
            finished = self._time(variant, 0)
            if finished is not None and finished.status != 0:
                self.selection.exclude(variant, finished)
            if variant.against is None:
                after_first(None if finished is None else finished.seconds)

    def _time(self, variant: Variant, number: int) -> ProcessResult | None:
        s = self.settings
        file = self.folder.timing_file(variant, number)
        arguments = processes.timing_arguments(
            variant, file, steps=s.steps, warmup_steps=s.warmup_steps, seconds=s.seconds
        )
        what = f"{variant.name}: timing {number + 1} of {s.rounds}"
        # In later rounds it has run before: another program may have been in its way.
        finished = self._piece(what, variant, "time", arguments, file, ranks=variant.ranks or 1, again=number > 0)
        if finished is not None and finished.status != 0:
            self.selection.blame(variant, finished)
        return finished

    def _extra(self, what: str, variant: Variant, arguments: Sequence[str], file: Path) -> None:
        """Run an optional measurement: if it fails, the variant continues without it."""
        finished = self._piece(what, variant, "ledger", arguments, file, ranks=1)
        if finished is not None and finished.status != 0:
            self.unmeasured[what] = finished.reason()

    def _piece(
        self,
        what: str,
        variant: Variant,
        verb: str,
        arguments: Sequence[str],
        file: Path,
        *,
        ranks: int,
        again: bool = False,
    ) -> ProcessResult | None:
        """Run one process to its end, unless its file exists; with `again`, once more if it fails."""
        if file.is_file():
            self.progress.note(training=False)
            return None
        file.parent.mkdir(parents=True, exist_ok=True)
        finished = self._to_its_end(what, verb, variant, arguments, ranks, file)
        if again and finished.status != 0:
            self.say(f"{what}: failed with status {finished.status}: {finished.reason()}; trying once more")
            finished = self._to_its_end(what, verb, variant, arguments, ranks, file)
        self._report(what, finished, training=False)
        return finished

    def _to_its_end(
        self, what: str, verb: str, variant: Variant, arguments: Sequence[str], ranks: int, file: Path
    ) -> ProcessResult:
        process = self._start(what, verb, variant, arguments, ranks=ranks, log=self.folder.log_file(file))
        try:
            while (finished := self._finished(process)) is None:
                time.sleep(_POLLING_SECONDS)
        except BaseException:
            Process.stop([process])
            raise
        return finished

    def _finished(self, process: Process) -> ProcessResult | None:
        """How a process ended, or None while it runs.

        Raises:
            KeyboardInterrupt: a stop was requested; if the process has ended, it may be by the same signal.
        """
        finished = process.finished()
        if self.stop_requested:
            raise KeyboardInterrupt
        return finished

    def _report(self, what: str, finished: ProcessResult, *, training: bool) -> None:
        """Count a process that has ended, and say how."""
        self.progress.note(training=training, seconds=finished.seconds)
        if self.folder.stopwatch is not None:
            self.folder.stopwatch.lap()
        if finished.status == 0:
            total = self.total()
            left = self.progress.left(total, self.trainings(), self.settings.jobs)
            self.say(f"{what}: {finished.seconds:.0f} s  ({self.progress.done} of {total}, {left})")
        elif finished.refused:
            self.say(f"{what}: cannot run: {finished.reason()}")
        else:
            self.say(f"{what}: failed with status {finished.status}: {finished.reason()} (full log: {finished.log})")

    def train(self, runs: Sequence[TrainingRun]) -> None:
        """Start those of the runs that are not done, and wait for them."""
        # Two families may share a run.
        waiting = list({run.folder: run for run in runs if not run.is_done}.values())
        trainings = Trainings(
            waiting,
            jobs=self.settings.jobs,
            devices=self.cuda_devices,
            start=self._start_training,
            finished=self._finished,
            done=self._training_done,
            say=self.say,
        )
        try:
            while trainings.advance():
                time.sleep(_POLLING_SECONDS)
        except BaseException:
            Process.stop(trainings.processes())
            raise

    def _start_training(self, run: TrainingRun, devices: Sequence[str]) -> Process:
        arguments = processes.training_arguments(run.variant, run.folder, seed=run.seed)
        ranks, log = run.variant.ranks or 1, self.folder.log_file(run.folder)
        return self._start(str(run), "train", run.variant, arguments, ranks=ranks, log=log, devices=devices)

    def _training_done(self, run: TrainingRun, finished: ProcessResult) -> None:
        self._report(str(run), finished, training=True)
        if finished.status != 0:
            write_json(run.folder / FAILED, {"reason": finished.reason()})

    def _start(
        self,
        what: str,
        verb: str,
        variant: Variant,
        arguments: Sequence[str],
        *,
        ranks: int,
        log: Path,
        devices: Sequence[str] = (),
    ) -> Process:
        self.folder.note_code()
        self.say(f"{what}: started (log: {log})")
        return self.process(verb, variant, arguments, ranks=ranks, log=log, devices=devices)

    def process(
        self,
        verb: str,
        variant: Variant,
        arguments: Sequence[str],
        *,
        ranks: int,
        log: Path,
        devices: Sequence[str] = (),
    ) -> Process:
        """Start a verb with a variant's code; it holds the folder's lock, if there is one.

        `arguments` replace the experiment's own overrides of the same keys.
        """
        tree = None if variant.tree is None else tree_path(variant.tree)
        return Process(
            verb,
            [*self.flags, *merged(self.typed, arguments)],
            ranks=ranks,
            log=log,
            inherits=self.folder.inherited,
            tree=tree,
            devices=devices,
        )
