"""A table of many runs: `pycls-fast runs FOLDER... [key=value ...]`.

FOLDER       run folders, or folders that contain them at any depth (runs, runs/EXPERIMENT, a ledger)

    sort=        best_top1 (default), final_top1, class_top1, images_per_second, hours or epoch; largest first
    output=      a .csv or .json file: the same rows, with every setting that differs

A row shows the settings in which the runs differ, top-1 of the best and of the last evaluation, class_top1 (the mean
accuracy over the classes) of the best, training speed, time and state. Finished runs that differ only in `seed` or
`data.fold` share a row: mean ± half the 95% interval of the mean. State: finished, stopped (by a signal, with
everything saved), failed (ended by an error), or running or killed. Damaged and empty run folders are listed at the
end, with the reason. Exit status: 0, or 2 when no run could be read.
"""

from typing import Literal, NoReturn

from pycls_fast.config import Section, command_line
from pycls_fast.errors import UserError


class Options(Section):
    """Keys of this tool."""

    folders: tuple[str, ...] = ()
    sort: Literal["best_top1", "final_top1", "class_top1", "images_per_second", "hours", "epoch"] = "best_top1"
    output: str | None = None


def main(options: Options) -> int:
    """Read, print and write."""
    if not options.folders:
        raise UserError("folders: none were given; give run folders, or folders that contain some, such as runs")
    if options.output is not None and not options.output.lower().endswith((".csv", ".json")):
        raise UserError(f"output: {options.output} must end in .csv or .json; rename it")
    # torch takes seconds to import; mistakes on the command line are reported before that.
    from pycls_fast.ledger.runs import list_runs

    return list_runs(options.folders, sort=options.sort, output=options.output)


def run() -> NoReturn:
    """Run it from `sys.argv`."""
    command_line(main, default=None, options=Options, about=__doc__, words=("folders",))
