"""Train a network: `pycls-fast train --config-name vit_digits [key=value ...]`."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from pycls_fast.config import NoOptions, Purpose, RunConfig, command_line

_run_dirs: list[Path] = []
"""The folders of this process's runs: several with `--multirun`."""


def main(config: RunConfig, options: NoOptions) -> int:
    """Train as configured."""
    # torch takes seconds to import; mistakes in the configuration are reported before that.
    from pycls_fast.train import train

    return train(config, on_start=_run_dirs.append)


def table_of(run_dirs: Sequence[Path]) -> str | None:
    """A note with the command that lists the runs of a sweep in one table; None if no run began."""
    if not run_dirs:
        return None
    return f"list the runs of this sweep: {shlex.join(['pycls-fast', 'runs', *map(str, _places(run_dirs))])}"


def _places(run_dirs: Sequence[Path]) -> list[Path]:
    """The folder above the runs if it holds nothing else, else each run's own."""
    runs = list(dict.fromkeys(run_dirs))
    above = runs[0].parent
    return [above] if above != Path() and set(above.iterdir()) == set(runs) else runs


def run() -> NoReturn:
    """Run it from `sys.argv`."""
    command_line(main, about=__doc__, purpose=Purpose(trains=True), after_sweep=lambda: table_of(_run_dirs))
