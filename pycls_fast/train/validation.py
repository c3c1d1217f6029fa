"""Validation during a run: when it is due, the files it writes, early stopping."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pycls_fast import build
from pycls_fast.train import checkpoint
from pycls_fast.train.best import best_of, early_stop, primary_records
from pycls_fast.train.by_class import class_scores, confusion
from pycls_fast.train.confusion_picture import draw_confusion
from pycls_fast.train.curves import draw_curves
from pycls_fast.train.display import epochs
from pycls_fast.train.evaluation import Evaluation, Predictions, evaluate, with_progress
from pycls_fast.train.run import Run
from pycls_fast.train.run_folder import writing
from pycls_fast.train.trackers import Board

# Part of the time between two drawings of the curves that drawing may take: all ranks wait for it.
_DRAWING_SHARE = 0.01


class Evaluations:
    """The evaluations of the validation split between training steps.

    Args:
        run: the run to evaluate.
        board: receives the numbers.
        on_batch: called after each batch on every rank; may raise to stop.

    Attributes:
        finite: whether the latest one had finite losses; the same on all ranks.
    """

    def __init__(self, run: Run, board: Board, on_batch: Callable[[], None]) -> None:
        self.run = run
        self.board = board
        self.on_batch = on_batch
        self.finite = False
        self._next_drawing = -math.inf

    def due(self, done: int) -> bool:
        """Whether an evaluation is due after this many steps."""
        runtime = self.run.config.runtime
        every = runtime.eval_every_steps or self.run.steps_per_epoch * runtime.eval_every_epochs
        if done == 0:
            return self.run.config.begins_with_probe
        return done % every == 0 or done == self.run.total_steps

    def has(self, step: int) -> bool:
        """Whether the records of this step's evaluation are complete; the same on all ranks."""
        return self.run.world.from_main(any(r["step"] == step for r in primary_records(self.run, self.records())))

    def forget(self, step: int) -> None:
        """Drop the records of an interrupted evaluation (the model was scored, its average was not)."""
        if self.run.world.is_main and any(r["step"] == step for r in self.records()):
            self.run.folder.forget_evaluation(step)

    def records(self) -> list[dict[str, Any]]:
        """The records of all evaluations so far; on the main rank."""
        return list(self.run.folder.records("eval"))

    def stop_early(self, done: int) -> bool:
        """Whether early stopping ends the run here (then it is announced); the same answer on all ranks."""
        run, schedule = self.run, self.run.config.schedule
        if schedule.early_stopping_evals is None:
            return False
        found = run.world.from_main(early_stop(run, self.records()) if run.world.is_main else None)
        if found is None or done >= run.total_steps:
            return False
        if run.world.is_main:
            best, waited = found
            metric, at = schedule.best_metric, best["epoch"]
            run.folder.add_record("event", done, run.epoch(done), event="stopped early", metric=metric, best_epoch=at)
            run.display.note(f"stopped early: {metric} was best at epoch {epochs(at)}, {waited} evaluations ago")
        return True

    def take(self, done: int) -> dict[str, str]:
        """Evaluate the model and its average, if there is one; returns the damaged images with the reasons."""
        run = self.run
        run.world.at(f"evaluating after step {done}")
        self.finite = True
        damaged = self._take(done, "model")
        if run.step.ema is not None:
            with run.step.ema.swapped_in():
                damaged |= self._take(done, "ema")
        return damaged

    def _take(self, done: int, weights: str) -> dict[str, str]:
        run = self.run
        source = run.sources["val"]
        run.display.begin_evaluation("val", len(source))
        batches = build.eval_batches(run.config, source, run.world, run.switches)
        result = evaluate(
            run.step.wrapped,
            with_progress(batches, f"evaluating after step {done}", run.world, run.display, self.on_batch),
            run.step.prepare,
            run.step.autocast,
            run.world,
            build.criterion(run.config),
        )
        self.finite = self.finite and math.isfinite(result.loss or 0.0)
        if run.world.is_main:
            self._write_down(done, weights, result)
        return dict(result.damaged)

    def _write_down(self, done: int, weights: str, result: Evaluation) -> None:
        run = self.run
        # The average is evaluated last, so the file ends up with its predictions if there is one.
        with writing(run.folder.predictions):
            result.predictions.save(run.folder.predictions)
        by_class = class_scores(result.predictions, run.classes)
        run.folder.write_json("classes.json", by_class)
        numbers = {**result.record(), "class_top1": by_class["class_top1"]}
        record = run.folder.add_record("eval", done, run.epoch(done), split="val", weights=weights, **numbers)
        run.display.end_evaluation(record)
        self.board.add(record)

    def keep_if_best(self) -> None:
        """Link the newest checkpoint as best if its evaluation is the latest and the best; on the main rank."""
        run = self.run
        evaluations = primary_records(run, self.records())
        newest = next(checkpoint.checkpoints(run.folder.checkpoints), None)
        if newest is None or not evaluations or evaluations[-1]["step"] != checkpoint.step_of(newest):
            return
        if best_of(run, evaluations) == len(evaluations) - 1:
            self._keep_as_best(newest)

    def _keep_as_best(self, newest: Path) -> None:
        try:
            checkpoint.keep_as_best(newest)
            # Removes the previous best.
            checkpoint.retire(newest.parent, self.run.config.runtime.keep_checkpoints)
        except OSError as error:
            self.run.display.warn(f"{newest}: the best so far, but checkpoints/best cannot be made ({error.strerror})")

    def draw_if_due(self) -> None:
        """Draw the curves, unless that would take more than a hundredth of the time; on the main rank."""
        if time.monotonic() >= self._next_drawing:
            started = time.monotonic()
            self.draw()
            ended = time.monotonic()
            self._next_drawing = ended + (ended - started) / _DRAWING_SHARE

    def draw(self, *, whole: bool = False) -> None:
        """Draw the curves and, if `whole`, the latest confusion matrix into the run folder; on the main rank."""
        run = self.run
        curves, matrix = run.folder.path / "curves.png", run.folder.path / "confusion.png"
        with writing(curves):
            draw_curves(run.folder.records(), curves, run.config.config_name)
        if whole and run.folder.predictions.is_file():
            counts = confusion(Predictions.load(run.folder.predictions), len(run.classes))
            with writing(matrix):
                draw_confusion(counts, run.classes, matrix, run.config.config_name)
