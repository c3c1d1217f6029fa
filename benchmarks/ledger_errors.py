"""The error rates of the ledger's verdicts, on simulated ladders: `python benchmarks/ledger_errors.py [ladders=2000]`.

Each ladder is designed, looked at and decided by the code that decides real ones; only the trainings are drawn: the
effects of the variants that are on, noise, and how many images a pair disagrees on. (The luck of a seed cancels.)
Prints a table in Markdown (docs/method.md), of 2,000 ladders of each truth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from words import command_words

from pycls_fast.config.ladder import Ladder, Variant
from pycls_fast.ledger.ladder.plan import Factors, Family, families
from pycls_fast.ledger.report.effects import LOOKS, Fit, Look, Pair, decide, fit

_IMAGES = 10_000
# No workload's images err so independently that more than this would come from them (CIFAR-10 at 67%).
_MOST_FROM_IMAGES = 0.28


@dataclass(frozen=True)
class Truth:
    """What is true in simulated ladders: effects in points, one per variant, and the noise of a run within its pair.

    Attributes:
        wild: how many times larger the noise is where the first variant is on.
        tails: degrees of freedom of the noise; infinite: normal.
        both: what the first two variants do together beyond the sum of their effects.
        floor: whether the images' share of the noise is known, as it is in real ladders.
    """

    effects: Sequence[float]
    deviation: float
    runs_at_most: int | None = None
    wild: float = 1.0
    tails: float = math.inf
    both: float = 0.0
    floor: bool = True
    margin: float = 0.25


@dataclass
class Counts:
    """How often ladders of one truth ended how."""

    ladders: int = 0
    accused: int = 0
    false_free: int = 0
    losing: int = 0
    found: int = 0
    harmless: int = 0
    called_free: int = 0
    undecided: int = 0
    runs: list[int] = field(default_factory=list)

    def add(self, last: Look, truth: Truth) -> None:
        """Count a ladder by its last look. Losses of the margin or more are to be found, smaller ones to be free."""
        self.ladders += 1
        self.runs.append(last.runs)
        true = [effect + (truth.both / 2 if i < 2 else 0.0) for i, effect in enumerate(truth.effects)]
        words = [effect.word or "" for effect in last.effects]
        self.accused += any(word.startswith("costs") for word, t in zip(words, true, strict=True) if t >= 0)
        for word, t in zip(words, true, strict=True):
            is_free = word in ("free", "gains", "costs a little")
            self.losing += t < 0
            self.found += t < 0 and word.startswith("costs")
            self.false_free += t <= -truth.margin and is_free
            self.harmless += t == 0
            self.called_free += t == 0 and is_free
            self.undecided += word == "undecided"

    def row(self, variants: int) -> list[str]:
        """The row of the table."""
        too_large = "-" if not self.losing else f"{100 * self.false_free / self.losing:.1f}"
        return [
            f"{100 * self.accused / self.ladders:.1f}", too_large,
            f"{100 * self.found / self.losing:.0f}" if self.losing else "-",
            f"{100 * self.called_free / self.harmless:.0f}" if self.harmless else "-",
            f"{100 * self.undecided / (self.ladders * variants):.1f}", f"{np.mean(self.runs):.0f}",
        ]  # fmt: skip


COLUMNS = (
    "sigma: truth", "false costs, % of ladders", "false free, % of variants", "costs found, %", "free found, %",
    "undecided, %", "runs",
)  # fmt: skip


def one(loss: float, count: int = 8) -> list[float]:
    """The effects of a ladder with one loss, in its second variant."""
    return [-loss if i == 1 else 0.0 for i in range(count)]


GROUPS: dict[str, list[Truth]] = {
    **{
        f"{sigma:g}: all free / one -0.25 / one -0.5": [Truth(one(loss), sigma, runs) for loss in (0.0, 0.25, 0.5)]
        for sigma, runs in ((0.16, None), (0.22, None), (0.28, None), (0.34, 96), (0.45, 160))
    },
    "0.22 / 0.28: all -0.25": [Truth([-0.25] * 8, sigma) for sigma in (0.22, 0.28)],
    "0.22, one -0.25: no image floor / heavy tails (t, 4 df) / one doubles the noise": [
        Truth(one(0.25), 0.22, **more) for more in ({"floor": False}, {"tails": 4}, {"wild": 2})
    ],
    "0.22: two interact by -0.3": [Truth([0.0] * 8, 0.22, both=-0.3)],
    "0.22, 1 variant: free / -0.5": [Truth([effect], 0.22) for effect in (0.0, -0.5)],
    "0.22, one -0.5: of 4 / of 15": [Truth(one(0.5, count), 0.22) for count in (4, 15)],
}
"""By sigma and truth, the rows of the table."""


def simulate(truth: Truth, ladders: int, *, seed: int = 0) -> Counts:
    """Simulate so many ladders."""
    counts, generator = Counts(), np.random.default_rng(seed)
    names = [f"v{i}" for i in range(len(truth.effects))]
    ladder = Ladder(
        description="simulated", baseline=Variant(name="base"), variants=tuple(Variant(name=name) for name in names)
    )
    # Designs differ by the columns that chance has chosen; a few of them represent all.
    designs = [families(ladder, Factors(names), truth.runs_at_most, 1000 * i)[0][0] for i in range(20)]
    for number in range(ladders):
        counts.add(_ladder(truth, designs[number % len(designs)], generator)[-1], truth)
    return counts


def _ladder(truth: Truth, family: Family, generator: np.random.Generator) -> list[Look]:
    pairs = _drawn(truth, family, generator)

    def looks() -> Iterator[tuple[int, int, list[Fit]]]:
        for place in range(len(LOOKS)):
            count = len(family.at_look(place))
            found = fit(pairs[:count], family.names)
            assert found is not None
            yield place, 2 * count, [found]

    return decide(looks(), truth.margin)


def _drawn(truth: Truth, family: Family, generator: np.random.Generator) -> list[Pair]:
    true = dict(zip(family.names, truth.effects, strict=True))
    first, second = family.names[0], family.names[min(1, len(family.names) - 1)]
    share = min(truth.deviation, _MOST_FROM_IMAGES) ** 2 * 2 * _IMAGES**2 / 100**2
    made = []
    for pair in family.pairs:
        top1 = []
        for on in pair.on:
            noise = generator.normal() if math.isinf(truth.tails) else _heavy(truth.tails, generator)
            wild = truth.wild if first in on else 1.0
            interaction = truth.both if first in on and second in on else 0.0
            top1.append(sum(true[name] for name in on) + interaction + truth.deviation * wild * noise)
        discordant = int(generator.poisson(share)) if truth.floor else 0
        made.append(Pair(pair.on, top1[0] - top1[1], discordant, _IMAGES, (top1[0] + top1[1]) / 2))
    return made


def _heavy(freedom: float, generator: np.random.Generator) -> float:
    """Student's t with a variance of one."""
    return float(generator.standard_t(freedom)) / math.sqrt(freedom / (freedom - 2))


def main(ladders: int) -> None:
    """Print the table."""
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for name, truths in GROUPS.items():
        rows = [simulate(truth, ladders).row(len(truth.effects)) for truth in truths]
        cells = [" / ".join(column if len(set(column)) > 1 else column[:1]) for column in zip(*rows, strict=True)]
        print(f"| {' | '.join([name, *cells])} |", flush=True)


if __name__ == "__main__":
    main(int(command_words(__doc__, ladders="2000")[1]["ladders"]))
