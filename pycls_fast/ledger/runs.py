"""A table of many runs: the settings in which they differ, and what each one reached (`pycls-fast runs`)."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pycls_fast.config.keys import flat
from pycls_fast.config.saved import saved_in_run
from pycls_fast.errors import DONE, MISTAKE, UserError, cell, print_lines, refuse, refusing
from pycls_fast.files import checkpoints, user_path
from pycls_fast.ledger.report.statistics import mean_interval
from pycls_fast.reading import SavedProgress, SavedSummary, check, read_json
from pycls_fast.train.display import duration, plain_table, wide_console
from pycls_fast.train.environment import environment_command
from pycls_fast.train.folder import RunFolder, output_file, write_json, write_text
from pycls_fast.train.validation import best_evaluation

PLACE_KEYS = {"run_dir", "resume"}
"""Keys that say where a run is and how it started, not what it computes."""
NOT_SET = "-"
SEED, FOLD = "seed", "data.fold"

Values = Mapping[str, Any]
State = Literal["finished", "stopped", "failed", "running or killed"]

# Key -> its column, and its text. Accuracies are in percent; `class_top1` and `map` are means over classes, of the best
# one.
_COLUMNS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "best_top1": ("best\ntop-1, %", "{:.2f}".format),
    "final_top1": ("final\ntop-1, %", "{:.2f}".format),
    "class_top1": ("balanced\naccuracy, %", "{:.2f}".format),
    "map": ("mAP, %", "{:.2f}".format),
    "images_per_second": ("images/s", "{:,.0f}".format),
    "hours": ("time", lambda hours: duration(3600 * hours)),
    "epoch": ("epoch", "{:.1f}".format),
}
# A folder with two of these is a run's: so damaged ones are found, and folders of other programs are not.
_FILES = {"config.yaml", "environment.json", "metrics.jsonl", "summary.json", "checkpoints"}
_NOT_SEARCHED = {"checkpoints", "tensorboard", "wandb"}
# Keys that choose the kind of a group, which decides what other keys and values the group has.
_CHOOSE = ("name", "kind", "preset")


def list_runs(folders: Sequence[str], *, sort: str, output: str | None) -> int:
    """Find runs in folders, print them by a key of the numbers, write a .csv or .json file; returns the exit status. A
    `UserError` if a folder does not exist, there are no runs, or the file cannot be written."""
    paths = find_runs(folders)
    file = None if output is None else output_file(output)
    runs, left_out = list[SavedRun](), dict[Path, str]()
    for path in paths:
        try:
            # The records of many runs need not fit into memory.
            runs.append(replace(read_run(path), records=(), evaluations=()))
        except UserError as error:
            left_out[path] = error.lines[0]
    table = rows(runs, sort)
    keys = differing_keys(table)
    if table:
        _print(table, keys)
    print_lines("left out", left_out.values(), whole=True)
    records = [row.record(keys) for row in table]
    if file is not None and file.suffix.lower() == ".csv":
        write_text(file, _csv(records, keys))
    elif file is not None:
        lost = [{"run": str(path), "reason": reason} for path, reason in left_out.items()]
        about = {"kind": "runs", "time": time.time(), "command": environment_command()}
        write_json(file, {**about, "rows": records, "left_out": lost})
    return DONE if table else MISTAKE


def find_runs(folders: Sequence[str]) -> list[Path]:
    """All run folders, nested ones included, each once and sorted by path. A `UserError` if a folder does not exist, or
    none of them contains a run."""
    found, seen, use = list[Path](), set[Path](), "give folders that training has written"
    refuse(f"{folder}: no such folder; {use}" for folder in folders if not user_path(folder).is_dir())
    for folder in folders:
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
        raise UserError(f"{', '.join(folders)}: no run folders found; {use}")
    return sorted(found)


@dataclass(frozen=True)
class SavedRun:
    """A run on disk, finished or not.

    Attributes:
        records: the lines of `metrics.jsonl`.
        evaluations: those that count: of the average of the weights if there is one.
        summary: only of a finished run.
        newest: the plain values of its newest checkpoint; empty if there is none.
        numbers: accuracies in percent, images/s, hours (of an unfinished run up to its newest checkpoint), epochs; None
            if not known yet.
    """

    path: Path
    config: Values
    state: State
    records: Sequence[Values]
    evaluations: Sequence[Values]
    summary: Values | None
    newest: Values
    numbers: Mapping[str, float | None]

    @cached_property
    def settings(self) -> dict[str, str]:
        """Values of all configuration keys as text, except `run_dir` and `resume`."""
        return {key: value for key, value in texts(self.config).items() if key not in PLACE_KEYS}

    @property
    def repetition(self) -> tuple[str, str]:
        """The seed and the fold."""
        return self.settings.get(SEED, NOT_SET), self.settings.get(FOLD, NOT_SET)


def read_run(path: Path) -> SavedRun:
    """Read a run folder. A `UserError` if a file is missing or damaged."""
    kinds = (OSError, ValueError, LookupError, TypeError, AttributeError)
    with refusing(f"{path}: a file of the run cannot be read", *kinds):
        config = saved_in_run(path).values
        records, summary = list(RunFolder(path).records()), read_values(path / "summary.json")
        state = _state(path, summary, records)
        checkpoint = next(checkpoints(path / "checkpoints"), None)
        newest = (read_values(checkpoint / "state.json") if checkpoint is not None else None) or {}
        check(SavedProgress, newest)
        summary = summary if state == "finished" else None
        if summary is not None:
            check(SavedSummary, summary)
        taken = [record for record in records if record["kind"] == "eval" and record["split"] == "val"]
        weights = "ema" if any(record["weights"] == "ema" for record in taken) else "model"
        evaluations = [record for record in taken if record["weights"] == weights]
        numbers = _numbers(summary or _summary_so_far(config, records, evaluations, newest))
        if not all(value is None or isinstance(value, int | float) for value in numbers.values()):
            raise TypeError("text where a number should be")
    return SavedRun(path, config, state, records, evaluations, summary, newest, numbers)


def texts(values: Values) -> dict[str, str]:
    """Nested values as text by their dotted keys (`optim.lr`), in order; values other than strings as JSON."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in flat(values).items()}


def read_values(file: Path) -> dict[str, Any] | None:
    """The object of a JSON file; None if it does not exist. A `UserError` if it cannot be read, or holds something
    else."""
    with refusing(f"{file}: cannot be read", ValueError, TypeError):
        return dict(read_json(file)) if file.is_file() else None


def _state(path: Path, summary: Values | None, records: Sequence[Values]) -> State:
    # A process removes its lock when it ends, unless it is killed.
    if (path / ".lock").exists():
        return "running or killed"
    if records and records[-1].get("event") == "stopped":
        return "stopped"
    # If a finished run was continued with more epochs, its summary is that of the first part.
    trained = max((record["step"] for record in records if record["kind"] == "train"), default=0)
    whole = summary is not None and not summary.get("stopped") and summary["steps"] >= trained
    return "finished" if whole else "failed"


def _summary_so_far(
    config: Values, records: Sequence[Values], evaluations: Sequence[Values], newest: Values
) -> dict[str, Any]:
    """What the summary would say if an unfinished run had ended with its newest checkpoint."""
    schedule = config.get("schedule", {})
    metric = str(schedule.get("best_metric", "top1")), float(schedule.get("best_tolerance", 0.0))
    best = best_evaluation(evaluations, *metric)
    rates = [record["images_per_second"] for record in records if record["kind"] == "train"]
    return {
        "best": None if best is None else evaluations[best],
        "final": evaluations[-1] if evaluations else None,
        # The first interval is warm-up.
        "images_per_second": statistics.median(rates[1:] or rates) if rates else None,
        "wall_seconds": newest["seconds"] if newest else None,
        "epochs": records[-1]["epoch"] if records else 0.0,
    }


def _numbers(summary: Values) -> dict[str, float | None]:
    best, seconds = summary["best"] or {}, summary["wall_seconds"]
    return {
        "best_top1": best.get("top1"),
        "final_top1": (summary["final"] or {}).get("top1"),
        "class_top1": best.get("class_top1"),
        "map": best.get("map"),
        "images_per_second": summary["images_per_second"],
        "hours": None if seconds is None else seconds / 3600,
        "epoch": summary["epochs"],
    }


@dataclass(frozen=True)
class Row:
    """One run, or several that differ only in their seed or fold; the means of their numbers (None if one of them lacks
    it), and half the width of each mean's 95% interval (Student's t; None for a single run)."""

    runs: Sequence[SavedRun]
    numbers: Mapping[str, float | None]
    half_widths: Mapping[str, float | None]

    @property
    def settings(self) -> dict[str, str]:
        """Those of these runs, without seed and fold."""
        return {key: value for key, value in self.runs[0].settings.items() if key not in (SEED, FOLD)}

    @property
    def repeated(self) -> dict[str, list[str]]:
        """The seeds and the folds."""
        return {key: [run.settings.get(key, NOT_SET) for run in self.runs] for key in (SEED, FOLD)}

    def record(self, keys: Sequence[str]) -> dict[str, Any]:
        return {
            "runs": [str(run.path) for run in self.runs],
            # Of several runs always finished.
            "state": self.runs[0].state,
            "settings": {key: self.settings.get(key) for key in keys},
            "seeds": self.repeated[SEED],
            "folds": self.repeated[FOLD],
            "count": len(self.runs),
            **self.numbers,
            **{f"{key}_half": half for key, half in self.half_widths.items()},
        }


def rows(runs: Sequence[SavedRun], sort: str) -> list[Row]:
    """The rows, largest number first, those without a number last.

    A run that is not finished, or repeats a seed and fold, gets a row of its own: counting the same run twice would
    make the interval too narrow.
    """
    groups: dict[tuple[object, ...], list[SavedRun]] = {}
    for number, run in enumerate(runs):
        shared = tuple(sorted(item for item in run.settings.items() if item[0] not in (SEED, FOLD)))
        group = groups.setdefault(shared, [])
        if run.state == "finished" and run.repetition not in {other.repetition for other in group}:
            group.append(run)
        else:
            # A key that no other run has.
            groups[number,] = [run]
    made = []
    for group in filter(None, groups.values()):
        # Numbers as text: shorter ones are smaller.
        runs = sorted(group, key=lambda run: [(len(text), text) for text in run.repetition])
        numbers, half_widths = dict[str, float | None](), dict[str, float | None]()
        for key in _COLUMNS:
            known = [found for run in runs if (found := run.numbers[key]) is not None]
            numbers[key], half_widths[key] = mean_interval(known) if len(known) == len(runs) else (None, None)
        made.append(Row(runs, numbers, half_widths))
    return sorted(made, key=lambda row: -value if (value := row.numbers[sort]) is not None else float("inf"))


def differing_keys(table: Sequence[Row]) -> list[str]:
    """Keys with more than one value in the table; a missing key counts as a value."""
    keys = dict.fromkeys(key for row in table for key in row.settings)
    return [key for key in keys if len({row.settings.get(key, NOT_SET) for row in table}) > 1]


def chosen_keys(table: Sequence[Row], keys: Sequence[str]) -> list[str]:
    """Those of the differing keys that the user chose, without the ones that follow from another: of `optim=sgd,adamw`
    `optim.name` but not `momentum`.

    A key follows from `config_name`, or from the key that chooses the kind of its group, if rows that agree in that key
    also agree in this one.
    """

    def follows(key: str, choice: str) -> bool:
        values = {(row.settings.get(choice), row.settings.get(key)) for row in table}
        return len(values) == len({value for value, _ in values})

    choices = [key for key in keys if key.rpartition(".")[2] in _CHOOSE]
    if "config_name" in keys:
        # An experiment decides all keys, these among them.
        choices = ["config_name", *(key for key in choices if not follows(key, "config_name"))]

    def follows_from_another(key: str) -> bool:
        above = [choice for choice in choices if choice != key and key.startswith(choice.rpartition(".")[0])]
        return any(follows(key, choice) for choice in above)

    return [key for key in keys if not follows_from_another(key)]


def _print(table: Sequence[Row], keys: Sequence[str]) -> None:
    shown = chosen_keys(table, keys)
    numbers = [key for key in _COLUMNS if any(row.numbers[key] is not None for row in table)]
    repeated = [key for key in (SEED, FOLD) if len({value for row in table for value in row.repeated[key]}) > 1]
    folder = Path(os.path.commonpath([run.path.absolute().parent for row in table for run in row.runs]))
    lines = []
    for row in table:
        texts = {key: shortened(row.settings.get(key, NOT_SET)) for key in shown}
        texts |= {key: ", ".join(dict.fromkeys(row.repeated[key])) for key in repeated}
        # A key on two lines keeps its column narrow.
        cells = {re.sub(r"\.(?=[^.]*$)", ".\n", key): text for key, text in texts.items()}
        cells |= {_COLUMNS[key][0]: _number(row, key) for key in numbers}
        # The first of a row, and how many more share it.
        first, more = row.runs[0], f" +{len(row.runs) - 1}" if len(row.runs) > 1 else ""
        lines.append({**cells, "state": first.state, "run": f"{first.path.absolute().relative_to(folder)}{more}"})
    console = wide_console()
    console.tell(f"runs in {folder}")
    console.print(plain_table(lines, right=[_COLUMNS[key][0] for key in numbers]))
    hidden = len(keys) - len(shown)
    if hidden:
        console.tell(f"{hidden} more settings differ along with those shown; output=runs.csv has them")
    if any(row.half_widths["best_top1"] is not None for row in table):
        # Folds share training images: their interval is a rough guide.
        over = [key.rpartition(".")[2] for key in repeated if any(len(set(row.repeated[key])) > 1 for row in table)]
        console.tell(f"±: half of the 95% interval of the mean over the {'s and the '.join(over)}s")


def shortened(text: str) -> str:
    return re.sub(r"\d+\.\d{7,}", lambda found: f"{float(found[0]):.6g}", text)


def _number(row: Row, key: str) -> str:
    value, half = row.numbers[key], row.half_widths[key]
    if value is None:
        return "-"
    return _COLUMNS[key][1](value) + (f" ± {half:.2f}" if half is not None and key.endswith(("top1", "map")) else "")


def _csv(records: Sequence[Values], keys: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    numbers = [name for key in _COLUMNS for name in (key, f"{key}_half")]
    header = ["runs", "state", *keys, SEED, FOLD, "count", *numbers]
    writer.writerow(map(cell, header))
    for row in records:
        lists = {name: ";".join(row[key]) for name, key in (("runs", "runs"), (SEED, "seeds"), (FOLD, "folds"))}
        values = {**row, **row["settings"], **lists}
        writer.writerow(cell(values[name]) for name in header)
    return text.getvalue()
