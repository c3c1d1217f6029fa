"""Which trainings a ladder needs: a crossed design, in which every training has about half of the variants on.

Each row of a Hadamard matrix is a training, followed by its mirror image with the same seed (Plackett & Burman 1946;
the fold-over of Box & Hunter, which keeps effects clear of interactions of two). Variants that cannot be combined at
all (other code, another number of processes) are compared one at a time, in a family of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
from scipy.linalg import hadamard

from pycls_fast.config.ladder import Ladder, Variant
from pycls_fast.ledger.ladder.plan import closed, merged, override_key
from pycls_fast.ledger.report.effects import LOOKS

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

    def at_look(self, place: int) -> tuple[PlannedPair, ...]:
        """The pairs of a look."""
        return self.pairs[: math.ceil(LOOKS[place] * len(self.pairs))]


@dataclass
class Crossing:
    """What is known of a ladder's variants as factors of a design; kept with the plan, so that a resumed ledger has the
    same.

    Attributes:
        crossed: names of those that are combined.
        alone: names of those that are compared one at a time.
        conflicts: pairs of names that are never on together.
        alike: names of those whose weights are the same bits after some steps; None before that is known.
        identical: names of those whose predictions are then the same, too.
        broken: those that make trainings fail, and the evidence in words.
        looked: runs_at_most and margin, once there were verdicts, after which both are fixed.
    """

    crossed: list[str] = field(default_factory=list)
    alone: list[str] = field(default_factory=list)
    conflicts: list[tuple[str, str]] = field(default_factory=list)
    alike: list[str] | None = None
    identical: list[str] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    looked: list[float | None] = field(default_factory=list)


def crossing(ladder: Ladder, names: Collection[str], refused: Callable[[Variant], bool]) -> Crossing:
    """Sort the variants of these names, which run here, into those that can be combined and those that cannot."""
    chosen = [v for v in ladder.variants if v.name in names and not refused(together(ladder, closed(ladder, [v.name])))]
    alone = [v.name for v in chosen if v.tree is not None or v.ranks not in (None, ladder.baseline.ranks)]
    known = {v.name: v for v in chosen}
    # What needs one that is compared alone, or that does not run, is compared alone as well.
    for variant in chosen:
        if variant.against is not None and (variant.against in alone or variant.against not in known):
            alone.append(variant.name)
    crossed = [v.name for v in chosen if v.name not in alone]
    conflicts = [
        (one, other)
        for one, other in combinations(crossed, 2)
        if _same_key(known[one], known[other]) or refused(together(ladder, closed(ladder, (one, other))))
    ]
    return Crossing(crossed, list(dict.fromkeys(alone)), conflicts)


def _same_key(one: Variant, other: Variant) -> bool:
    """Whether two variants set a key to different values, and neither is a change of the other."""
    if other.name == one.against or one.name == other.against:
        return False
    values = [{override_key(each): each for each in v.overrides} for v in (one, other)]
    return any(values[0][key] != values[1][key] for key in values[0].keys() & values[1].keys())


def together(ladder: Ladder, on: Sequence[str]) -> Variant:
    """The settings of a training that has these variants on."""
    known = {variant.name: variant for variant in ladder.variants}
    chosen = [known[name] for name in on]
    last = chosen[-1] if chosen else ladder.baseline
    return Variant(
        name=" + ".join(on) or ladder.baseline.name,
        overrides=merged(ladder.baseline.overrides, *(variant.overrides for variant in chosen)),
        ranks=last.ranks or ladder.baseline.ranks,
        # Only one that is compared alone has a tree.
        tree=last.tree or ladder.baseline.tree,
    )


def default_runs(count: int) -> int:
    """The most trainings of a family of so many variants, if nobody says: 64, with more than 8 of them 96 and more."""
    return 64 if count <= 8 else 6 * _rows(count)


def _rows(count: int) -> int:
    return 1 << math.ceil(math.log2(max(count, 4)))


def families(ladder: Ladder, known: Crossing, runs_at_most: int | None, first_seed: int) -> list[list[Family]]:
    """The families of trainings, those that are tested together in one list: the crossed one, then those alone."""
    left = [name for name in known.crossed if name not in (*known.identical, *known.broken)]
    found = []
    if left:
        pairs, pilot = _crossed(ladder, left, known, (runs_at_most or default_runs(len(left))) // 2, first_seed)
        found.append([Family(tuple(left), pairs, pilot)])
    count = (runs_at_most or default_runs(1)) // 2
    apart = [name for name in known.alone if name not in known.broken]
    if apart:
        found.append([Family((name,), _alone(ladder, name, count, first_seed), min(count, _PILOT)) for name in apart])
    return found


def _alone(ladder: Ladder, name: str, count: int, first_seed: int) -> tuple[PlannedPair, ...]:
    on = closed(ladder, [name])
    without = tuple(other for other in on if other != name)
    return tuple(PlannedPair(first_seed + i, (on, without)) for i in range(count))


def _crossed(
    ladder: Ladder, names: Sequence[str], known: Crossing, count: int, first_seed: int
) -> tuple[tuple[PlannedPair, ...], int]:
    """`count` pairs, and how many of the first are all on against all off."""
    rows = _rows(len(names))
    # The others alone tell the variants apart.
    pilot = max(min(_PILOT, count - rows + 1), 1)
    on_RC = hadamard(rows) > 0
    ends, others = list[PlannedPair](), list[PlannedPair]()
    for block in range(max(math.ceil(count / rows), pilot)):
        generator = np.random.default_rng([first_seed, rows, len(names), block])
        # The column of ones is always among them, which makes the first row the one with all on.
        columns = generator.permutation([0, *generator.choice(np.arange(1, rows), len(names) - 1, replace=False)])
        order = [0, *generator.permutation(np.arange(1, rows))]
        for place, row in enumerate(order):
            is_on_N = on_RC[row, columns]
            halves = [[names[i] for i in np.flatnonzero(side).tolist()] for side in (is_on_N, ~is_on_N)]
            on = [possible(ladder, generator.permutation(half).tolist(), known.conflicts) for half in halves]
            pair = PlannedPair(first_seed + block * rows + place, (on[0], on[1]))
            (others if place else ends).append(pair)
    # The ends of later blocks stay with their blocks.
    rest = sorted([*ends[pilot:], *others], key=lambda pair: pair.seed)
    return tuple([*ends[:pilot], *rest][:count]), pilot


def possible(ladder: Ladder, on: Sequence[str], conflicts: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Those of `on` that can be on together: of alternatives the first, and a variant needs its parent."""
    kept: set[str] = set()
    for name in on:
        if not any({name, other} in map(set, conflicts) for other in kept):
            kept.add(name)
    return tuple(v.name for v in ladder.variants if v.name in kept and set(closed(ladder, [v.name])) <= kept)
