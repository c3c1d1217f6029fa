"""The trainings of a ladder at work: which start, when a look is due, and what those that have ended say.

All of it follows from the plan and the files of the runs, so that a ledger that was interrupted and resumed ends with
the same runs and the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np

from pycls_fast.config.keys import text_override
from pycls_fast.config.ladder import Ladder, LadderSettings, Variant
from pycls_fast.errors import UserError
from pycls_fast.ledger.ladder.folder import LedgerFolder, SavedFailure, SavedResult, read_measurement
from pycls_fast.ledger.ladder.plan import (
    Factors,
    Family,
    PlannedPair,
    combination,
    compatible,
    families,
    find_factors,
    pairs_of,
    with_parents,
)
from pycls_fast.ledger.ladder.processes import FAILED, Job
from pycls_fast.ledger.report import effects
from pycls_fast.ledger.report.effects import LOOKS, Fit, Look, Pair
from pycls_fast.ledger.report.record import Accuracy, OverallFit, TrainedRun
from pycls_fast.train.evaluate import Predictions
from pycls_fast.train.folder import RunFolder

# A plan that resolves less than this many times the margin is refused after the first pairs.
_TOO_COARSE = 1.5
# Each pair takes a tenth of a second: those of 8 variants 3 s, of 40 more than a minute.
_QUIETLY_PAIRED = 8
# So many failures have a reason, which must be found before more trainings start.
_MOST_FAILURES = 2


@dataclass
class CrossedTrainings:
    """The trainings of a ladder.

    Attributes:
        names: the variants that run here.
        alike: those of them that made no difference to the bits of the weights after some steps.
        refused: why the settings of a combination are refused, if they are.
        train: starts the runs that are not done, and waits for them.
        factors: the variants as factors of the design, with what earlier starts have found out.
    """

    ladder: Ladder
    settings: LadderSettings
    folder: LedgerFolder
    names: Sequence[str]
    alike: Sequence[str]
    refused: Callable[[Variant], str | None]
    train: Callable[[Sequence[Job]], None]
    say: Callable[[str], None]
    factors: Factors = field(init=False)

    def __post_init__(self) -> None:
        if self.folder.factors is None and len(self.names) > _QUIETLY_PAIRED:
            self.say(f"composing the pairs of {len(self.names)} variants, to know which cannot be on together")
        self.factors = self.folder.factors or find_factors(self.ladder, self.names, self.refused)
        if not any(self.folder.path.glob(f"runs/*/*/{FAILED}")):
            # Removed, to try again.
            self.factors.broken = {}
        self._pairs: dict[PlannedPair, Pair | None] = {}

    def groups(self, factors: Factors | None = None) -> list[list[Family]]:
        """The families of trainings, those that are tested together in one list."""
        s = self.settings
        return families(self.ladder, factors or self.factors, s.runs_at_most, s.first_seed)

    def planned(self) -> list[Job]:
        """All runs of the plan, the most that there may be."""
        runs = [run for pair in (*self._screening(), *pairs_of(self.groups())) for run in self._runs(pair)]
        return list({run.path: run for run in runs}.values())

    def run(self) -> None:
        """Train until every variant has a verdict, or no look is left. A `UserError` if the workload cannot decide at
        this margin, or trainings fail for no known reason."""
        self.folder.keep_factors(self.factors)
        self._screen()
        place = 0
        while place < len(groups := self.groups()):
            if self._train_group(groups[place]):
                place += 1

    def _screening(self) -> list[PlannedPair]:
        """A pair that differs in all variants that may be identical; empty if there is none."""
        names = self.factors.alike or []
        on = with_parents(self.ladder, names)
        without = tuple(name for name in on if name not in names)
        return [PlannedPair(self.settings.first_seed, (on, without))] if names else []

    def _screen(self) -> None:
        """Leave out variants that change no bit of the weights at first, and no prediction of a whole training."""
        factors = self.factors
        if factors.alike is None:
            factors.alike = [
                name
                for name in self.alike
                # What alternatives do together is not known.
                if name in factors.crossed and not any(name in pair for pair in factors.conflicts)
            ]
            for pair in self._screening():
                if with_parents(self.ladder, pair.on[1]) != pair.on[1]:
                    factors.alike = []
            self.folder.keep_factors(factors)
        for pair in self._screening() if not factors.identical and not factors.looked else []:
            self.train(self._runs(pair))
            found = self._predictions(pair)
            keys = ("indices_N", "labels_N", "predicted_N")
            if found and all(np.array_equal(*(getattr(each, key) for each in found)) for key in keys):
                factors.identical = list(factors.alike)
                self.say(f"{', '.join(factors.alike)}: identical: every prediction is the same")
            self.folder.keep_factors(factors)

    def _train_group(self, group: Sequence[Family]) -> bool:
        """Train one group to its end; False if a variant was left out meanwhile, so that the plan is another one."""
        pilot = [pair for family in group for pair in family.pairs[: family.pilot]]
        parts = [pilot, *([p for f in group for p in f.at_look(place)] for place in range(len(LOOKS)))]
        for number, pairs in enumerate(parts):
            self.train([run for pair in pairs for run in self._runs(pair)])
            if self._leave_out(group):
                return False
            if number == 0:
                self._check_resolution(group)
                continue
            self.factors.looked = True
            self.folder.keep_factors(self.factors)
            looks, _ = self._looks(group)
            if looks and looks[-1].settled:
                break
        return True

    def _check_resolution(self, group: Sequence[Family]) -> None:
        """Say what the first pairs promise; raise if `runs_at_most` trainings cannot decide at this margin."""
        s = self.settings
        for family in group:
            pairs = self._results(family.pairs[: family.pilot])
            if len(pairs) < 2:
                continue
            runs, seconds = 2 * len(family.pairs), self._seconds() / s.jobs
            errors = effects.deviation_of(pairs) * family.errors
            finest, coarsest = (effects.resolution(float(error)) for error in (min(errors), max(errors)))
            if finest > _TOO_COARSE * s.margin:
                needed = effects.runs_that_resolve(coarsest, runs, s.margin)
                raise UserError(
                    f"margin: {runs} trainings show differences of {coarsest:.2f} points here, not {s.margin:g}; use "
                    f"margin={np.ceil(10 * coarsest) / 10:g}, runs_at_most={needed} (about "
                    f"{needed * seconds / 3600:.1f} h), or a longer training. What is trained counts"
                )
            shown = " to ".join(dict.fromkeys(f"{each:.2f}" for each in (finest, coarsest)))
            self.say(
                f"{', '.join(family.names)}: at most {runs} trainings, about {runs * seconds / 60:.0f} min; the "
                f"smallest difference that they can show is {shown} points"
            )

    def _leave_out(self, group: Sequence[Family]) -> bool:
        """Leave out a variant that makes trainings fail, and those that need it. A `UserError` if trainings fail, and
        it is not one variant's doing."""
        for family in group:
            runs = self.trained(family.pairs)
            failed = [run for run in runs if run.failed is not None]
            if not failed:
                continue
            failed_on = [run.on for run in failed]
            ended_on = [run.on for run in runs if run.failed is None]
            name, explains = effects.suspect(failed_on, ended_on, family.names)
            of, lost = (sum(name in run.on for run in each) for each in (runs, failed))
            evidence = f"{lost} of {of} trainings failed with it, {len(failed) - lost} of {len(runs) - of} without"
            if explains:
                self.factors.broken[name] = evidence
                for other in self.names:
                    if name in with_parents(self.ladder, [other]):
                        self.factors.broken.setdefault(other, f"it needs {name}, which does")
                self.folder.keep_factors(self.factors)
                self.say(f"{name}: breaks training: {self.factors.broken[name]}")
                return True
            if len(failed) <= _MOST_FAILURES:
                continue
            # At first all variants are on together; more trainings at the same rates may tell which one it is.
            times = 2 * len(family.pairs) / len(runs)
            if not effects.suspect(failed_on, ended_on, family.names, times=times)[1]:
                raise UserError(
                    f"ladder: {len(failed)} trainings fail, and no variant explains it for certain ({name} may: "
                    f"{evidence}): {failed[0].failed}; a failed one is tried again when its {FAILED} is removed"
                )
        return False

    def record(self) -> Accuracy:
        groups, broken = self.groups(), list(self.factors.broken.items())
        # Also those of designs from before a variant was left out.
        designs = [self.groups(replace(self.factors, broken=dict(broken[:count]))) for count in range(len(broken))]
        results = [self._looks(group) for group in groups]
        # Without verdicts as long as no look is complete.
        margin = self.settings.margin
        found = [looks[-1].effects if looks else effects.estimates(fits, margin) for looks, fits in results]
        return Accuracy(
            runs=self.trained([*self._screening(), *pairs_of(chain(*designs, groups))]),
            effects=[*map(effects.identical, self.factors.identical), *chain(*found)],
            looks=[look for looks, _ in results for look in looks],
            broken=self.factors.broken,
            fit=self._overall_fit(groups[0][0], results[0][1][0]) if results and results[0][1] else None,
        )

    def _overall_fit(self, family: Family, found: Fit) -> OverallFit:
        names, several = family.names, len(family.names) > 1
        # Of alternatives the last, as at the end of a cumulative ladder.
        kept = compatible(self.ladder, names[::-1], self.factors.conflicts)
        return OverallFit(
            deviation=found.residual,
            floor=found.floor,
            variance_ratio=(found.residual / found.floor) ** 2,
            resolution=effects.resolution(found.deviation * float(max(family.errors))),
            together=effects.sum_of(found, [name for name in names if name not in kept]) if several else None,
            interplay=effects.interplay(self._results(family.pairs), found) if several else None,
        )

    def _looks(self, group: Sequence[Family]) -> tuple[list[Look], list[Fit]]:
        """The complete looks at one group, with their verdicts, and the latest fits of its families; none as long as
        there are too few pairs."""
        latest: list[Fit] | None = None

        def complete() -> Iterator[tuple[int, int, list[Fit]]]:
            nonlocal latest
            for place in range(len(LOOKS)):
                planned = [family.at_look(place) for family in group]
                is_complete = all(run.is_done for pairs in planned for pair in pairs for run in self._runs(pair))
                fits = self._fits(group, planned) if is_complete else None
                if fits is not None:
                    latest = fits
                    yield place, 2 * len(planned[0]), fits

        looks = effects.decide(complete(), self.settings.margin, strict=self.settings.strict)
        return looks, latest or self._fits(group, [family.pairs for family in group]) or []

    def _fits(self, group: Sequence[Family], planned: Sequence[Sequence[PlannedPair]]) -> list[Fit] | None:
        """A fit of each family to those of its pairs that have ended; None if these are too few for one of them."""
        fits = [effects.fit(self._results(pairs), family.names) for family, pairs in zip(group, planned, strict=True)]
        known = [found for found in fits if found is not None]
        return known if len(known) == len(fits) else None

    def _runs(self, pair: PlannedPair) -> list[Job]:
        made = []
        for variant in (combination(self.ladder, on) for on in pair.on):
            folder = self.folder.run_dir(variant, pair.seed)
            own = (f"seed={pair.seed}", text_override("run_dir", str(folder)), "runtime.progress=plain")
            made.append(Job(f"{variant.name}: training, seed {pair.seed}", "train", variant, own, folder))
        return made

    def _results(self, planned: Sequence[PlannedPair]) -> list[Pair]:
        """The results of those pairs both of whose trainings have ended, and not failed."""
        for each in planned:
            if each not in self._pairs and all(run.is_done for run in self._runs(each)):
                self._pairs[each] = self._read_pair(each)
        return [pair for each in planned if (pair := self._pairs.get(each)) is not None]

    def _read_pair(self, planned: PlannedPair) -> Pair | None:
        found = self._predictions(planned)
        if found is None:
            return None
        one, two = found
        # Images that one of the two could not read are left out of both.
        right, other = (each.right for each in one.shared(two))
        first, second = (100.0 * int(each.sum()) / len(right) for each in (right, other))
        return Pair(planned.on, first - second, int((right != other).sum()), len(right), (first + second) / 2)

    def _predictions(self, planned: PlannedPair) -> list[Predictions] | None:
        """Those of both trainings; None if one of them failed."""
        folders = [RunFolder(run.path) for run in self._runs(planned)]
        if not all(folder.finished for folder in folders):
            return None
        return [Predictions.load(folder.predictions) for folder in folders]

    def trained(self, pairs: Iterable[PlannedPair]) -> list[TrainedRun]:
        """The trainings that have ended, in order."""
        made: dict[Path, TrainedRun] = {}
        for pair in pairs:
            for run, on in zip(self._runs(pair), pair.on, strict=True):
                if run.is_done and run.path not in made:
                    made[run.path] = _trained(run.path, pair.seed, on)
        return list(made.values())

    def _seconds(self) -> float:
        known = [run.seconds for run in self.trained(pairs_of(self.groups())) if run.seconds is not None]
        return float(np.mean(known)) if known else 0.0


def _trained(folder: Path, seed: int, on: Sequence[str]) -> TrainedRun:
    if not RunFolder(folder).finished:
        return TrainedRun(seed=seed, on=list(on), failed=read_measurement(folder / FAILED, SavedFailure).reason)
    ended = read_measurement(folder / "summary.json", SavedResult)
    final, seconds = ended.final, ended.wall_seconds
    return TrainedRun(seed=seed, on=list(on), top1=final.top1, count=final.count, seconds=seconds)
