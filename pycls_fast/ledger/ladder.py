"""Running a ladder: every arm timed in turns, its rounding measured, trained with several seeds, all put on record.

Each piece of work is a process of its own that leaves a file behind. What is there already is not done again: a
ledger that was killed goes on where it was.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pycls_fast.config.ladder import Ladder
from pycls_fast.errors import UserError
from pycls_fast.ledger import commands
from pycls_fast.ledger.conditions import changed
from pycls_fast.ledger.lock import FolderLock
from pycls_fast.ledger.plan import Arm, Mode, arms, merged, readable
from pycls_fast.ledger.processes import Finished, Process
from pycls_fast.ledger.stopwatch import Stopwatch
from pycls_fast.train.output_file import write_json


@dataclass(frozen=True)
class Settings:
    """What is measured of each arm.

    Attributes:
        mode: how the rungs of the ladder become arms.
        seeds: training runs of each arm; 0 for none.
        first_seed: of them.
        rounds: timings of each arm, in turns; 0 for none.
        steps, warmup_steps: of a timing.
        numerics_steps: training steps between the two measurements of rounding; None for neither.
        jobs: training runs at a time. Timings are always alone.
        ranks: processes of an arm where the ladder says nothing.
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
        device: "cpu" or "cuda", where the arms run.
        tools: the folder of the tools.
        say: told of each piece of work that is done.
        conditions: what else has to be the same at every start, by name (`ledger.conditions`).
        code: the digest of the code as it is now.
        accept_code: whether the folder may hold measurements of other code.
        impossible: arms that this machine or this model cannot have, and why.
        failed: arms whose process broke.
        untrained: arms that were timed and whose training ended early.
        unmeasured: measurements beside timing and training that failed ("ARM: rounding", "gradients"), and why.
        stopwatch: the wall time of all starts, once the folder is open.
        codes: digests of all code that something in the folder was measured with, once it is open.

    Raises:
        UserError: a baseline that is not for this device.
    """

    ladder: Ladder
    settings: Settings
    flags: Sequence[str]
    typed: Sequence[str]
    device: str
    folder: Path
    tools: Path
    say: Callable[[str], None] = print
    conditions: Mapping[str, Any] = field(default_factory=dict)
    code: Callable[[], str] = str
    accept_code: bool = False
    impossible: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    untrained: dict[str, str] = field(default_factory=dict)
    unmeasured: dict[str, str] = field(default_factory=dict)
    stopwatch: Stopwatch | None = None
    codes: list[str] = field(default_factory=list)
    _done: int = 0
    _trained: int = 0
    # Seconds of each measurement and of each training run that was done here.
    _took: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    # Rungs that are below none of the others, and those of which no process is started.
    _excluded: set[str] = field(default_factory=set)
    _untried: set[str] = field(default_factory=set)
    _lock: FolderLock | None = None

    def __post_init__(self) -> None:
        for rung in (self.ladder.baseline, *self.ladder.rungs):
            if rung.needs not in (None, self.device):
                self.impossible[rung.name] = f"needs {str(rung.needs).upper()}"
                self._excluded.add(rung.name)
                self._untried.add(rung.name)
        if self.ladder.baseline.name in self.impossible:
            why = self.impossible[self.ladder.baseline.name]
            raise UserError(f"ladder: '{self.ladder.baseline.name}', with which all else is compared, {why}")

    def arms(self) -> list[Arm]:
        """The arms as far as it is known what can run here."""
        return arms(self.ladder, self.settings.mode, ranks=self.settings.ranks, impossible=self._excluded)

    def runnable(self) -> list[Arm]:
        """Those that nothing stands in the way of."""
        return [arm for arm in self.arms() if self.why_not(arm) is None]

    def why_not(self, arm: Arm) -> str | None:
        """What stands in the way of an arm, if anything does."""
        return self.impossible.get(arm.name) or self.failed.get(arm.name) or arm.overridden

    def alone(self) -> list[Arm]:
        """In mode leave_one_out the rungs one at a time: what cannot be in "everything" shows alone."""
        if self.settings.mode != "leave_one_out":
            return []
        made = arms(self.ladder, "one_at_a_time", ranks=self.settings.ranks)[1:]
        return [arm for arm in made if self.why_not(arm) is None]

    def open(self) -> None:
        """Make the folder, or go on in it; until `close`, to be called in any case, no other ledger can.

        Raises:
            UserError: it holds the results of another plan, another ledger works in it, or it cannot be written to.
        """
        plan = json.loads(json.dumps(self._plan()))
        file = self._plan_file
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self.folder, self.say)
            if file.is_file():
                before = json.loads(file.read_text(encoding="utf-8"))
                # More seeds or rounds are more of the same.
                other = changed(before, {key: value for key, value in plan.items() if key not in _MAY_GROW})
                if other:
                    raise UserError(
                        f"output: {self.folder} holds a ledger with another {', '.join(other)}; choose another "
                        "folder, or remove it"
                    )
                self.codes = before.get("code", [_UNKNOWN_CODE])
                if self.code() not in self.codes and not self.accept_code:
                    raise UserError(
                        f"output: {self.folder} holds a ledger of other code than what is here now; choose another "
                        "folder, remove it, or, where that changes nothing that is measured, add accept_code=true"
                    )
            else:
                self.codes = [self.code()]
            self._write_plan()
            self.stopwatch = Stopwatch(self.folder / "took.json")
            # Kept before anything is timed: which start a round is of.
            self.stopwatch.lap()
        except OSError as error:
            raise UserError(f"output: {self.folder} cannot be written to ({error.strerror}); give another") from error
        except json.JSONDecodeError as error:
            raise UserError(f"output: {file} is damaged; choose another folder, or remove it") from error

    def close(self) -> None:
        """Let others into the folder."""
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    def _plan(self) -> dict[str, Any]:
        return {
            # Its mode is that of the settings, and what a rung is against changes nothing that is measured.
            "ladder": self.ladder.model_dump(
                mode="json", exclude={"mode": True, "baseline": {"against"}, "rungs": {"__all__": {"against"}}}
            ),
            "base": [*self.flags, *self.typed],
            **asdict(self.settings),
            **self.conditions,
        }

    @property
    def _plan_file(self) -> Path:
        return self.folder / "plan.json"

    def _write_plan(self) -> None:
        write_json(self._plan_file, {**self._plan(), "code": self.codes})

    def _note_code(self) -> None:
        """Record the code of the next measurement: it was accepted, or changed while the ledger is at work."""
        now = self.code()
        if now not in self.codes:
            self.codes.append(now)
            self._write_plan()
            self.say("the code is not what earlier measurements of this ledger were made with; the report says so")

    def run(self) -> None:
        """Do everything that is not done yet.

        Raises:
            UserError: the arm that all others are compared with does not run.
        """
        self._try_out()
        s = self.settings
        for number in range(1, s.rounds):
            # There and back: a steady drift falls out over two rounds.
            order = self.runnable()
            for arm in order if number % 2 == 0 else reversed(order):
                self._time(arm, number)
        if s.numerics_steps is not None:
            for arm in self.runnable():
                self._numerics(arm, s.numerics_steps)
        if s.gradients:
            self._gradients(self.arms()[0])
        self._train_all()

    def total(self) -> int:
        """Pieces of work in the whole plan, as far as it is known."""
        s, count = self.settings, len(self.runnable())
        pieces = max(s.rounds, 1) + s.seeds + (s.numerics_steps is not None)
        in_vain = len(self.impossible) + len(self.failed) - len(self._untried)
        return count * pieces + in_vain + len(self.alone()) + s.gradients

    def _try_out(self) -> None:
        """The first round of timings, in the ladder's order: what cannot run here is found, and left out behind.

        An arm that fails in a later round is left out alone: the arms after it already include its change and have
        timings.
        """
        for arm in self.alone():
            self._try(arm)
        for arm in self._in_order():
            if self.why_not(arm) is None:
                self._try(arm)

    def _in_order(self) -> Iterator[Arm]:
        """The arms, made anew after each of them: what was left out changes those behind it, not their number."""
        for position in range(len(self.arms())):
            yield self.arms()[position]

    def _try(self, arm: Arm) -> None:
        finished = self._time(arm, 0)
        if finished is not None and finished.status != 0:
            self.exclude(arm, finished)

    def rule_out(self, refusal: Callable[[Arm], str | None]) -> dict[str, str]:
        """Leave out, in the ladder's order, the arms that are refused for the reason that is told of them.

        In mode leave_one_out the rungs alone are asked for.

        Returns:
            The reasons, by the names of the arms.

        Raises:
            UserError: the arm that all others are compared with is refused.
        """
        refused: dict[str, str] = {}
        for arm in self.alone() or self._in_order():
            why = refusal(arm) if self.why_not(arm) is None else None
            if why is None:
                continue
            if arm.before is None:
                raise UserError(f"ladder: '{arm.name}', with which all else is compared, does not run: {why}")
            refused[arm.name] = self.impossible[arm.name] = why
            self._excluded.add(arm.name)
            self._untried.add(arm.name)
        return refused

    def exclude(self, arm: Arm, finished: Finished) -> None:
        """Leave an arm out, and the change of its rung out of the others."""
        self._blame(arm, finished)
        self._excluded.add(arm.name)

    def _blame(self, arm: Arm, finished: Finished) -> None:
        if arm.before is None:
            raise UserError(
                f"ladder: '{arm.name}', with which all else is compared, does not run: {finished.reason()} "
                f"(all of it: {finished.log})"
            )
        (self.impossible if finished.refused else self.failed)[arm.name] = finished.reason()

    def _time(self, arm: Arm, number: int) -> Finished | None:
        s = self.settings
        file = self.timing_file(arm, number)
        steps, warmup_steps = (s.steps, s.warmup_steps) if s.rounds else (1, 0)
        arguments = commands.timing(arm, file, steps=steps, warmup_steps=warmup_steps)
        return self._piece(f"{arm.name}: timing {number + 1} of {max(s.rounds, 1)}", arm, "time_net", arguments, file)

    def _numerics(self, arm: Arm, steps: int) -> None:
        file = self.numerics_file(arm)
        self._extra(f"{arm.name}: rounding", arm, commands.rounding(arm, file, steps=steps), file)

    def _gradients(self, arm: Arm) -> None:
        file = self.gradients_file
        self._extra("gradients", arm, commands.gradients(arm, file), file)

    def _extra(self, what: str, arm: Arm, arguments: Sequence[str], file: Path) -> None:
        """A measurement that the arm goes on without, where it fails."""
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
        """One process to its end, unless its file is there."""
        if file.is_file():
            self._done += 1
            return None
        file.parent.mkdir(parents=True, exist_ok=True)
        log = self.folder / "logs" / f"{file.relative_to(self.folder).with_suffix('').as_posix().replace('/', '-')}.txt"
        process = self._start(tool, arguments, ranks=arm.ranks if ranks is None else ranks, log=log)
        try:
            finished = process.wait()
        except BaseException:
            process.stop()
            raise
        self._report(what, finished)
        if blame and finished.status != 0:
            self._blame(arm, finished)
        return finished

    def arguments(self, more: Sequence[str]) -> list[str]:
        """The experiment's, with more overrides in place of its own."""
        return [*self.flags, *merged(self.typed, more)]

    def _left(self) -> str:
        """How long it will take, from what measurements and training runs have taken so far."""
        runs = max(len(self.runnable()) * self.settings.seeds - self._trained, 0)
        others = max(self.total() - self._done - runs, 0)
        measuring, training = (sum(took) / len(took) if took else 0.0 for took in self._took)
        text = f"about {_minutes(others * measuring + runs * training / self.settings.jobs)} left"
        return f"{text} before the training" if runs and not self._took[True] else text

    def _report(self, what: str, finished: Finished, *, training: bool = False) -> None:
        self._done += 1
        self._took[training].append(finished.seconds)
        self._trained += training
        if self.stopwatch is not None:
            self.stopwatch.lap()
        if finished.status == 0:
            self.say(f"{what}: {finished.seconds:.0f} s  ({self._done} of {self.total()}, {self._left()})")
        elif finished.refused:
            self.say(f"{what}: cannot run: {finished.reason()}")
        else:
            self.say(f"{what}: failed with status {finished.status}: {finished.reason()} (all of it: {finished.log})")

    def _train_all(self) -> None:
        waiting = [(arm, seed) for seed in self.seeds() for arm in self.runnable()]
        running: list[tuple[Arm, int, Process]] = []
        reference = self.arms()[0].name
        try:
            while waiting or running:
                while waiting and len(running) < self.settings.jobs:
                    arm, seed = waiting.pop(0)
                    if (self.run_dir(arm, seed) / "summary.json").is_file():
                        self._done += 1
                        self._trained += 1
                    elif not {arm.name, reference} & set(self.untrained):
                        running.append((arm, seed, self._start_training(arm, seed)))
                for entry in list(running):
                    arm, seed, process = entry
                    finished = process.finished()
                    if finished is not None:
                        running.remove(entry)
                        self._report(f"{arm.name}: training, seed {seed}", finished, training=True)
                        if finished.status != 0:
                            self.untrained[arm.name] = f"seed {seed}: {finished.reason()}"
                            if arm.name == reference:
                                self.say(f"nothing to compare with: no training starts without '{reference}'")
                time.sleep(0.05 if running else 0)
        except BaseException:
            for _, _, process in running:
                process.stop()
            raise

    def _start_training(self, arm: Arm, seed: int) -> Process:
        arguments = commands.training(arm, self.run_dir(arm, seed), seed=seed)
        log = self.folder / "logs" / f"runs-{arm.slug}-seed_{seed}.txt"
        return self._start("train_net", arguments, ranks=arm.ranks, log=log)

    def _start(self, tool: str, arguments: Sequence[str], *, ranks: int, log: Path) -> Process:
        self._note_code()
        inherits = () if self._lock is None else (self._lock.inherited,)
        return Process(self.tools / f"{tool}.py", self.arguments(arguments), ranks=ranks, log=log, inherits=inherits)

    def seeds(self) -> range:
        """Of the training runs."""
        return range(self.settings.first_seed, self.settings.first_seed + self.settings.seeds)

    def timing_file(self, arm: Arm, number: int) -> Path:
        """Where a round's timing of an arm is."""
        return self.folder / "timings" / arm.slug / f"round_{number}.json"

    def numerics_file(self, arm: Arm) -> Path:
        """Where an arm's rounding errors are."""
        return self.folder / "numerics" / f"{arm.slug}.json"

    @property
    def gradients_file(self) -> Path:
        """Where the counts of gradients are."""
        return self.folder / "gradients" / f"{self.arms()[0].slug}.json"

    def run_dir(self, arm: Arm, seed: int) -> Path:
        """An arm's training run."""
        return self.folder / "runs" / arm.slug / f"seed_{seed}"

    def timings(self, arm: Arm) -> Iterator[dict[str, Any]]:
        """Records of the rounds that there are, in their order."""
        for number in range(self.settings.rounds):
            file = self.timing_file(arm, number)
            if file.is_file():
                record = json.loads(file.read_text(encoding="utf-8"))
                # Earlier versions timed training at the size of evaluation, and recorded that one only.
                sizes = {f"train_{key}": record[key] for key in ("image_size", "forward_flops_per_image")}
                yield {**sizes, **record}


# In plans of versions that did not note it.
_UNKNOWN_CODE = "unknown"

# What a plan may change and still be the same experiment.
_MAY_GROW = ("seeds", "rounds", "jobs", "margin", "gradients")


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def default_folder(config_name: str, ladder: str, mode: Mode, switches: Sequence[str]) -> Path:
    """Where a ledger goes that was given no folder; the same each time, so that it goes on after a kill."""
    picked = f"-{readable(' '.join(sorted(switches)))}" if switches else ""
    return Path("ledgers") / f"{config_name}-{Path(ladder).stem}-{mode}{picked}"
