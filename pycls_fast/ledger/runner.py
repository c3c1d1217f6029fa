"""Running a ladder: time every arm in turns, measure its rounding, train it with several seeds.

Each measurement is a separate process that writes a file. Measurements whose file exists are not repeated, so that a
killed ledger resumes where it was.
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
from pycls_fast.ledger.conditions import UNKNOWN_CODE, changed
from pycls_fast.ledger.lock import FolderLock
from pycls_fast.ledger.plan import Arm, Mode, arms, merged, readable, tree_path
from pycls_fast.ledger.processes import Finished, Process
from pycls_fast.ledger.stopwatch import Stopwatch
from pycls_fast.train.output_file import write_json


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
        code: returns the digest of the current code.
        accept_code: whether the folder may hold measurements of different code.
        impossible: arms that cannot run on this machine or with this model, and why.
        failed: arms whose process failed, and why.
        untrained: arms that were timed and whose training ended early, and why.
        unmeasured: other measurements that failed ("ARM: rounding", "gradients"), and why.
        stopwatch: the wall time of all starts, once the folder is open.
        codes: digests of all code that the folder was measured with, once it is open.

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
    # Seconds of each measurement and of each training run in this start.
    _took: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    # Rungs that later arms do not include, and rungs for which no process is started.
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
            raise UserError(f"ladder: the baseline '{self.ladder.baseline.name}' {why}")

    def arms(self) -> list[Arm]:
        """The arms, given what is known so far about which can run here."""
        return arms(self.ladder, self.settings.mode, ranks=self.settings.ranks, impossible=self._excluded)

    def runnable(self) -> list[Arm]:
        """The arms that are not known to fail and are not overridden."""
        return [arm for arm in self.arms() if self.why_not(arm) is None]

    def why_not(self, arm: Arm) -> str | None:
        """Why an arm is not run; None if it is."""
        return self.impossible.get(arm.name) or self.failed.get(arm.name) or arm.overridden

    def alone(self) -> list[Arm]:
        """The rungs one at a time, in mode leave_one_out only: shows which cannot be part of "everything"."""
        if self.settings.mode != "leave_one_out":
            return []
        made = arms(self.ladder, "one_at_a_time", ranks=self.settings.ranks)[1:]
        return [arm for arm in made if self.why_not(arm) is None]

    def open(self) -> None:
        """Create the folder, or resume in it, and lock it until `close`, which must be called even after an error.

        Raises:
            UserError: it holds results of a different plan, another ledger is using it, or it cannot be written to.
        """
        plan = json.loads(json.dumps(self._plan()))
        file = self._plan_file
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self.folder, self.say)
            if file.is_file():
                before = json.loads(file.read_text(encoding="utf-8"))
                # More seeds or rounds extend the same plan.
                other = changed(before, {key: value for key, value in plan.items() if key not in _MAY_GROW})
                if other:
                    raise UserError(
                        f"output: {self.folder} holds a ledger with different {', '.join(other)}; choose another "
                        "folder, or remove it"
                    )
                self.codes = before.get("code", [UNKNOWN_CODE])
                if self.code() not in self.codes and not self.accept_code:
                    by = (
                        "by a version that did not record its code"
                        if self.codes == [UNKNOWN_CODE]
                        else "with different code"
                    )
                    raise UserError(
                        f"output: {self.folder} was measured {by}; choose another folder, remove it, or add "
                        "accept_code=true if the change does not affect the measurements"
                    )
            else:
                self.codes = [self.code()]
            self._write_plan()
            self.stopwatch = Stopwatch(self.folder / "took.json")
            # Saved before any timing, so that each round can be assigned to its start.
            self.stopwatch.lap()
        except OSError as error:
            raise UserError(f"output: {self.folder} cannot be written to ({error.strerror}); give another") from error
        except json.JSONDecodeError as error:
            raise UserError(f"output: {file} is damaged; choose another folder, or remove it") from error

    def close(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            self._lock.release()
        self._lock = None

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

    @property
    def _plan_file(self) -> Path:
        return self.folder / "plan.json"

    def _write_plan(self) -> None:
        write_json(self._plan_file, {**self._plan(), "code": self.codes})

    def _note_code(self) -> None:
        """Record the code of the next measurement: it may have been accepted, or edited while the ledger runs."""
        now = self.code()
        if now not in self.codes:
            self.codes.append(now)
            self._write_plan()
            self.say("the code differs from that of earlier measurements in this folder; the report says so")

    def run(self) -> None:
        """Do everything that is not done yet.

        Raises:
            UserError: the reference arm does not run.
        """
        self._try_out()
        s = self.settings
        for number in range(1, s.rounds):
            # Alternating order: a steady drift cancels over two rounds.
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
        """Number of processes in the whole plan, as far as it is known."""
        s, count = self.settings, len(self.runnable())
        pieces = max(s.rounds, 1) + s.seeds + (s.numerics_steps is not None)
        in_vain = len(self.impossible) + len(self.failed) - len(self._untried)
        return count * pieces + in_vain + len(self.alone()) + s.gradients

    def _try_out(self) -> None:
        """Time the first round, in the ladder's order, which finds what cannot run here; later arms go without it.

        If an arm fails in a later round, only that arm is left out: the arms after it include its change and already
        have timings.
        """
        for arm in self.alone():
            self._try(arm)
        for arm in self._in_order():
            if self.why_not(arm) is None:
                self._try(arm)

    def _in_order(self) -> Iterator[Arm]:
        """The arms, recomputed after each one: leaving one out changes the arms after it, but not their number."""
        for position in range(len(self.arms())):
            yield self.arms()[position]

    def _try(self, arm: Arm) -> None:
        finished = self._time(arm, 0)
        if finished is not None and finished.status != 0:
            self.exclude(arm, finished)

    def rule_out(self, refusal: Callable[[Arm], str | None]) -> dict[str, str]:
        """Leave out, in the ladder's order, the arms for which `refusal` gives a reason.

        In mode leave_one_out only the single rungs are checked.

        Returns:
            The reasons by arm name.

        Raises:
            UserError: the reference arm is refused.
        """
        refused: dict[str, str] = {}
        for arm in self.alone() or self._in_order():
            why = refusal(arm) if self.why_not(arm) is None else None
            if why is None:
                continue
            if arm.before is None:
                raise UserError(f"ladder: the reference '{arm.name}' does not run: {why}")
            refused[arm.name] = self.impossible[arm.name] = why
            self._excluded.add(arm.name)
            self._untried.add(arm.name)
        return refused

    def exclude(self, arm: Arm, finished: Finished) -> None:
        """Leave out an arm, and its rung's change from all other arms."""
        self._blame(arm, finished)
        self._excluded.add(arm.name)

    def _blame(self, arm: Arm, finished: Finished) -> None:
        if arm.before is None:
            raise UserError(
                f"ladder: the reference '{arm.name}' does not run: {finished.reason()} (full log: {finished.log})"
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
        log = self.folder / "logs" / f"{file.relative_to(self.folder).with_suffix('').as_posix().replace('/', '-')}.txt"
        process = self._start(tool, arm, arguments, ranks=arm.ranks if ranks is None else ranks, log=log)
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
        """The experiment's arguments, with `more` replacing its own overrides of the same keys."""
        return [*self.flags, *merged(self.typed, more)]

    def _left(self) -> str:
        """An estimate of the remaining time, from the measurements and training runs so far."""
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
            self.say(f"{what}: failed with status {finished.status}: {finished.reason()} (full log: {finished.log})")

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
                                self.say(f"nothing to compare with: no training is started without '{reference}'")
                time.sleep(0.05 if running else 0)
        except BaseException:
            for _, _, process in running:
                process.stop()
            raise

    def _start_training(self, arm: Arm, seed: int) -> Process:
        arguments = commands.training(arm, self.run_dir(arm, seed), seed=seed)
        log = self.folder / "logs" / f"runs-{arm.slug}-seed_{seed}.txt"
        return self._start("train_net", arm, arguments, ranks=arm.ranks, log=log)

    def _start(self, tool: str, arm: Arm, arguments: Sequence[str], *, ranks: int, log: Path) -> Process:
        self._note_code()
        return self.process(tool, arm, arguments, ranks=ranks, log=log)

    def process(self, tool: str, arm: Arm, arguments: Sequence[str], *, ranks: int, log: Path) -> Process:
        """Start a tool with an arm's code; it holds the folder's lock, if there is one."""
        tree = None if arm.tree is None else tree_path(arm.tree)
        tools = self.tools if tree is None else tree / "tools"
        inherits = () if self._lock is None else (self._lock.inherited,)
        return Process(
            tools / f"{tool}.py", self.arguments(arguments), ranks=ranks, log=log, inherits=inherits, tree=tree
        )

    def seeds(self) -> range:
        """Seeds of the training runs."""
        return range(self.settings.first_seed, self.settings.first_seed + self.settings.seeds)

    def timing_file(self, arm: Arm, number: int) -> Path:
        """The file of an arm's timing in one round."""
        return self.folder / "timings" / arm.slug / f"round_{number}.json"

    def numerics_file(self, arm: Arm) -> Path:
        """The file of an arm's rounding errors."""
        return self.folder / "numerics" / f"{arm.slug}.json"

    @property
    def gradients_file(self) -> Path:
        """The file of the gradient counts."""
        return self.folder / "gradients" / f"{self.arms()[0].slug}.json"

    def run_dir(self, arm: Arm, seed: int) -> Path:
        """The folder of an arm's training run."""
        return self.folder / "runs" / arm.slug / f"seed_{seed}"

    def timings(self, arm: Arm) -> Iterator[dict[str, Any]]:
        """Records of the existing rounds, in order."""
        for number in range(self.settings.rounds):
            file = self.timing_file(arm, number)
            if file.is_file():
                record = json.loads(file.read_text(encoding="utf-8"))
                # Earlier versions timed training at the image size of evaluation, and recorded only that.
                sizes = {f"train_{key}": record[key] for key in ("image_size", "forward_flops_per_image")}
                yield {**sizes, **record}


# What may change when a ledger is resumed.
_MAY_GROW = ("seeds", "rounds", "jobs", "margin", "gradients")


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def default_folder(config_name: str, ladder: str, mode: Mode, switches: Sequence[str]) -> Path:
    """The default folder of a ledger; the same each time, so that it resumes after a kill."""
    picked = f"-{readable(' '.join(sorted(switches)))}" if switches else ""
    return Path("ledgers") / f"{config_name}-{Path(ladder).stem}-{mode}{picked}"
