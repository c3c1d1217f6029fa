"""The best of a run's evaluations, and whether it is so old that early stopping ends the run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pycls_fast.train.run import Run


def primary_records(run: Run, evaluations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The evaluations that count: those of the average if there is one, else of the model."""
    weights = "ema" if run.step.ema is not None else "model"
    return [record for record in evaluations if record["weights"] == weights and record["split"] == "val"]


def best_evaluation(evaluations: Sequence[Mapping[str, Any]], metric: str) -> int | None:
    """Index of the first best evaluation; None without any.

    Args:
        evaluations: records of `metrics.jsonl`.
        metric: "top1" or "class_top1" (highest is best) or "loss" (lowest is best). NaN and null are worst.
    """
    sign = 1 if metric == "loss" else -1
    values = [record.get(metric) for record in evaluations]
    scores = [math.inf if value is None or math.isnan(value) else sign * value for value in values]
    return scores.index(min(scores)) if scores else None


def early_stop(run: Run, evaluations: list[dict[str, Any]]) -> tuple[dict[str, Any], int] | None:
    """The best evaluation and the number after it, if there are enough of these to stop early; else None.

    Args:
        run: the run.
        evaluations: all its evaluation records.
    """
    limit, metric = run.config.schedule.early_stopping_evals, run.config.schedule.best_metric
    primary = primary_records(run, evaluations)
    best = best_evaluation(primary, metric)
    if limit is None or best is None or (waited := len(primary) - 1 - best) < limit:
        return None
    return primary[best], waited
