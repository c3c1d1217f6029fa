"""Reads one run for the table: its settings, its numbers so far, and how it ended."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pycls_fast.config.saved import saved_in_run, validate_saved
from pycls_fast.errors import UserError
from pycls_fast.ledger.compare.settings import OF_THE_PLACE, texts
from pycls_fast.our_files import checkpoints
from pycls_fast.train.best import best_evaluation
from pycls_fast.train.run_folder import RunFolder

Record = Mapping[str, Any]
State = Literal["finished", "stopped", "failed", "running or killed"]

NUMBERS = ("best_top1", "final_top1", "class_top1", "images_per_second", "hours", "epoch")
"""Keys of `SavedRun.numbers`. Accuracies are in percent; `class_top1` (mean over classes) is of the best evaluation."""


@dataclass(frozen=True)
class SavedRun:
    """A run on disk, finished or not.

    Attributes:
        path: of its folder.
        settings: values of all configuration keys as text, except `run_dir` and `resume`.
        numbers: by `NUMBERS`; None if not known yet. Hours of an unfinished run are up to its newest checkpoint.
        state: how it ended.
        derived: those of the settings that a preset chose, not the user; empty if that is not known.
    """

    path: Path
    settings: Mapping[str, str]
    numbers: Mapping[str, float | None]
    state: State
    derived: frozenset[str]


def read_run(path: Path) -> SavedRun:
    """Read a run folder.

    Raises:
        UserError: the folder is empty, or a file is missing or damaged.
    """
    try:
        if not any(path.iterdir()):
            raise UserError(f"{path}: empty; the run has just started, or ended before its first step")
        values = _settings(path)
        records, summary = list(RunFolder(path).records()), _json(path / "summary.json")
        state = _state(path, summary, records)
        newest = next(checkpoints(path / "checkpoints"), None)
        saved = None if newest is None else _json(newest / "state.json")
        numbers = _of_summary(summary) if state == "finished" else _so_far(saved, records, _metric(values))
        if not all(value is None or isinstance(value, int | float) for value in numbers.values()):
            raise TypeError("text where a number should be")
        derived = _derived(saved)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        what = " ".join(str(error).split())
        raise UserError(f"{path}: a file of the run cannot be read ({type(error).__name__}: {what})") from error
    settings = {key: value for key, value in texts(values).items() if key not in OF_THE_PLACE}
    return SavedRun(path, settings, numbers, state, derived)


def _settings(path: Path) -> dict[str, Any]:
    saved = saved_in_run(path)
    try:
        # Adds the defaults of keys that are newer than the run.
        return validate_saved(saved.values, str(saved.file)).model_dump(mode="json")
    except UserError:
        # Written by a version with other keys: taken as it is.
        return dict(saved.values)


def _derived(saved: Record | None) -> frozenset[str]:
    """The switches that are not set in a checkpoint's configuration; `config.yaml` has their resolved values."""
    speed = {} if saved is None else saved.get("config", {}).get("speed", {})
    return frozenset(f"speed.{key}" for key, value in speed.items() if value is None)


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    except ValueError as error:
        raise UserError(f"{file}: cannot be read ({' '.join(str(error).split())})") from error


def _metric(values: Record) -> tuple[str, float]:
    """Metric and tolerance of the best evaluation."""
    schedule = values.get("schedule", {})
    return str(schedule.get("best_metric", "top1")), float(schedule.get("best_tolerance", 0.0))


def _state(path: Path, summary: Record | None, records: Sequence[Record]) -> State:
    # A process removes its lock when it ends, unless it is killed.
    if (path / ".lock").exists():
        return "running or killed"
    if records and records[-1].get("event") == "stopped":
        return "stopped"
    # If a finished run was continued with more epochs, its summary is that of the first part.
    trained = max((record["step"] for record in records if record["kind"] == "train"), default=0)
    return "finished" if summary is not None and summary["steps"] >= trained else "failed"


def _of_summary(summary: Record) -> dict[str, float | None]:
    return {
        **_of_evaluations(summary["best"], summary["final"]),
        "images_per_second": summary["images_per_second"],
        "hours": summary["wall_seconds"] / 3600,
        "epoch": summary["epochs"],
    }


def _so_far(saved: Record | None, records: Sequence[Record], metric: tuple[str, float]) -> dict[str, float | None]:
    taken = [record for record in records if record["kind"] == "eval" and record["split"] == "val"]
    # If there is a moving average, only its evaluations count.
    weights = "ema" if any(record["weights"] == "ema" for record in taken) else "model"
    evaluations = [record for record in taken if record["weights"] == weights]
    best = best_evaluation(evaluations, *metric)
    rates = [record["images_per_second"] for record in records if record["kind"] == "train"]
    return {
        **_of_evaluations(None if best is None else evaluations[best], evaluations[-1] if evaluations else None),
        # As in the summary: the first interval is warm-up.
        "images_per_second": statistics.median(rates[1:] or rates) if rates else None,
        "hours": None if saved is None else saved["seconds"] / 3600,
        "epoch": records[-1]["epoch"] if records else 0.0,
    }


def _of_evaluations(best: Record | None, final: Record | None) -> dict[str, float | None]:
    return {
        "best_top1": None if best is None else best["top1"],
        "final_top1": None if final is None else final["top1"],
        "class_top1": None if best is None else best["class_top1"],
    }
