"""Prints the table of many runs, and writes it as CSV or JSON."""

from __future__ import annotations

import csv
import io
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pycls_fast.errors import UserError
from pycls_fast.exit_status import DONE, MISTAKE
from pycls_fast.ledger.compare.settings import NOT_SET
from pycls_fast.ledger.overview.folders import find_runs
from pycls_fast.ledger.overview.read import NUMBERS, SavedRun, read_run
from pycls_fast.ledger.overview.rows import FOLD, SEED, Row, differing_keys, rows, telling
from pycls_fast.ledger.table import duration
from pycls_fast.train.display import plain_table, wide_console
from pycls_fast.train.environment import environment_command
from pycls_fast.train.output_file import output_file, write_json, write_text

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
        sort: one of `read.NUMBERS`.
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
        write_text(file, _csv(table, keys))
    elif file is not None:
        write_json(file, _json(table, keys, left_out))
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


def _csv(table: Sequence[Row], keys: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [name for key in NUMBERS for name in (key, f"{key}_half")]
    writer.writerow(["runs", "state", *keys, SEED, FOLD, "count", *names])
    for row in table:
        settings = [row.settings.get(key, "") for key in keys]
        numbers = [value for key in NUMBERS for value in (row.numbers[key], row.halves[key])]
        paths = ";".join(map(str, row.paths))
        repeated = (";".join(row.seeds), ";".join(row.folds))
        writer.writerow([paths, row.state, *settings, *repeated, len(row.paths), *numbers])
    return text.getvalue()


def _json(table: Sequence[Row], keys: Sequence[str], left_out: dict[Path, str]) -> dict[str, Any]:
    return {
        "kind": "runs",
        "format": 1,
        "time": time.time(),
        "command": environment_command(),
        "rows": [
            {
                "runs": [str(path) for path in row.paths],
                "state": row.state,
                "settings": {key: row.settings.get(key) for key in keys},
                "seeds": list(row.seeds),
                "folds": list(row.folds),
                **row.numbers,
                **{f"{key}_half": half for key, half in row.halves.items()},
            }
            for row in table
        ],
        "left_out": [{"run": str(path), "reason": reason} for path, reason in left_out.items()],
    }
