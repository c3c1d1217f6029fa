"""Validation during a run: when it is due, which one is the best, early stopping, the curves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pycls_fast import build
from pycls_fast.data.sources.eval_sets import EvalSet
from pycls_fast.files import checkpoints, step_of
from pycls_fast.train import saving
from pycls_fast.train.by_class import class_scores, set_scores, standard_errors
from pycls_fast.train.display import epochs
from pycls_fast.train.evaluate import Evaluation, evaluate
from pycls_fast.train.folder import writing
from pycls_fast.train.observers import Observers
from pycls_fast.train.out_of_memory import enough_to_score
from pycls_fast.train.pictures import draw_curves
from pycls_fast.train.run_state import Run


def primary_records(run: Run) -> list[dict[str, Any]]:
    """The evaluations that count: those of the average if there is one, else of the model; on the main rank."""
    weights = "ema" if run.step.ema is not None else "model"
    return [record for record in run.folder.records("eval") if (record["weights"], record["split"]) == (weights, "val")]


def best_evaluation(evaluations: Sequence[Mapping[str, Any]], metric: str, tolerance: float = 0.0) -> int | None:
    """Index of the first best record, or of the last that is nearly as good; None without any. NaN and null are worst.

    `tolerance` says how far below the highest accuracy is nearly as good, in its standard errors (the
    one-standard-error rule of Breiman et al. 1984, section 3.4.3); not for the loss.
    """
    sign = 1 if metric == "loss" else -1
    values = [record.get(metric) for record in evaluations]
    scores = [math.inf if value is None or math.isnan(value) else sign * value for value in values]
    if not scores:
        return None
    best = scores.index(min(scores))
    if tolerance == 0.0 or metric == "loss" or math.isinf(scores[best]):
        return best
    worst = scores[best] + tolerance * (evaluations[best].get(f"{metric}_standard_error") or 0.0)
    return max(index for index, score in enumerate(scores) if score <= worst)


def primary_and_best(run: Run) -> tuple[list[dict[str, Any]], int | None]:
    """The `primary_records`, and the index of the best as the run's configuration defines it; on the main rank."""
    primary, schedule = primary_records(run), run.config.schedule
    return primary, best_evaluation(primary, schedule.best_metric, schedule.best_tolerance)


def early_stop(run: Run) -> tuple[dict[str, Any], int] | None:
    """The best evaluation and the number after it, if there are enough of these to stop early; on the main rank."""
    limit, (primary, best) = run.config.schedule.early_stopping_evals, primary_and_best(run)
    if limit is None or best is None or (waited := len(primary) - 1 - best) < limit:
        return None
    return primary[best], waited


# Part of the time between two drawings of the curves that drawing may take: all ranks wait for it.
_DRAWING_SHARE = 0.01


class Evaluations:
    """The evaluations of the validation split between training steps. `after_batch` is called after each batch on every
    rank, and may raise to stop."""

    def __init__(self, run: Run, observers: Observers, after_batch: Callable[[], None]) -> None:
        self.run = run
        self.observers = observers
        self.after_batch = after_batch
        self._next_drawing = -math.inf

    def due(self, done: int) -> bool:
        every = build.steps_between_evaluations(self.run.config, self.run.steps_per_epoch)
        if done == 0:
            return self.run.config.begins_with_probe
        return done % every == 0 or done == self.run.total_steps

    def has(self, step: int) -> bool:
        """Whether the records of this step's evaluation are complete; the same on all ranks."""
        return self.run.world.from_main(any(r["step"] == step for r in primary_records(self.run)))

    def stop_early(self, done: int) -> bool:
        """Whether early stopping ends the run here (then it is announced); the same answer on all ranks."""
        run, schedule = self.run, self.run.config.schedule
        if schedule.early_stopping_evals is None:
            return False
        found = run.world.from_main(early_stop(run) if run.world.is_main else None)
        if found is None or done >= run.total_steps:
            return False
        if run.world.is_main:
            best, waited = found
            metric, at = schedule.best_metric, best["epoch"]
            run.add_record("event", done, event="stopped early", metric=metric, best_epoch=at)
            run.display.note(f"stopped early: {metric} was best at epoch {epochs(at)}, {waited} evaluations ago")
        return True

    def evaluate(self, done: int) -> bool:
        """Evaluate the model and its average, if there is one; returns whether their losses are finite. All ranks call
        this; a `UserError` on all of them if no image can be read."""
        run = self.run
        run.world.at(f"evaluating after step {done}")
        finite = self._evaluate_weights(done, "model")
        if run.step.ema is not None:
            with run.step.ema.swapped_in():
                finite &= self._evaluate_weights(done, "ema")
        return finite

    def _evaluate_weights(self, done: int, weights: str) -> bool:
        run = self.run
        with enough_to_score(run.config, run.world):
            result = evaluate(run.scorer(self.after_batch), EvalSet(run.sources["val"]), "evaluating val")
        if not result.count:
            run.damaged.need_images("val", 0, done)
        if run.world.is_main:
            self._record(done, weights, result)
        return math.isfinite(result.loss or 0.0)

    def _record(self, done: int, weights: str, result: Evaluation) -> None:
        run = self.run
        # The average is evaluated last, so the file ends up with its predictions if there is one.
        with writing(run.folder.predictions):
            result.predictions.save(run.folder.predictions)
        source = run.sources["val"]
        several = source.label_sets is not None
        by_class = set_scores(result, source) if several else class_scores(result.predictions, run.classes)
        run.folder.write_json("classes.json", by_class)
        names = ("recall", "map", "f1") if several else ("class_top1",)
        means, errors = {name: by_class[name] for name in names}, standard_errors(result, by_class)
        record = run.add_record("eval", done, split="val", weights=weights, **result.record(), **means, **errors)
        run.display.evaluation(record)
        self.observers.add(record)

    def keep_if_best(self) -> None:
        """Link the newest checkpoint as best if its evaluation is the latest and the best."""
        run = self.run
        if not run.world.is_main:
            return
        evaluations, best = primary_and_best(run)
        newest = next(checkpoints(run.folder.checkpoints), None)
        if newest is None or best is None or evaluations[-1]["step"] != step_of(newest):
            return
        if best != len(evaluations) - 1:
            return
        try:
            saving.keep_as_best(newest)
            # Removes the previous best.
            saving.retire(newest.parent, run.config.runtime.keep_checkpoints)
        except OSError as error:
            run.display.warn(f"{newest}: the best so far, but checkpoints/best cannot be made ({error.strerror})")

    def draw_if_due(self) -> None:
        """Draw the curves, unless that would take more than a hundredth of the time."""
        if self.run.world.is_main and time.monotonic() >= self._next_drawing:
            started = time.monotonic()
            draw_curves(self.run)
            ended = time.monotonic()
            self._next_drawing = ended + (ended - started) / _DRAWING_SHARE
