"""`pycls-fast train` and `pycls-fast lr-find`."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from pycls_fast.config import Purpose, RunConfig, Section, command

_run_dirs: list[Path] = []
"""The folders of this process's runs: several with `--multirun`."""


def table_of(run_dirs: Sequence[Path]) -> str | None:
    """A note with the command that lists the runs of a sweep in one table; None if no run began."""
    runs = list(dict.fromkeys(run_dirs))
    if not runs:
        return None
    # The folder above the runs if it holds nothing else, else each run's own.
    above = runs[0].parent
    places = [above] if above != Path() and set(above.iterdir()) == set(runs) else runs
    return f"list the runs of this sweep: {shlex.join(['pycls-fast', 'runs', *map(str, places)])}"


@command(purpose=Purpose(trains=True), after_sweep=lambda: table_of(_run_dirs))
def train(config: RunConfig, options: Section) -> int:
    """Train a network: `pycls-fast train --config-name vit_digits [key=value ...]`."""
    from pycls_fast.train import train as train_network

    return train_network(config, on_start=_run_dirs.append)


class LrFindOptions(Section):
    """Keys of `pycls-fast lr-find`."""

    steps: Annotated[int, Field(ge=10)] = 100
    """The number of training steps, with a higher rate in each; fewer if the loss blows up."""
    lr_min: Annotated[float, Field(gt=0.0)] = 1e-7
    """optim.lr of the first step."""
    lr_max: Annotated[float, Field(gt=0.0)] = 1.0
    """optim.lr of the last step."""
    output: str | None = None
    """The folder for the numbers and the picture; null: a new one in lr_find/."""


@command(options=LrFindOptions, default="finetune", purpose=Purpose(trains=True))
def lr_find(config: RunConfig, options: LrFindOptions) -> int:
    """Find a learning rate: `pycls-fast lr-find --config-name EXPERIMENT data.root=PATH [steps=100]`.

    Trains `steps` steps of the experiment with optim.lr rising from lr_min to lr_max, and prints where the loss falls
    fastest and where it diverges. Writes lr_find.json and lr_find.png into `output`. Compiles nothing unless
    speed.compile is set: there are too few steps to make up for it.
    """
    from pycls_fast.train.tasks.lr_range import lr_range_test

    return lr_range_test(config, **dict(options))
