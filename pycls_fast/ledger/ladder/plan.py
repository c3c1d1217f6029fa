"""The variants of a ladder: which are timed and run, what each is compared with, and which trainings tell what it does.

Trainings have a crossed design, in which every one has about half of the variants on. Each row of a Hadamard matrix is
a training, followed by its mirror image with the same seed (Plackett & Burman 1946; the fold-over of Box & Hunter,
which keeps effects clear of interactions of two). Variants that cannot be combined at all (other code, another number
of processes) are compared one at a time, in a family of their own.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from pathlib import Path

import numpy as np
from scipy.linalg import hadamard

from pycls_fast.config.compose import ALIASES
from pycls_fast.config.keys import key_of
from pycls_fast.config.ladder import Ladder, Mode, Variant
from pycls_fast.errors import UserError, did_you_mean, refuse
from pycls_fast.files import user_path
from pycls_fast.ledger.report.effects import LOOKS, On, errors_of, tells_apart
from pycls_fast.ledger.report.record import Status

# Longest name in a path, in characters; file systems allow about 250.
_LONGEST = 60


def slug(variant: Variant) -> str:
    """A variant's part of a path: the readable name and a digest, so that changed settings get a new path."""
    tree = [variant.tree] if variant.tree else []
    made_of = json.dumps([variant.name, variant.overrides, variant.ranks, *tree])
    return f"{readable(variant.name)}-{hashlib.sha256(made_of.encode()).hexdigest()[:8]}"


def readable(name: str) -> str:
    """A name as part of a path; not unique."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")[:_LONGEST] or "variant"


def tree_path(tree: str) -> Path:
    """The absolute path of a variant's checkout, which may be relative to the working folder."""
    return user_path(tree).resolve()


def pick(ladder: Ladder, names: Sequence[str]) -> Ladder:
    """The ladder with only the variants that are named or set a named key, and those that they are `against`, in order.

    A key that a variant sets to the same value as the one it is against does not count as its own. A `UserError` for a
    name that matches no variant.
    """
    if not names:
        return ladder
    words: dict[str, set[str]] = {}
    overrides = {variant.name: variant.overrides for variant in ladder.variants}
    for variant in ladder.variants:
        keys = set(map(key_of, set(variant.overrides).difference(overrides.get(str(variant.against), ()))))
        # A switch may be named without its section: "compile" for speed.compile.
        short = {key.removeprefix("speed.") for key in keys} | {each for each in ALIASES if ALIASES[each] in keys}
        words[variant.name] = {variant.name, *keys, *short}
    known = set().union(*words.values())
    refuse(
        f"switches: no variant is called {name} or sets it{did_you_mean(name, known)}; there are {', '.join(words)}"
        for name in names
        if name not in known
    )
    picked = with_parents(ladder, [name for name in words if words[name] & set(names)])
    return ladder.model_copy(update={"variants": tuple(v for v in ladder.variants if v.name in picked)})


def with_parents(ladder: Ladder, names: Collection[str]) -> tuple[str, ...]:
    """The names, and those of the variants that they are against, directly or not; in the ladder's order."""
    found = {*names}
    for variant in reversed(ladder.variants):
        if variant.name in found and variant.against is not None:
            found.add(variant.against)
    return tuple(variant.name for variant in ladder.variants if variant.name in found)


def merged(*parts: Sequence[str]) -> tuple[str, ...]:
    """Overrides concatenated; of those with the same key only the last is kept, as Hydra may refuse a second one."""
    kept: dict[str, str] = {}
    for override in chain(*parts):
        key = _chosen_by(override)
        kept.pop(key, None)
        kept[key] = override
    return tuple(kept.values())


# Options of these groups have no other key, and it would win over a later option.
_NAMES = {"parallel.name": "parallel", "precision.name": "precision"}


def _chosen_by(override: str) -> str:
    """The key of an override: that of its group, if it names the group's option."""
    key = key_of(override)
    return _NAMES.get(key, key)


def timed_variants(ladder: Ladder, mode: Mode, *, impossible: Collection[str] = ()) -> list[Variant]:
    """The variants that are timed, after the reference, in the order of the ladder.

    Args:
        mode: "cumulative": each on top of those before it. "crossed": each by itself on the baseline, or on the
            variant that it is against, and compared with that.
        impossible: those that cannot run here: the report shows them as missing, others do not include their change.
    """

    def on_top(variant: Variant, below: Sequence[str], ranks: int, against: str | None) -> Variant:
        overrides = merged(below, variant.overrides)
        return variant.model_copy(update={"overrides": overrides, "ranks": variant.ranks or ranks, "against": against})

    base = below = on_top(ladder.baseline, (), 1, None)
    made = [base]
    for variant in ladder.variants:
        if mode == "crossed":
            # As in the trainings, a change of another one is on top of it.
            parents = combination(ladder, with_parents(ladder, [variant.name])[:-1])
            made.append(on_top(variant, parents.overrides, parents.ranks or 1, variant.against or base.name))
            continue
        made.append(on_top(variant, below.overrides, below.ranks or 1, below.name))
        if variant.name not in impossible:
            below = made[-1]
    return made


class Selection:
    """The variants of a ladder, which change as it becomes known what does not run.

    Attributes:
        out: by name, whether it "cannot run" on this machine or with this model or its process "failed", and why.

    Raises:
        UserError: a baseline that is not for this device.
    """

    def __init__(self, ladder: Ladder, mode: Mode, device: str) -> None:
        self.out: dict[str, tuple[Status, str]] = {}
        self._ladder, self._mode = ladder, mode
        # Those that later variants do not include.
        self._excluded: set[str] = set()
        self.rule_out(lambda v: None if v.needs in (None, device) else f"needs {str(v.needs).upper()}")

    def variants(self) -> list[Variant]:
        """The variants, given what is known so far about which can run here."""
        return timed_variants(self._ladder, self._mode, impossible=self._excluded)

    def runnable(self) -> list[Variant]:
        return [variant for variant in self.variants() if variant.name not in self.out]

    def in_order(self) -> Iterator[Variant]:
        """Those that are not known to fail, recomputed after each one: leaving one out changes those after it."""
        for position in range(1 + len(self._ladder.variants)):
            variant = self.variants()[position]
            if variant.name not in self.out:
                yield variant

    def rule_out(self, refusal: Callable[[Variant], str | None]) -> None:
        """Leave out, in the ladder's order, the variants for which `refusal` gives a reason; raises as `leave_out`."""
        for variant in self.in_order():
            why = refusal(variant)
            if why is not None:
                self.leave_out(variant, "cannot run", why)

    def leave_out(self, variant: Variant, status: Status, why: str, *, below: bool = False) -> None:
        """Leave a variant out; with `below`, later ones still include its change, as their timings do already. A
        `UserError` if it is the reference."""
        if variant.against is None:
            raise UserError(f"ladder: the reference '{variant.name}' does not run: {why}")
        self.out[variant.name] = status, why
        if not below:
            self._excluded.add(variant.name)


# The first pairs, all on against all off, say how far trainings scatter before most of them start.
_PILOT = 4


@dataclass(frozen=True)
class PlannedPair:
    """Two trainings with one seed, and what is on in each, in the ladder's order."""

    seed: int
    on: tuple[tuple[str, ...], tuple[str, ...]]


@dataclass(frozen=True)
class Family:
    """Variants that are estimated together, and their pairs in the order of training; the first `pilot` are all on
    against all off."""

    names: tuple[str, ...]
    pairs: tuple[PlannedPair, ...]
    pilot: int

    @property
    def on(self) -> list[On]:
        """What is on in all pairs."""
        return [pair.on for pair in self.pairs]

    @property
    def errors(self) -> np.ndarray:
        """The standard errors (m,) of the effects after all pairs, over the standard deviation of a run."""
        return errors_of(self.on, self.names)

    def at_look(self, place: int) -> tuple[PlannedPair, ...]:
        return self.pairs[: math.ceil(LOOKS[place] * len(self.pairs))]


@dataclass
class Factors:
    """A ladder's variants as the factors of a design, as far as they are known; kept with the plan, so that a resumed
    ledger has the same.

    Attributes:
        crossed: names of those that are combined.
        alone: names of those that are compared one at a time.
        conflicts: pairs of names that are never on together.
        alike: names of those whose weights are the same bits after some steps; None before that is known.
        identical: names of those whose predictions are then the same, too.
        broken: those that make trainings fail, and the evidence in words.
        looked: whether there were verdicts, after which runs_at_most and margin are fixed.
    """

    crossed: list[str] = field(default_factory=list)
    alone: list[str] = field(default_factory=list)
    conflicts: list[tuple[str, str]] = field(default_factory=list)
    alike: list[str] | None = None
    identical: list[str] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    looked: bool = False


def find_factors(ladder: Ladder, names: Collection[str], refused: Callable[[Variant], str | None]) -> Factors:
    """Sort the variants of these names, which run here, into those that can be combined and those that cannot."""
    runnable = [v for v in ladder.variants if v.name in names]
    chosen = [v for v in runnable if not refused(combination(ladder, with_parents(ladder, [v.name])))]
    base = ladder.baseline
    ranks = base.ranks or 1
    alone = [v.name for v in chosen if (v.tree, v.ranks or ranks) != (base.tree, ranks)]
    known = {v.name: v for v in chosen}
    # What needs one that is compared alone, or that does not run, is compared alone as well.
    for variant in chosen:
        if variant.against is not None and (variant.against in alone or variant.against not in known):
            alone.append(variant.name)
    crossed = [v.name for v in chosen if v.name not in alone]
    conflicts = [
        (one, other)
        for one, other in combinations(crossed, 2)
        # A change may replace values of what it is a change of.
        if one not in with_parents(ladder, [other])
        and (_same_key(known[one], known[other]) or refused(combination(ladder, with_parents(ladder, (one, other)))))
    ]
    return Factors(crossed, list(dict.fromkeys(alone)), conflicts)


def _same_key(one: Variant, other: Variant) -> bool:
    """Whether two variants set a key to different values."""
    values = [{_chosen_by(each): each.partition("=")[2] for each in variant.overrides} for variant in (one, other)]
    return any(values[0][key] != values[1][key] for key in values[0].keys() & values[1].keys())


def combination(ladder: Ladder, on: Sequence[str]) -> Variant:
    """A training that has these variants on, as a variant."""
    known = {variant.name: variant for variant in ladder.variants}
    chosen = (ladder.baseline, *(known[name] for name in on))
    return Variant(
        name=" + ".join(on) or ladder.baseline.name,
        overrides=merged(*(variant.overrides for variant in chosen)),
        # Of several that say how many, one is a change of another.
        ranks=next((variant.ranks for variant in reversed(chosen) if variant.ranks), None),
        # One with other code than the baseline's is compared alone.
        tree=chosen[-1].tree,
    )


def default_runs(count: int) -> int:
    """The most trainings of a family of so many variants by default: 64, or 96 and more for over 8 variants."""
    return 64 if count <= 8 else 6 * _rows(count)


def _rows(count: int) -> int:
    return 1 << math.ceil(math.log2(max(count, 4)))


def families(ladder: Ladder, factors: Factors, runs_at_most: int | None, first_seed: int) -> list[list[Family]]:
    """The families of trainings, those that are tested together in one list: the crossed one, then those alone."""
    left = [name for name in factors.crossed if name not in (*factors.identical, *factors.broken)]
    found = []
    if left:
        pairs, pilot = _crossed(ladder, left, factors, (runs_at_most or default_runs(len(left))) // 2, first_seed)
        found.append([Family(tuple(left), pairs, pilot)])
    count, alone = (runs_at_most or default_runs(1)) // 2, list[Family]()
    for name in (name for name in factors.alone if name not in factors.broken):
        on = with_parents(ladder, [name])
        pair = (on, tuple(other for other in on if other != name))
        pairs = tuple(PlannedPair(first_seed + i, pair) for i in range(count))
        alone.append(Family((name,), pairs, min(count, _PILOT)))
    return [*found, alone] if alone else found


def pairs_of(groups: Iterable[Sequence[Family]]) -> list[PlannedPair]:
    return [pair for family in chain(*groups) for pair in family.pairs]


def check_runs(groups: Sequence[Sequence[Family]]) -> None:
    """Raise a `UserError` if a family has too few trainings to tell its variants apart."""
    refuse(
        f"runs_at_most: {2 * len(family.pairs)} trainings say nothing about {len(family.names)} variants; use "
        f"{_more_runs(family)} or more"
        for family in chain(*groups)
        if not tells_apart(family.on, family.names)
    )


def _more_runs(family: Family) -> int:
    """The number of trainings that may tell a family's variants apart, if its own do not."""
    runs, fewest = 2 * len(family.pairs), 2 * len(family.names) + 2
    # Alternatives, and changes of changes, are on less often.
    return fewest if runs < fewest else 2 * runs


def _crossed(
    ladder: Ladder, names: Sequence[str], factors: Factors, count: int, first_seed: int
) -> tuple[tuple[PlannedPair, ...], int]:
    """`count` pairs, and how many of the first are all on against all off."""
    # A change is on with all that it is a change of, which among few rows are never on without it.
    rows = _rows(max(len(names), *(2 ** len(with_parents(ladder, [name])) // 2 for name in names)))
    # The others alone tell the variants apart.
    pilot = max(min(_PILOT, count - rows + 1), 1)
    on_RC = hadamard(rows) > 0
    # Of k alternatives each is left out at random, so that a half has none of them as often as a certain one.
    among_N = 1 + np.array([sum(name in pair for pair in factors.conflicts) for name in names])
    left_out_N = 2 * (1 + among_N) ** (-1 / among_N) - 1
    ends, others = list[PlannedPair](), list[PlannedPair]()
    for block in range(max(math.ceil(count / rows), pilot)):
        generator = np.random.default_rng([first_seed, rows, len(names), block])
        # The column of ones is always among them, which makes the first row the one with all on.
        columns = generator.permutation([0, *generator.choice(np.arange(1, rows), len(names) - 1, replace=False)])
        order = [0, *generator.permutation(np.arange(1, rows))]
        for place, row in enumerate(order):
            is_on_N = on_RC[row, columns]
            halves = [[names[i] for i in np.flatnonzero(side).tolist()] for side in (is_on_N, ~is_on_N)]
            if place or block >= pilot:
                # Of alternatives the first pairs all have the same: how these scatter must not be what the variants do.
                left_out = set(np.compress(generator.random(len(names)) < left_out_N, names))
                halves = [[n for n in generator.permutation(half).tolist() if n not in left_out] for half in halves]
            on = [compatible(ladder, half, factors.conflicts) for half in halves]
            pair = PlannedPair(first_seed + block * rows + place, (on[0], on[1]))
            (others if place else ends).append(pair)
    # The ends of later blocks stay with their blocks.
    rest = sorted([*ends[pilot:], *others], key=lambda pair: pair.seed)
    return tuple([*ends[:pilot], *rest][:count]), pilot


def compatible(ladder: Ladder, on: Sequence[str], conflicts: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Those of `on` that can be on together: of alternatives the first, and none without the one it is against."""
    kept: set[str] = set()
    for name in on:
        if not any({name, other} in map(set, conflicts) for other in kept):
            kept.add(name)
    return tuple(v.name for v in ladder.variants if v.name in kept and set(with_parents(ladder, [v.name])) <= kept)
