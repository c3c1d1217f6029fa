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


def best_evaluation(evaluations: Sequence[Mapping[str, Any]], metric: str, tolerance: float = 0.0) -> int | None:
    """Index of the first best evaluation, or of the last that is nearly as good; None without any.

    Args:
        evaluations: records of `metrics.jsonl`.
        metric: "top1" or "class_top1" (highest is best) or "loss" (lowest is best). NaN and null are worst.
        tolerance: how far below the highest accuracy is nearly as good, in its standard errors (the one-standard-error
            rule of Breiman et al. 1984, section 3.4.3). Not for the loss.
    """
    sign = 1 if metric == "loss" else -1
    values = [record.get(metric) for record in evaluations]
    scores = [math.inf if value is None or math.isnan(value) else sign * value for value in values]
    if not scores:
        return None
    best = scores.index(min(scores))
    if tolerance == 0.0 or metric == "loss" or math.isinf(scores[best]):
        return best
    count = evaluations[best]["count"]
    # One right and one wrong image more (Laplace): of few images that are all right, the error is not 0.
    share = (-scores[best] / 100 * count + 1) / (count + 2)
    error = 100 * math.sqrt(share * (1 - share) / count)
    worst = scores[best] + tolerance * error
    return max(index for index, score in enumerate(scores) if score <= worst)


def best_of(run: Run, primary: Sequence[Mapping[str, Any]]) -> int | None:
    """`best_evaluation` as the run's configuration defines it."""
    schedule = run.config.schedule
    return best_evaluation(primary, schedule.best_metric, schedule.best_tolerance)


def early_stop(run: Run, evaluations: list[dict[str, Any]]) -> tuple[dict[str, Any], int] | None:
    """The best evaluation and the number after it, if there are enough of these to stop early; else None.

    Args:
        run: the run.
        evaluations: all its evaluation records.
    """
    limit = run.config.schedule.early_stopping_evals
    primary = primary_records(run, evaluations)
    best = best_of(run, primary)
    if limit is None or best is None or (waited := len(primary) - 1 - best) < limit:
        return None
    return primary[best], waited
