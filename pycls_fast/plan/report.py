"""What `pycls-fast plan` prints and writes: a table, JSON, a picture of memory against speed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pycls_fast.plan.cluster import Cluster, interval
from pycls_fast.plan.memory_plan import gigabytes
from pycls_fast.plan.search import Outcome


def _with_interval(value: float, interval: Sequence[float]) -> str:
    """Three digits of each, and all before the point."""
    text, *ends = (f"{each:,.0f}" if each >= 100 else f"{each:.3g}" for each in (value, *interval))
    return f"{text} ({'-'.join(ends)})"


@dataclass(frozen=True)
class Report:
    """The layouts of a run, the best first.

    Attributes:
        steps: the length of the run.
        price: of an accelerator for an hour.
    """

    title: str
    outcomes: Sequence[Outcome]
    steps: int
    cluster: Cluster
    price: float | None = None

    def entry(self, each: Outcome) -> dict[str, Any]:
        """The predictions for a layout, with the intervals of 90% of the cases; hours are those of the training steps,
        without evaluation and checkpoints, and the cost is that of all ranks."""
        low, high = interval("seconds" if self.cluster.accelerator.device == "cuda" else "cpu_seconds")
        least, most = interval("memory")
        hours = each.step * self.steps / 3600.0
        cost = None if self.price is None else hours * self.cluster.ranks * self.price
        return {
            "overrides": each.layout.overrides,
            "fits": each.fits,
            "memory_bytes": each.memory,
            "memory_interval": [least * each.memory, most * each.memory],
            "memory_parts": vars(each.peak),
            "state_bytes": each.state,
            "images_per_second": each.images_per_second,
            "images_per_second_interval": [each.images_per_second / high, each.images_per_second / low],
            "step_seconds": each.step,
            "seconds": {name: getattr(each, name) for name in ("compute", "bubble", "update", "exchange")},
            "share_of_peak": each.share_of_peak,
            "hours": hours,
            "hours_interval": [low * hours, high * hours],
            "cost": cost,
            "cost_interval": None if cost is None else [low * cost, high * cost],
            "loses_by": each.loses_by(self.outcomes[0]),
        }

    def rows(self, top: int) -> list[dict[str, str]]:
        """The first layouts as rows of a table, with the interval in which 90% of measurements lie."""
        tries_precisions = len({each.layout.precision for each in self.outcomes}) > 1

        def row(each: Outcome) -> dict[str, str]:
            layout, speed, found = each.layout, each.images_per_second, self.entry(each)
            return {
                "layout": str(layout),
                "micro x images": f"{layout.accumulation} x {each.images // (layout.data * layout.accumulation)}",
                "recompute": layout.recompute,
                **({"precision": layout.precision} if tries_precisions else {}),
                "memory (state)": f"{gigabytes(each.memory)} ({gigabytes(each.state)})",
                "images/s (90%)": _with_interval(speed, found["images_per_second_interval"]),
                "hours (90%)": _with_interval(found["hours"], found["hours_interval"]),
                "of peak": f"{each.share_of_peak:.1%}",
                "exchange": f"{each.exchange / each.step:.1%}",
                "bubble": f"{each.bubble / each.step:.1%}",
                **({"cost (90%)": "{:,.2f} ({:,.2f}-{:,.2f})".format(found["cost"], *found["cost_interval"])}
                   if self.price is not None else {}),
                "loses by": found["loses_by"],
            }  # fmt: skip

        return [row(each) for each in self.outcomes[:top]]

    def notes(self) -> list[str]:
        """What the table does not say."""
        best, (low, high) = self.outcomes[0], interval("memory")
        found = [
            f"memory of the first: {gigabytes(low * best.memory)} to {gigabytes(high * best.memory)} in 90% of the "
            f"cases, of {gigabytes(self.cluster.accelerator.memory)}",
            "at its peak: " + ", ".join(f"{name} {gigabytes(size)}" for name, size in vars(best.peak).items()),
        ]
        if best.loader is not None:
            late = "; the GPUs wait for them" if best.loader <= best.images_per_second * 1.001 else ""
            found.append(f"the hosts' cores prepare about {best.loader:,.0f} images/s{late}")
        if unfit := sum(not each.fits for each in self.outcomes):
            found.append(f"{unfit} of {len(self.outcomes)} layouts do not fit")
        return found

    def write(self, file: Path) -> None:
        """Write all layouts as JSON."""
        file.write_text(json.dumps([self.entry(each) for each in self.outcomes], indent=2) + "\n", encoding="utf-8")

    def frontier(self) -> list[Outcome]:
        """The layouts that no other one beats in both memory and speed, the fastest first."""
        found: list[Outcome] = []
        for each in sorted(self.outcomes, key=lambda each: (-each.images_per_second, each.memory)):
            if not found or each.memory < found[-1].memory:
                found.append(each)
        return found

    def draw(self, file: Path) -> None:
        """Draw the memory of a rank against the images/s of all, a color for each way of dividing the work, and the
        frontier with names; the device's memory is a dashed line."""
        from matplotlib import colormaps
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9.0, 6.5), layout="constrained")
        axes = figure.subplots()
        ways: dict[str, dict[str, list[tuple[float, float]]]] = {}
        for each in self.outcomes:
            place = (each.memory / 1e9, each.images_per_second)
            ways.setdefault(each.layout.way, {}).setdefault(each.layout.recompute, []).append(place)
        for position, (way, points) in enumerate(sorted(ways.items())):
            color, label = colormaps["tab20"](position % 20), way
            for recompute, line in sorted(points.items(), key=lambda item: item[0] != "off"):
                marker = "o" if recompute == "off" else "^"
                axes.plot(*zip(*line, strict=True), marker, color=color, label=label, alpha=0.6, markersize=4)
                label = "_nolegend_"
        frontier = self.frontier()
        corners = [(each.memory / 1e9, each.images_per_second) for each in frontier]
        axes.plot(*zip(*corners, strict=True), color="black", linewidth=1, label="frontier")
        above = float("inf")
        for each, (memory, speed) in zip(frontier, corners, strict=True):
            # Leave out names that would overlap, and layouts that nobody would choose.
            if 0.25 * corners[0][1] < speed < above - 0.04 * corners[0][1]:
                axes.annotate(f"{each.layout}, {each.layout.accumulation} x", (memory, speed), (-4, 4),
                              textcoords="offset points", ha="right", fontsize=7)  # fmt: skip
                above = speed
        axes.axvline(self.cluster.accelerator.memory / 1e9, color="grey", linestyle="--", linewidth=1)
        axes.set_xscale("log")
        # The first names lie to the left of their points.
        axes.margins(x=0.2)
        axes.set(xlabel="peak memory of a rank, GB (triangles: recomputation)", ylabel="images/s of all ranks")
        axes.set_title(self.title)
        axes.set_ylim(0.0, 1.08 * corners[0][1])
        axes.grid(alpha=0.3)
        figure.legend(loc="outside lower center", ncols=4, fontsize=8)
        figure.savefig(file, dpi=120)
