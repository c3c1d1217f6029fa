"""What `pycls-fast plan` prints and writes: a table, JSON, a picture of memory against speed, overrides."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pycls_fast.plan.cluster import interval
from pycls_fast.plan.memory_plan import gigabytes
from pycls_fast.plan.search import Outcome, frontier


@dataclass(frozen=True)
class Costs:
    """What a run of so many steps costs on its ranks, at a price of each for an hour."""

    steps: int
    ranks: int
    price: float | None = None

    def hours(self, outcome: Outcome) -> float:
        """The schedule's hours, without evaluation and checkpoints."""
        return outcome.step * self.steps / 3600.0

    def cost(self, outcome: Outcome) -> float | None:
        """The price of all ranks for these hours, None without a price."""
        return None if self.price is None else self.hours(outcome) * self.ranks * self.price


def table(outcomes: Sequence[Outcome], costs: Costs) -> list[str]:
    """The layouts as aligned lines: each with the interval of 90% of the cases that were compared with measurements."""
    low, high = interval("seconds")
    heads = ["layout", "micro x images", "recompute", "GB (state)", "images/s (90%)", "hours", "of peak", "waits"]
    heads += ["bubble", *(["cost"] if costs.price is not None else [])]
    lines = [[*heads, "loses by"]]
    for each in outcomes:
        layout, speed, cost = each.layout, each.images_per_second, costs.cost(each)
        line = [
            str(layout),
            f"{layout.accumulation} x {each.images // (layout.data * layout.accumulation)}",
            layout.recompute,
            f"{each.memory / 1e9:.1f} ({each.state / 1e9:.1f})",
            f"{speed:,.0f} ({speed / high:,.0f}-{speed / low:,.0f})",
            f"{costs.hours(each):.3g}",
            f"{each.share_of_peak:.1%}",
            f"{each.exchange / each.step:.1%}",
            f"{each.bubble / each.step:.1%}",
        ]
        line += [f"{cost:,.0f}"] if cost is not None else []
        lines.append([*line, each.loses(outcomes[0])])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def notes(best: Outcome, outcomes: Sequence[Outcome], memory: float) -> list[str]:
    """What the table does not say."""
    low, high = interval("memory")
    found = [
        f"memory of the first: {gigabytes(low * best.memory)} to {gigabytes(high * best.memory)} in 90% of the cases, "
        f"of {gigabytes(memory)}"
    ]
    if best.loader is not None:
        late = best.loader <= best.images_per_second * 1.001
        found.append(
            f"the hosts' cores prepare about {best.loader:,.0f} images/s"
            + ("; the GPUs wait for them" if late else "")
        )  # fmt: skip
    unfit = sum(not each.fits for each in outcomes)
    return found + ([f"{unfit} of {len(outcomes)} layouts do not fit"] if unfit else [])


def as_json(outcomes: Sequence[Outcome], costs: Costs) -> str:
    """All layouts as JSON, the best first."""
    low, high = interval("seconds")
    least, most = interval("memory")

    def entry(each: Outcome) -> dict[str, Any]:
        return {
            "overrides": each.layout.overrides,
            "fits": each.fits,
            "memory_bytes": each.memory,
            "memory_interval": [least * each.memory, most * each.memory],
            "state_bytes": each.state,
            "images_per_second": each.images_per_second,
            "images_per_second_interval": [each.images_per_second / high, each.images_per_second / low],
            "step_seconds": each.step,
            "seconds": {name: getattr(each, name) for name in ("compute", "update", "exchange", "bubble")},
            "share_of_peak": each.share_of_peak,
            "hours": costs.hours(each),
            "cost": costs.cost(each),
            "loses_by": each.loses(outcomes[0]),
        }

    return json.dumps([entry(each) for each in outcomes], indent=2) + "\n"


def draw(outcomes: Sequence[Outcome], memory: float, title: str, path: Path) -> None:
    """A picture: memory of a rank against images/s of all, with the frontier and the device's memory."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 5.5), layout="constrained")
    axes = figure.subplots()
    kinds = sorted({(str(each.layout), each.layout.recompute) for each in outcomes})
    for position, (name, recompute) in enumerate(kinds):
        points = [each for each in outcomes if (str(each.layout), each.layout.recompute) == (name, recompute)]
        label = name if recompute == "off" else f"{name}, recompute={recompute}"
        marker = "o" if recompute == "off" else "^"
        axes.plot(
            [each.memory / 1e9 for each in points],
            [each.images_per_second for each in points],
            marker, color=f"C{position % 10}", label=label, alpha=0.8,
        )  # fmt: skip
    edge = frontier(outcomes)
    axes.plot([each.memory / 1e9 for each in edge], [each.images_per_second for each in edge], "k-", linewidth=1)
    axes.axvline(memory / 1e9, color="grey", linestyle="--", linewidth=1)
    axes.set_xscale("log")
    axes.set(xlabel="peak memory of a rank, GB", ylabel="images/s of all ranks", title=title)
    axes.set_ylim(bottom=0.0)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(path, dpi=120)
