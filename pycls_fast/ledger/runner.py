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
from pycls_fast.ledger.plan import Arm, Mode, merged, tree_path
from pycls_fast.ledger.processes import Finished, Process
from pycls_fast.ledger.selection import Selection


@dataclass(frozen=True)
class Settings:
    """What is measured for each arm.

    Attributes:
        mode: how the rungs of the ladder become arms.
        seeds: training runs per arm; 0 for none.
        first_seed: seed of the first one.
        rounds: timings per arm, in turns; 0 for none.
        steps, warmup_steps: steps per timing.
        numerics_steps: training steps between the two measurements of rounding; None for neither.
        jobs: concurrent training runs. Timings always run one at a time.
        ranks: processes per arm, unless the ladder sets them.
        margin: loss of top-1 in points that does not matter.
        gradients: count the first arm's gradients in float32 against float16's limits.
    """

    mode: Mode = "cumulative"
    seeds: int = 3
    first_seed: int = 0
    rounds: int = 3
    steps: int = 10
    warmup_steps: int = 5
    numerics_steps: int | None = 20
    jobs: int = 1
    ranks: int = 1
    margin: float = 0.2
    gradients: bool = True


@dataclass
class Ledger:
    """A ladder at work in its folder.

    Attributes:
        flags, typed: options and overrides that make the experiment, for every tool.
        device: "cpu" or "cuda": where the arms run.
        tools: the folder of the tools.
        say: called with a message after each measurement.
        conditions: what else must be the same at every start, by name (`ledger.conditions`).
        selection: the arms, and which of them run.
        untrained: arms that were timed and whose training ended early, and why.
        unmeasured: other measurements that failed ("ARM: rounding", "gradients"), and why.
        stop_requested: may be set while `run` works, which then stops its processes and raises `KeyboardInterrupt`.

    Raises:
        UserError: a baseline that is not for this device.
    """

    ladder: Ladder
    settings: Settings
    flags: Sequence[str]
    typed: Sequence[str]
    device: str
    folder: LedgerFolder
    tools: Path
    say: Callable[[str], None] = print
    conditions: Mapping[str, Any] = field(default_factory=dict)
    selection: Selection = field(init=False)
    untrained: dict[str, str] = field(default_factory=dict)
    unmeasured: dict[str, str] = field(default_factory=dict)
    stop_requested: bool = False
    _done: int = 0
    _trained: int = 0
    # Seconds of each measurement and of each training run in this start.
    _took: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    def __post_init__(self) -> None:
        self.selection = Selection(self.ladder, self.settings.mode, self.settings.ranks, self.device)

    def open(self) -> None:
        """Create the folder, or resume in it, and lock it until `close`, which must be called even after an error.

        Raises:
            UserError: it holds results of a different plan, another ledger is using it, or it cannot be written to.
        """
        self.folder.open(self._plan())

    def close(self) -> None:
        """Unlock the folder."""
        self.folder.close()

    def _plan(self) -> dict[str, Any]:
        return {
            # The mode is in the settings, `tree` in the arms' paths, and `against` does not affect any measurement.
            "ladder": self.ladder.model_dump(
                mode="json",
                exclude={"mode": True, "baseline": {"against", "tree"}, "rungs": {"__all__": {"against", "tree"}}},
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
            for arm in self.selection.runnable():
                self._numerics(arm, s.numerics_steps)
        if s.gradients:
            self._gradients(self.selection.arms()[0])
        if s.seeds:
            after_phase()
            self._train_all()

    def total(self) -> int:
        """Number of processes in the whole plan, as far as it is known."""
        s, count = self.settings, len(self.selection.runnable())
        pieces = max(s.rounds, 1) + s.seeds + (s.numerics_steps is not None)
        return count * pieces + self.selection.tried_in_vain() + len(self.selection.alone()) + s.gradients

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

    def _time(self, arm: Arm, number: int) -> Finished | None:
        s = self.settings
        file = self.folder.timing_file(arm, number)
        steps, warmup_steps = (s.steps, s.warmup_steps) if s.rounds else (1, 0)
        arguments = commands.timing(arm, file, steps=steps, warmup_steps=warmup_steps)
        return self._piece(f"{arm.name}: timing {number + 1} of {max(s.rounds, 1)}", arm, "time_net", arguments, file)

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
    ) -> Finished | None:
        """Run one process to its end, unless its file exists."""
        if file.is_file():
            self._done += 1
            return None
        file.parent.mkdir(parents=True, exist_ok=True)
        ranks = arm.ranks if ranks is None else ranks
        process = self._start(tool, arm, arguments, ranks=ranks, log=self.folder.log_file(file))
        try:
            while (finished := self._finished(process)) is None:
                time.sleep(_POLLING_SECONDS)
        except BaseException:
            Process.stop([process])
            raise
        self._report(what, finished)
        if blame and finished.status != 0:
            self.selection.blame(arm, finished)
        return finished

    def _finished(self, process: Process) -> Finished | None:
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

    def _left(self) -> str:
        """An estimate of the remaining time, from the measurements and training runs so far."""
        runs = max(len(self.selection.runnable()) * self.settings.seeds - self._trained, 0)
        others = max(self.total() - self._done - runs, 0)
        measuring, training = (sum(took) / len(took) if took else 0.0 for took in self._took)
        text = f"about {_minutes(others * measuring + runs * training / self.settings.jobs)} left"
        return f"{text} before the training" if runs and not self._took[True] else text

    def _report(self, what: str, finished: Finished, *, training: bool = False) -> None:
        self._done += 1
        self._took[training].append(finished.seconds)
        self._trained += training
        if self.folder.stopwatch is not None:
            self.folder.stopwatch.lap()
        if finished.status == 0:
            self.say(f"{what}: {finished.seconds:.0f} s  ({self._done} of {self.total()}, {self._left()})")
        elif finished.refused:
            self.say(f"{what}: cannot run: {finished.reason()}")
        else:
            self.say(f"{what}: failed with status {finished.status}: {finished.reason()} (full log: {finished.log})")

    def _train_all(self) -> None:
        waiting = [(arm, seed) for seed in self.seeds() for arm in self.selection.runnable()]
        running: list[tuple[Arm, int, Process]] = []
        reference = self.selection.arms()[0].name
        try:
            while waiting or running:
                while waiting and len(running) < self.settings.jobs:
                    arm, seed = waiting.pop(0)
                    if (self.folder.run_dir(arm, seed) / "summary.json").is_file():
                        self._done += 1
                        self._trained += 1
                    elif not {arm.name, reference} & set(self.untrained):
                        running.append((arm, seed, self._start_training(arm, seed)))
                for entry in list(running):
                    arm, seed, process = entry
                    finished = self._finished(process)
                    if finished is not None:
                        running.remove(entry)
                        self._report(f"{arm.name}: training, seed {seed}", finished, training=True)
                        if finished.status != 0:
                            self.untrained[arm.name] = f"seed {seed}: {finished.reason()}"
                            if arm.name == reference:
                                self.say(f"nothing to compare with: no training is started without '{reference}'")
                time.sleep(_POLLING_SECONDS if running else 0)
        except BaseException:
            Process.stop(process for _, _, process in running)
            raise

    def _start_training(self, arm: Arm, seed: int) -> Process:
        run_dir = self.folder.run_dir(arm, seed)
        arguments = commands.training(arm, run_dir, seed=seed)
        return self._start("train_net", arm, arguments, ranks=arm.ranks, log=self.folder.log_file(run_dir))

    def _start(self, tool: str, arm: Arm, arguments: Sequence[str], *, ranks: int, log: Path) -> Process:
        self.folder.note_code()
        return self.process(tool, arm, arguments, ranks=ranks, log=log)

    def process(self, tool: str, arm: Arm, arguments: Sequence[str], *, ranks: int, log: Path) -> Process:
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
        )

    def seeds(self) -> range:
        """Seeds of the training runs."""
        return range(self.settings.first_seed, self.settings.first_seed + self.settings.seeds)


# Rare enough to leave the cores to the process that is timed.
_POLLING_SECONDS = 0.1


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
