"""Running a ladder: time every arm in turns, measure its rounding, train it with several seeds.

Each measurement is a separate process that writes a file. Measurements whose file exists are not repeated, so that a
killed ledger resumes where it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pycls_fast.config.ladder import Ladder
from pycls_fast.ledger import commands
from pycls_fast.ledger.folder import LedgerFolder
from pycls_fast.ledger.plan import Arm, merged, tree_path
from pycls_fast.ledger.processes import Process, ProcessResult
from pycls_fast.ledger.progress import Progress
from pycls_fast.ledger.selection import Selection
from pycls_fast.ledger.settings import LadderSettings
from pycls_fast.ledger.trainings import Trainings, training_name


@dataclass
class Ledger:
    """A ladder at work in its folder.

    Attributes:
        flags, typed: options and overrides that make the experiment, for every tool.
        device: "cpu" or "cuda": where the arms run.
        tools: the folder of the tools.
        say: called with a message at the start and the end of each measurement, and every minute for each training.
        cuda_devices: names of the CUDA devices that concurrent training runs divide among them; empty if there is no
            need to.
        conditions: what else must be the same at every start, by name (`ledger.conditions`).
        selection: the arms, and which of them run.
        untrained: arms that were timed and whose training ended early, and why.
        unmeasured: other measurements that failed or do not apply ("ARM: rounding", "gradients"), and why.
        progress: what of the work is done.
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
    tools: Path
    say: Callable[[str], None] = print
    cuda_devices: Sequence[str] = ()
    conditions: Mapping[str, Any] = field(default_factory=dict)
    selection: Selection = field(init=False)
    untrained: dict[str, str] = field(default_factory=dict)
    unmeasured: dict[str, str] = field(default_factory=dict)
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
        return {
            # The mode is in the settings, `tree` in the arms' paths, and `against` does not affect any measurement.
            "ladder": self.ladder.model_dump(
                mode="json",
                exclude={
                    "mode": True,
                    "default_mode": True,
                    "baseline": {"against", "tree"},
                    "rungs": {"__all__": {"against", "tree"}},
                },
            ),
            "base": [*self.flags, *self.typed],
            **asdict(self.settings),
            **self.conditions,
        }

    def run(self, after_phase: Callable[[], object] = lambda: None) -> None:
        """Do everything that is not done yet; `after_phase` is called after the timings and before the training.

        Raises:
            UserError: the reference arm does not run.
            KeyboardInterrupt: a stop was requested.
        """
        self._try_out()
        s = self.settings
        for number in range(1, s.rounds):
            # Alternating order: a steady drift cancels over two rounds.
            order = self.selection.runnable()
            for arm in order if number % 2 == 0 else reversed(order):
                self._time(arm, number)
        after_phase()
        if s.numerics_steps is not None:
            with_rounding = self.with_rounding()
            for arm in self.selection.runnable():
                if arm in with_rounding:
                    self._numerics(arm, s.numerics_steps)
                else:
                    self.unmeasured[f"{arm.name}: rounding"] = _NO_ROUNDING
        if s.gradients:
            self._gradients(self.selection.arms()[0])
        if s.seeds:
            after_phase()
            self._train_all()

    def total(self) -> int:
        """Number of processes in the whole plan, as far as it is known."""
        s, count = self.settings, len(self.selection.runnable())
        pieces = count * (s.rounds + s.seeds)
        rounding = 0 if s.numerics_steps is None else len(self.with_rounding())
        return pieces + rounding + self.selection.tried_in_vain() + len(self.selection.alone()) + s.gradients

    def with_rounding(self) -> list[Arm]:
        """The arms whose rounding is measured, if any is: one process can do it, and it is not another arm's."""
        return commands.with_own_rounding(self.selection.runnable(), self.typed)

    def _try_out(self) -> None:
        """Time the first round, in the ladder's order, which finds what cannot run here; later arms go without it.

        If an arm fails in a later round, only that arm is left out: the arms after it include its change and already
        have timings.
        """
        for arm in self.selection.alone():
            self._try(arm)
        for arm in self.selection.in_order():
            if self.selection.why_not(arm) is None:
                self._try(arm)

    def _try(self, arm: Arm) -> None:
        finished = self._time(arm, 0)
        if finished is not None and finished.status != 0:
            self.selection.exclude(arm, finished)

    def _time(self, arm: Arm, number: int) -> ProcessResult | None:
        s = self.settings
        file = self.folder.timing_file(arm, number)
        arguments = commands.timing(arm, file, steps=s.steps, warmup_steps=s.warmup_steps, seconds=s.seconds)
        what = f"{arm.name}: timing {number + 1} of {s.rounds}"
        # In later rounds it has run before: another program may have been in its way.
        return self._piece(what, arm, "time_net", arguments, file, again=number > 0)

    def _numerics(self, arm: Arm, steps: int) -> None:
        file = self.folder.numerics_file(arm)
        self._extra(f"{arm.name}: rounding", arm, commands.rounding(arm, file, steps=steps), file)

    def _gradients(self, arm: Arm) -> None:
        file = self.folder.gradients_file(arm)
        self._extra("gradients", arm, commands.gradients(arm, file), file)

    def _extra(self, what: str, arm: Arm, arguments: Sequence[str], file: Path) -> None:
        """Run an optional measurement: if it fails, the arm continues without it."""
        finished = self._piece(what, arm, "ledger", arguments, file, ranks=1, blame=False)
        if finished is not None and finished.status != 0:
            self.unmeasured[what] = finished.reason()

    def _piece(
        self,
        what: str,
        arm: Arm,
        tool: str,
        arguments: Sequence[str],
        file: Path,
        *,
        ranks: int | None = None,
        blame: bool = True,
        again: bool = False,
    ) -> ProcessResult | None:
        """Run one process to its end, unless its file exists; with `again`, once more if it fails."""
        if file.is_file():
            self.note_done()
            return None
        file.parent.mkdir(parents=True, exist_ok=True)
        ranks = arm.ranks if ranks is None else ranks
        finished = self._to_its_end(what, tool, arm, arguments, ranks, file)
        if again and finished.status != 0:
            self.say(f"{what}: failed with status {finished.status}: {finished.reason()}; trying once more")
            finished = self._to_its_end(what, tool, arm, arguments, ranks, file)
        self.report(what, finished)
        if blame and finished.status != 0:
            self.selection.blame(arm, finished)
        return finished

    def _to_its_end(
        self, what: str, tool: str, arm: Arm, arguments: Sequence[str], ranks: int, file: Path
    ) -> ProcessResult:
        process = self._start(what, tool, arm, arguments, ranks=ranks, log=self.folder.log_file(file))
        try:
            while (finished := self.finished(process)) is None:
                time.sleep(_POLLING_SECONDS)
        except BaseException:
            Process.stop([process])
            raise
        return finished

    def finished(self, process: Process) -> ProcessResult | None:
        """How a process ended, or None while it runs.

        Raises:
            KeyboardInterrupt: a stop was requested; if the process has ended, it may be by the same signal.
        """
        finished = process.finished()
        if self.stop_requested:
            raise KeyboardInterrupt
        return finished

    def arguments(self, more: Sequence[str]) -> list[str]:
        """The experiment's arguments, with `more` replacing its own overrides of the same keys."""
        return [*self.flags, *merged(self.typed, more)]

    def note_done(self, *, training: bool = False) -> None:
        """Count a measurement or training run that is finished."""
        self.progress.note_done(training=training)

    def report(self, what: str, finished: ProcessResult, *, training: bool = False) -> None:
        """Count a process that has ended, and say how."""
        self.note_done(training=training)
        self.progress.note_time(finished.seconds, training=training)
        if self.folder.stopwatch is not None:
            self.folder.stopwatch.lap()
        if finished.status == 0:
            total = self.total()
            left = self.progress.left(total, len(self.selection.runnable()) * self.settings.seeds, self.settings.jobs)
            self.say(f"{what}: {finished.seconds:.0f} s  ({self.progress.done} of {total}, {left})")
        elif finished.refused:
            self.say(f"{what}: cannot run: {finished.reason()}")
        else:
            self.say(f"{what}: failed with status {finished.status}: {finished.reason()} (full log: {finished.log})")

    def _train_all(self) -> None:
        trainings = Trainings(self)
        try:
            while trainings.advance():
                time.sleep(_POLLING_SECONDS)
        except BaseException:
            Process.stop(trainings.processes())
            raise

    def start_training(self, arm: Arm, seed: int, devices: Sequence[str]) -> Process:
        """Start a training run, which sees only these CUDA devices if there are any."""
        run_dir = self.folder.run_dir(arm, seed)
        arguments, log = commands.training(arm, run_dir, seed=seed), self.folder.log_file(run_dir)
        what = training_name(arm, seed)
        return self._start(what, "train_net", arm, arguments, ranks=arm.ranks, log=log, devices=devices)

    def _start(
        self,
        what: str,
        tool: str,
        arm: Arm,
        arguments: Sequence[str],
        *,
        ranks: int,
        log: Path,
        devices: Sequence[str] = (),
    ) -> Process:
        self.folder.note_code()
        self.say(f"{what}: started (log: {log})")
        return self.process(tool, arm, arguments, ranks=ranks, log=log, devices=devices)

    def process(
        self, tool: str, arm: Arm, arguments: Sequence[str], *, ranks: int, log: Path, devices: Sequence[str] = ()
    ) -> Process:
        """Start a tool with an arm's code; it holds the folder's lock, if there is one."""
        tree = None if arm.tree is None else tree_path(arm.tree)
        tools = self.tools if tree is None else tree / "tools"
        return Process(
            tools / f"{tool}.py",
            self.arguments(arguments),
            ranks=ranks,
            log=log,
            inherits=self.folder.inherited,
            tree=tree,
            devices=devices,
        )

    def seeds(self) -> range:
        """Seeds of the training runs."""
        return range(self.settings.first_seed, self.settings.first_seed + self.settings.seeds)


# Rare enough to leave the cores to the process that is timed.
_POLLING_SECONDS = 0.1
# Why an arm lacks it.
_NO_ROUNDING = "one process measures it, which has no parallel settings"
