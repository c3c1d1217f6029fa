"""From runs to rows: joins runs that differ only in their seed, and finds the settings in which rows differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pycls_fast.ledger.compare.settings import NOT_SET
from pycls_fast.ledger.overview.read import NUMBERS, Run, State
from pycls_fast.ledger.statistics import mean_interval

SEED = "seed"
# Keys that choose the kind of a group, which decides what other keys and values the group has.
_CHOOSE = ("name", "kind", "preset")


@dataclass(frozen=True)
class Row:
    """One run, or several that differ only in their seed.

    Attributes:
        paths: of the run folders.
        settings: of these runs, without the seed.
        seeds: one per path, as text.
        numbers: means over the runs, by `read.NUMBERS`; None if one of the runs has none.
        halves: half the width of the 95% interval of each mean (Student's t); None for a single run.
        state: of the run; always finished if there are several.
    """

    paths: tuple[Path, ...]
    settings: Mapping[str, str]
    seeds: tuple[str, ...]
    numbers: Mapping[str, float | None]
    halves: Mapping[str, float | None]
    state: State


def rows(runs: Sequence[Run], sort: str) -> list[Row]:
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


def _joined(runs: Sequence[Run]) -> list[list[Run]]:
    """The runs of each row. A run that is not finished, or repeats a seed, gets a row of its own."""
    groups: dict[tuple[tuple[str, str], ...], dict[str, Run]] = {}
    alone = []
    for run in runs:
        group = groups.setdefault(tuple(_without_seed(run).items()), {})
        if run.state != "finished" or _seed(run) in group:
            # Counting the same seed twice would make the interval too narrow.
            alone.append([run])
        else:
            group[_seed(run)] = run
    return [list(group.values()) for group in groups.values() if group] + alone


def _without_seed(run: Run) -> dict[str, str]:
    return {key: run.settings[key] for key in sorted(run.settings) if key != SEED}


def _seed(run: Run) -> str:
    return run.settings.get(SEED, NOT_SET)


def _row(runs: Sequence[Run]) -> Row:
    runs = sorted(runs, key=lambda run: (len(_seed(run)), _seed(run)))
    numbers: dict[str, float | None] = {}
    halves: dict[str, float | None] = {}
    for key in NUMBERS:
        known = [value for run in runs if (value := run.numbers[key]) is not None]
        numbers[key], halves[key] = mean_interval(known) if len(known) == len(runs) else (None, None)
    return Row(
        paths=tuple(run.path for run in runs),
        settings=_without_seed(runs[0]),
        seeds=tuple(map(_seed, runs)),
        numbers=numbers,
        halves=halves,
        state=runs[0].state,
    )


def differing(table: Sequence[Row], order: Sequence[str]) -> list[str]:
    """Keys with more than one value in the table, in the given order; a missing key counts as a value."""
    return [key for key in order if len({row.settings.get(key, NOT_SET) for row in table}) > 1]


def telling(table: Sequence[Row], keys: Sequence[str]) -> list[str]:
    """The differing keys without those that follow from another: of `optim=sgd,adamw`, `optim.name` but not `momentum`.

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

    return [key for key in keys if not follows_from_another(key)]


def _follows(table: Sequence[Row], key: str, choice: str) -> bool:
    """Whether rows with the same value of `choice` have the same value of `key`."""
    values: dict[str, str] = {}
    for row in table:
        value = row.settings.get(key, NOT_SET)
        if values.setdefault(row.settings.get(choice, NOT_SET), value) != value:
            return False
    return True
