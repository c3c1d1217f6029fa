"""The end of a run: `summary.json`, the pictures, `best.safetensors`, `index.html`, and the last lines printed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pycls_fast.errors import UserError
from pycls_fast.files import BEST
from pycls_fast.train.by_class import confusion
from pycls_fast.train.display import epochs, scores_text
from pycls_fast.train.environment import device_name, versions
from pycls_fast.train.evaluate import Predictions
from pycls_fast.train.folder import writing
from pycls_fast.train.observers import Observers
from pycls_fast.train.pictures import draw_confusion, draw_curves, write_page
from pycls_fast.train.run_state import Run
from pycls_fast.train.saved_weights import open_weights, write_weights
from pycls_fast.train.validation import primary_and_best


def summarise(run: Run, observers: Observers, memory: int, *, stopped: tuple[str, int] | None = None) -> float | None:
    """Write `summary.json`, the pictures, `best.safetensors` and `index.html`; print the result of a run that is done
    and give it to the trackers. On the main rank.

    `memory` is the peak over the ranks, in bytes; `stopped` the signal that ended the run, and the step that is saved.
    Returns what a sweeper minimises; see `objective`.
    """
    values = summary_values(run, memory, stopped)
    if not _is_complete(run):
        _draw(run)
        _write_best_weights(run, values["best"])
        write_page(run, values)
        # Last: it says that everything is there.
        run.folder.write_json("summary.json", values)
        if stopped is None:
            observers.summarise(values)
    best, metric = values["best"], run.config.schedule.best_metric
    if best is not None and stopped is None:
        of_best = f"best, by {metric}: {scores_text(best)} at epoch {epochs(best['epoch'])}"
        run.display.note(f"done: {scores_text(values['final'])}  ({of_best})")
    if values["damaged_images"]:
        run.display.note(f"{values['damaged_images']:,} damaged images were skipped; {run.folder.metrics} names them")
    run.display.note(f"run folder: {run.folder.path}")
    return None if best is None else objective(best, metric)


def _draw(run: Run) -> None:
    """Draw the curves, and the confusion matrix of the latest evaluation."""
    draw_curves(run)
    matrix = run.folder.path / "confusion.png"
    if run.folder.predictions.is_file():
        counts = confusion(Predictions.load(run.folder.predictions), len(run.classes))
        with writing(matrix):
            draw_confusion(counts, run.classes, matrix, run.config.config_name)


def _write_best_weights(run: Run, best: Mapping[str, Any] | None) -> None:
    """Write `best.safetensors`, unless nothing was worth saving; say so if they are not those of the `best` record."""
    checkpoint, file = run.folder.checkpoints / BEST, run.folder.path / f"{BEST}.safetensors"
    if not checkpoint.exists():
        # One that is there is of steps that a run which went back has abandoned.
        file.unlink(missing_ok=True)
        return
    try:
        weights = open_weights(checkpoint.resolve())
        write_weights(file, weights, weights.read())
        if best is not None and best["step"] != weights.step:
            # Another `schedule.best_metric` than before, or a checkpoint that could not be written.
            why = f"no checkpoint is left of step {best['step']:,}, the best by {run.config.schedule.best_metric}"
            run.display.warn(f"{file.name}: of step {weights.step:,}; {why}")
    except UserError as error:
        run.display.warn(str(error))


def _is_complete(run: Run) -> bool:
    """Whether an earlier process has trained the last step and written everything."""
    summary = run.folder.summary
    done = run.finished and run.folder.finished
    return done and summary.get("steps") == run.total_steps and summary.get("final") is not None


def summary_values(run: Run, memory: int, stopped: tuple[str, int] | None = None) -> dict[str, Any]:
    """The values of `summary.json`; see `summarise`."""
    primary, best = primary_and_best(run)
    trained = list(run.folder.records("train"))
    if run.start_step == run.total_steps:
        # Nothing was left to train.
        memory = max((record["memory_peak_bytes"] for record in trained), default=memory)
    signal, steps = (None, run.total_steps) if stopped is None else stopped
    return {
        "config_name": run.config.config_name,
        "seed": run.config.seed,
        "stopped": signal,
        "steps": steps,
        "epochs": run.epoch(steps),
        "final": primary[-1] if primary else None,
        "best": None if best is None else primary[best],
        "images_per_second": _median(trained, "images_per_second"),
        "step_seconds_p50": _median(trained, "step_seconds"),
        "memory_peak_bytes": memory,
        "parameters": run.complexity.parameters,
        "forward_flops_per_image": run.complexity.forward_flops,
        "damaged_images": len(run.folder.damaged_images()),
        "wall_seconds": run.seconds(),
        "world_size": run.world.size,
        "device": device_name(run.world.device),
        "versions": versions(),
    }


def _median(trained: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """That of the intervals, without the first one (warm-up) if there are others; None without any."""
    values = [record[name] for record in trained]
    return statistics.median(values[1:] or values) if values else None


def objective(best: Mapping[str, Any], metric: str) -> float | None:
    """What a sweeper minimises: 100 - the best accuracy in percent, or the lowest loss; None if it is null."""
    value = best.get(metric)
    return value if value is None or metric == "loss" else 100 - value
