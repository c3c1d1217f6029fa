"""A table of many runs: the settings in which they differ, and what each one reached (`tools/runs.py`)."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pycls_fast.config.keys import flat
from pycls_fast.config.saved import saved_in_run
from pycls_fast.errors import UserError
from pycls_fast.exit_status import DONE, MISTAKE
from pycls_fast.ledger.report.statistics import mean_interval
from pycls_fast.ledger.report.text import duration
from pycls_fast.our_files import checkpoints
from pycls_fast.paths import user_path
from pycls_fast.train.best import best_evaluation
from pycls_fast.train.display import plain_table, wide_console
from pycls_fast.train.environment import environment_command
from pycls_fast.train.output_file import output_file, write_json, write_text
from pycls_fast.train.run_folder import RunFolder

OF_THE_PLACE = {"run_dir", "resume"}
"""Keys that say where a run is and how it started, not what it computes."""
NOT_SET = "-"


def texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Nested values as text by their dotted keys (`optim.lr`), in order; values other than strings as JSON."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in flat(values).items()}


# A folder with two of these is a run's: so damaged ones are found, and folders of other programs are not.
_FILES = {"config.yaml", "environment.json", "metrics.jsonl", "summary.json", "checkpoints"}
_NOT_SEARCHED = {"checkpoints", "tensorboard", "wandb"}


def find_runs(folders: Sequence[str]) -> list[Path]:
    """All run folders, nested ones included, each once and sorted by path.

    Raises:
        UserError: a folder does not exist, or none of them contains a run.
    """
    found, seen = list[Path](), set[Path]()
    for folder in folders:
        if not user_path(folder).is_dir():
            raise UserError(f"{folder}: no such folder; give run folders, or folders that contain some")
        for path, inside, files in os.walk(user_path(folder), followlinks=True):
            # Links may lead to a folder that was searched before, or form a loop.
            if (whole := Path(path).resolve()) in seen:
                inside.clear()
                continue
            seen.add(whole)
            is_run = len(_FILES & {*inside, *files}) > 1
            found += [Path(path)] if is_run else []
            inside[:] = [n for n in inside if not n.startswith(".") and not (is_run and n in _NOT_SEARCHED)]
    if not found:
        raise UserError(f"{', '.join(folders)}: no run folders found; give folders that training has written")
    return sorted(found)


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
        UserError: a file is missing or damaged.
    """
    try:
        values = saved_in_run(path).values
        records, summary = list(RunFolder(path).records()), _json(path / "summary.json")
        state = _state(path, summary, records)
        newest = next(checkpoints(path / "checkpoints"), None)
        saved = None if newest is None else _json(newest / "state.json")
        schedule = values.get("schedule", {})
        metric = str(schedule.get("best_metric", "top1")), float(schedule.get("best_tolerance", 0.0))
        numbers = _of_summary(summary) if state == "finished" else _so_far(saved, records, metric)
        if not all(value is None or isinstance(value, int | float) for value in numbers.values()):
            raise TypeError("text where a number should be")
        derived = _derived(saved)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        what = " ".join(str(error).split())
        raise UserError(f"{path}: a file of the run cannot be read ({type(error).__name__}: {what})") from error
    settings = {key: value for key, value in texts(values).items() if key not in OF_THE_PLACE}
    return SavedRun(path, settings, numbers, state, derived)


def _derived(saved: Mapping[str, Any] | None) -> frozenset[str]:
    """The switches that are not set in a checkpoint's configuration; `config.yaml` has their resolved values."""
    speed = {} if saved is None else saved.get("config", {}).get("speed", {})
    return frozenset(f"speed.{key}" for key, value in speed.items() if value is None)


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    except ValueError as error:
        raise UserError(f"{file}: cannot be read ({' '.join(str(error).split())})") from error


def _state(path: Path, summary: Mapping[str, Any] | None, records: Sequence[Mapping[str, Any]]) -> State:
    # A process removes its lock when it ends, unless it is killed.
    if (path / ".lock").exists():
        return "running or killed"
    if records and records[-1].get("event") == "stopped":
        return "stopped"
    # If a finished run was continued with more epochs, its summary is that of the first part.
    trained = max((record["step"] for record in records if record["kind"] == "train"), default=0)
    return "finished" if summary is not None and summary["steps"] >= trained else "failed"


def _of_summary(summary: Mapping[str, Any]) -> dict[str, float | None]:
    return {
        **_of_evaluations(summary["best"], summary["final"]),
        "images_per_second": summary["images_per_second"],
        "hours": summary["wall_seconds"] / 3600,
        "epoch": summary["epochs"],
    }


def _so_far(
    saved: Mapping[str, Any] | None, records: Sequence[Mapping[str, Any]], metric: tuple[str, float]
) -> dict[str, float | None]:
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


def _of_evaluations(best: Mapping[str, Any] | None, final: Mapping[str, Any] | None) -> dict[str, float | None]:
    return {
        "best_top1": None if best is None else best["top1"],
        "final_top1": None if final is None else final["top1"],
        "class_top1": None if best is None else best["class_top1"],
    }


SEED, FOLD = "seed", "data.fold"
# Keys that choose the kind of a group, which decides what other keys and values the group has.
_CHOOSE = ("name", "kind", "preset")


@dataclass(frozen=True)
class Row:
    """One run, or several that differ only in their seed or fold.

    Attributes:
        paths: of the run folders.
        settings: of these runs, without seed and fold.
        seeds, folds: one per path, as text.
        numbers: means over the runs, by `NUMBERS`; None if one of the runs has none.
        halves: half the width of the 95% interval of each mean (Student's t); None for a single run.
        state: of the run; always finished if there are several.
        derived: keys of settings that presets chose in each of the runs.
    """

    paths: tuple[Path, ...]
    settings: Mapping[str, str]
    seeds: tuple[str, ...]
    folds: tuple[str, ...]
    numbers: Mapping[str, float | None]
    halves: Mapping[str, float | None]
    state: State
    derived: frozenset[str]


def rows(runs: Sequence[SavedRun], sort: str) -> list[Row]:
    """The rows, largest number first, those without a number last.

    Args:
        runs: sorted by path.
        sort: one of `NUMBERS`.
    """
    made = [_row(together) for together in _joined(runs)]

    def place(row: Row) -> float:
        value = row.numbers[sort]
        return math.inf if value is None else -value

    return sorted(made, key=place)


def _joined(runs: Sequence[SavedRun]) -> list[list[SavedRun]]:
    """The runs of each row. A run that is not finished, or repeats a seed and fold, gets a row of its own."""
    groups: dict[tuple[tuple[str, str], ...], dict[tuple[str, str], SavedRun]] = {}
    alone = []
    for run in runs:
        group = groups.setdefault(tuple(_shared(run).items()), {})
        if run.state != "finished" or _repetition(run) in group:
            # Counting the same run twice would make the interval too narrow.
            alone.append([run])
        else:
            group[_repetition(run)] = run
    return [list(group.values()) for group in groups.values() if group] + alone


def _shared(run: SavedRun) -> dict[str, str]:
    return {key: run.settings[key] for key in sorted(run.settings) if key not in (SEED, FOLD)}


def _repetition(run: SavedRun) -> tuple[str, str]:
    """The seed and the fold."""
    return run.settings.get(SEED, NOT_SET), run.settings.get(FOLD, NOT_SET)


def _row(runs: Sequence[SavedRun]) -> Row:
    # Numbers as text: shorter ones are smaller.
    runs = sorted(runs, key=lambda run: [(len(text), text) for text in _repetition(run)])
    numbers: dict[str, float | None] = {}
    halves: dict[str, float | None] = {}
    for key in NUMBERS:
        known = [value for run in runs if (value := run.numbers[key]) is not None]
        numbers[key], halves[key] = mean_interval(known) if len(known) == len(runs) else (None, None)
    return Row(
        paths=tuple(run.path for run in runs),
        settings=_shared(runs[0]),
        seeds=tuple(_repetition(run)[0] for run in runs),
        folds=tuple(_repetition(run)[1] for run in runs),
        numbers=numbers,
        halves=halves,
        state=runs[0].state,
        derived=frozenset.intersection(*(run.derived for run in runs)),
    )


def differing_keys(table: Sequence[Row], order: Sequence[str]) -> list[str]:
    """Keys with more than one value in the table, in the given order; a missing key counts as a value."""
    return [key for key in order if len({row.settings.get(key, NOT_SET) for row in table}) > 1]


def telling(table: Sequence[Row], keys: Sequence[str]) -> list[str]:
    """The differing keys without those that the user did not choose.

    Left out are switches whose value a preset chose in every row, and keys that follow from another: of
    `optim=sgd,adamw`, `optim.name` but not `momentum`.

    A key follows from `config_name`, or from the key that chooses the kind of its group, if rows that agree in that key
    also agree in this one.
    """
    choices = [key for key in keys if key.rpartition(".")[2] in _CHOOSE]
    if "config_name" in keys:
        # An experiment decides all keys, these among them.
        choices = ["config_name", *(key for key in choices if not _follows(table, key, "config_name"))]

    def follows_from_another(key: str) -> bool:
        above = [choice for choice in choices if choice != key and key.startswith(choice.rpartition(".")[0])]
        return any(_follows(table, key, choice) for choice in above)

    derived = frozenset.intersection(*(row.derived for row in table)) if table else frozenset()
    return [key for key in keys if key not in derived and not follows_from_another(key)]


def _follows(table: Sequence[Row], key: str, choice: str) -> bool:
    """Whether rows with the same value of `choice` have the same value of `key`."""
    values: dict[str, str] = {}
    for row in table:
        value = row.settings.get(key, NOT_SET)
        if values.setdefault(row.settings.get(choice, NOT_SET), value) != value:
            return False
    return True


_HEADS = {
    "best_top1": "best\ntop-1, %",
    "final_top1": "final\ntop-1, %",
    "class_top1": "class\ntop-1, %",
    "images_per_second": "images/s",
    "hours": "time",
    "epoch": "epoch",
}


def list_runs(folders: Sequence[str], *, sort: str, output: str | None) -> int:
    """Find, read, print and write; returns the exit status.

    Args:
        folders: run folders, or folders that contain some.
        sort: one of `NUMBERS`.
        output: a .csv or .json file.

    Raises:
        UserError: a folder does not exist, there are no runs, or the file cannot be written.
    """
    paths = find_runs(folders)
    file = None if output is None else output_file(output)
    runs: list[SavedRun] = []
    left_out: dict[Path, str] = {}
    for path in paths:
        try:
            runs.append(read_run(path))
        except UserError as error:
            left_out[path] = error.lines[0]
    table = rows(runs, sort)
    keys = differing_keys(table, list(dict.fromkeys(key for run in runs for key in run.settings)))
    if table:
        _print(table, keys)
    for reason in left_out.values():
        print(f"left out: {reason}", file=sys.stderr)
    if file is not None and file.suffix.lower() == ".csv":
        write_text(file, _csv(_records(table, keys), keys))
    elif file is not None:
        lost = [{"run": str(path), "reason": reason} for path, reason in left_out.items()]
        about = {"kind": "runs", "time": time.time(), "command": environment_command()}
        write_json(file, {**about, "rows": _records(table, keys), "left_out": lost})
    return DONE if table else MISTAKE


def _print(table: Sequence[Row], keys: Sequence[str]) -> None:
    shown = telling(table, keys)
    numbers = [key for key in NUMBERS if any(row.numbers[key] is not None for row in table)]
    folder = _common([path for row in table for path in row.paths])
    columns = _columns(table, shown, numbers, folder)
    console = wide_console()
    console.print(f"runs in {folder}", markup=False)
    cells = zip(*(column for _, column in columns), strict=True)
    console.print(plain_table([head for head, _ in columns], cells, right=[_HEADS[key] for key in numbers]))
    hidden = len(keys) - len(shown)
    if hidden:
        differ = "other settings differ" if hidden > 1 else "other setting differs"
        console.print(f"{hidden} {differ} along with those shown; output=runs.csv has them all", markup=False)
    if any(row.halves["best_top1"] is not None for row in table):
        console.print(f"±: half of the 95% interval of the mean {_over(table)}", markup=False)


def _columns(
    table: Sequence[Row], shown: Sequence[str], numbers: Sequence[str], folder: Path
) -> list[tuple[str, list[str]]]:
    """Heads and cells: the settings `shown`, seeds and folds if they differ, the `numbers`, state and path."""
    columns = [(_broken(key), [_short(row.settings.get(key, NOT_SET)) for row in table]) for key in shown]
    for head, repeated in ((SEED, [row.seeds for row in table]), (FOLD, [row.folds for row in table])):
        if len({text for texts in repeated for text in texts}) > 1:
            columns.append((_broken(head), [", ".join(dict.fromkeys(texts)) for texts in repeated]))
    columns += [(_HEADS[key], [_number(row, key) for row in table]) for key in numbers]
    return [*columns, ("state", [row.state for row in table]), ("run", [_name(row, folder) for row in table])]


def _over(table: Sequence[Row]) -> str:
    """Over what the rows are means, in words."""
    seeds = any(len(set(row.seeds)) > 1 for row in table)
    folds = any(len(set(row.folds)) > 1 for row in table)
    over = " or ".join(name for name, there in (("the seeds", seeds), ("the folds", folds)) if there)
    return f"over {over}" + (", which share training images: a rough guide" if folds else "")


def _broken(key: str) -> str:
    """A key on two lines, which keeps its column narrow."""
    group, dot, name = key.rpartition(".")
    return f"{group}{dot}\n{name}" if dot else key


def _short(value: str) -> str:
    return re.sub(r"\d+\.\d{7,}", lambda found: f"{float(found[0]):.6g}", value)


def _number(row: Row, key: str) -> str:
    value, half = row.numbers[key], row.halves[key]
    if value is None:
        return "-"
    if key == "hours":
        return duration(3600 * value)
    if key == "images_per_second":
        return f"{value:,.0f}"
    if key == "epoch":
        return f"{value:.1f}"
    return f"{value:.2f}" + ("" if half is None else f" ± {half:.2f}")


def _common(paths: Sequence[Path]) -> Path:
    """The deepest folder that contains all of them."""
    if any(path.is_absolute() for path in paths):
        # The others may be relative to the working folder.
        paths = [path.absolute() for path in paths]
    return Path(os.path.commonpath([path.parent for path in paths]))


def _name(row: Row, folder: Path) -> str:
    """The path of the first run below `folder`, and how many more share its row."""
    path = row.paths[0].absolute() if folder.is_absolute() else row.paths[0]
    more = len(row.paths) - 1
    return f"{path.relative_to(folder)}" + (f" +{more}" if more else "")


def _records(table: Sequence[Row], keys: Sequence[str]) -> list[dict[str, Any]]:
    """Everything that a file says of each row."""
    return [
        {
            "runs": [str(path) for path in row.paths],
            "state": row.state,
            "settings": {key: row.settings.get(key) for key in keys},
            "seeds": list(row.seeds),
            "folds": list(row.folds),
            "count": len(row.paths),
            **{key: row.numbers[key] for key in NUMBERS},
            **{f"{key}_half": row.halves[key] for key in NUMBERS},
        }
        for row in table
    ]


def _csv(records: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    numbers = [name for key in NUMBERS for name in (key, f"{key}_half")]
    writer.writerow(["runs", "state", *keys, SEED, FOLD, "count", *numbers])
    for row in records:
        runs, seeds, folds = (";".join(row[key]) for key in ("runs", "seeds", "folds"))
        settings, values = (["" if v is None else v for v in row["settings"].values()], [row[n] for n in numbers])
        writer.writerow([runs, row["state"], *settings, seeds, folds, row["count"], *values])
    return text.getvalue()
