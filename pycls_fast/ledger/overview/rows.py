"""From runs to rows: joins runs that differ only in seed or fold, and finds the settings in which rows differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pycls_fast.ledger.compare.settings import NOT_SET
from pycls_fast.ledger.overview.read import NUMBERS, SavedRun, State
from pycls_fast.ledger.statistics import mean_interval

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
        numbers: means over the runs, by `read.NUMBERS`; None if one of the runs has none.
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
        sort: one of `read.NUMBERS`.
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
