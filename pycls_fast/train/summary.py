"""The end of a run: `summary.json`, the last line that it prints, and what a sweeper gets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pycls_fast.errors import UserError
from pycls_fast.train.best import best_of, primary_records
from pycls_fast.train.damage import DAMAGED_IMAGE
from pycls_fast.train.display import epochs
from pycls_fast.train.environment import device_name, versions
from pycls_fast.train.export import export_best
from pycls_fast.train.metrics import Clock
from pycls_fast.train.run import Run
from pycls_fast.train.validation import Evaluations

# How the best evaluation is printed, by the metric that chose it.
_BEST = {
    "top1": "best top-1 {top1:.2f}%",
    "class_top1": "best class top-1 {class_top1:.2f}%",
    "loss": "at the lowest loss top-1 {top1:.2f}%",
}


def summarise(run: Run, evaluations: Evaluations, clock: Clock, memory: int) -> float | None:
    """Write `summary.json`, draw the curves, print the result and give it to the trackers; on the main rank.

    Args:
        run: a run that has trained all its steps.
        evaluations: its evaluations.
        clock: the speed of what this process trained.
        memory: the peak over the ranks, in bytes.

    Returns:
        What a sweeper minimises, or None: 100 - the best top-1 (or class_top1, if `schedule.best_metric`
        says so) in percent, or the lowest loss.
    """
    if not clock.intervals:
        # Nothing was left to train: report the speed and memory of the earlier processes.
        trained = [record for record in run.folder.records() if record["kind"] == "train"]
        clock = Clock(intervals=[(record["step_seconds"], record["images_per_second"]) for record in trained])
        memory = max((record["memory_peak_bytes"] for record in trained), default=memory)
    step_seconds, rate = clock.medians()
    values = summary_values(run, evaluations.records(), rate=rate, step_seconds=step_seconds, memory=memory)
    if not (run.finished and _has_summary(run)):
        run.folder.write_json("summary.json", values)
        evaluations.board.summarise(values)
    evaluations.draw(whole=True)
    final, best = values["final"], values["best"]
    if final is not None and best is not None:
        # The mean over the classes is None if no image could be scored.
        shown = {**best, "class_top1": best.get("class_top1") or 0.0}
        metric = run.config.schedule.best_metric
        which = _BEST[metric].format_map(shown)
        highest = max(record.get(metric) or 0.0 for record in primary_records(run, evaluations.records()))
        if metric != "loss" and highest > shown[metric]:
            # `schedule.best_tolerance`
            which += f", as good as the highest, {highest:.2f}%, on {best['count']:,} images,"
        run.display.note(
            f"done: top-1 {final['top1']:.2f}%, top-5 {final['top5']:.2f}%  ({which} at epoch {epochs(best['epoch'])})"
        )
    _export_best(run)
    if values["damaged_images"]:
        run.display.note(f"{values['damaged_images']:,} damaged images were skipped; {run.folder.metrics} names them")
    run.display.note(f"run folder: {run.folder.path}")
    return None if best is None else objective(best, run.config.schedule.best_metric)


def _export_best(run: Run) -> None:
    """Write `best.safetensors`, unless an earlier process of the finished run has, or nothing was worth saving."""
    folder = run.folder.path
    if (run.finished and (folder / "best.safetensors").exists()) or not (folder / "checkpoints/best").exists():
        return
    try:
        export_best(folder)
    except UserError as error:
        run.display.warn(str(error))


def _has_summary(run: Run) -> bool:
    """Whether an earlier process wrote the summary of all the run's steps."""
    try:
        summary = json.loads((run.folder.path / "summary.json").read_text(encoding="utf-8"))
        return summary["steps"] == run.total_steps and summary["final"] is not None
    except (OSError, ValueError, KeyError, TypeError):
        return False


def summary_values(
    run: Run, evaluations: list[dict[str, Any]], *, rate: float, step_seconds: float, memory: int
) -> dict[str, Any]:
    """The values of `summary.json`."""
    primary = primary_records(run, evaluations)
    best = best_of(run, primary)
    return {
        "config_name": run.config.config_name,
        "seed": run.config.seed,
        "steps": run.total_steps,
        "epochs": run.epoch(run.total_steps),
        "final": primary[-1] if primary else None,
        "best": None if best is None else primary[best],
        "images_per_second": rate,
        "step_seconds_p50": step_seconds,
        "memory_peak_bytes": memory,
        "parameters": run.complexity.parameters,
        "forward_flops_per_image": run.complexity.forward_flops,
        "damaged_images": len({r["name"] for r in run.folder.records("event") if r.get("event") == DAMAGED_IMAGE}),
        "wall_seconds": run.seconds(),
        "world_size": run.world.size,
        "device": device_name(run.world.device),
        "versions": versions(),
    }


def objective(best: Mapping[str, Any], metric: str) -> float | None:
    """What a sweeper minimises, from the record of the best evaluation; None if the metric is null there."""
    value = best.get(metric)
    return value if value is None or metric == "loss" else 100 - value
