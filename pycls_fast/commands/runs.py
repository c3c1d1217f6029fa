"""`pycls-fast runs` and `pycls-fast compare`."""

from typing import Annotated, Literal

from pydantic import Field

from pycls_fast.config import Section, command
from pycls_fast.values import NonNegativeInt


class RunsOptions(Section):
    """Keys of `pycls-fast runs`."""

    folders: Annotated[tuple[str, ...], Field(min_length=1)]
    """Run folders, or folders that contain them at any depth (runs, runs/EXPERIMENT, a ledger)."""
    sort: Literal["best_top1", "final_top1", "class_top1", "images_per_second", "hours", "epoch"] = "best_top1"
    """By what the rows are sorted, largest first."""
    output: Annotated[str, Field(pattern=r"\.(csv|json)$")] | None = None
    """A .csv or .json file: the same rows, with every setting that differs."""


@command(options=RunsOptions, default=None, words=("folders",))
def runs(options: RunsOptions) -> int:
    """A table of many runs: `pycls-fast runs FOLDER... [key=value ...]`.

    A row shows the settings in which the runs differ, top-1 of the best and of the last evaluation, class_top1 (the
    mean accuracy over the classes) of the best, training speed, time and state. Finished runs that differ only in
    `seed` or `data.fold` share a row: mean ± half the 95% interval of the mean. State: finished, stopped (by a signal,
    with everything saved), failed (ended by an error), or running or killed. Damaged and empty run folders are listed
    at the end, with the reason. Exit status: 0, or 2 when no run could be read.
    """
    from pycls_fast.ledger.runs import list_runs

    return list_runs(options.folders, sort=options.sort, output=options.output)


class CompareOptions(Section):
    """Keys of `pycls-fast compare`."""

    run_a: str
    """A run's folder."""
    run_b: str
    """Another one."""
    output: str | None = None
    """A folder; null: one in comparisons/."""
    images: NonNegativeInt = 24
    """Images shown per kind of disagreement."""


@command(options=CompareOptions, default=None, words=("run_a", "run_b"))
def compare(options: CompareOptions) -> int:
    """Two runs side by side: `pycls-fast compare RUN_A RUN_B [key=value ...]`.

    Shows different settings, loss and accuracy curves, top-1 and top-5 with a paired test over the images, the images
    on which the two disagree, accuracy by class, speed and memory. Prints a table, and writes into the output folder
    `index.html` (one page with everything) and `compare.json`. The runs need not be finished.
    """
    from pycls_fast.ledger.compare import compare_runs

    return compare_runs(**dict(options))
