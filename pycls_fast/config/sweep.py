"""Several runs from one command line (`--multirun`): Hydra's folder for them, their run folders, their results."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException

from pycls_fast.config.reporting import print_lines
from pycls_fast.errors import Finished, UserError


def is_sweep(arguments: Sequence[str]) -> bool:
    """Whether the arguments ask for several runs."""
    return not {"--multirun", "-m"}.isdisjoint(arguments)


@contextmanager
def sweep_folder(arguments: Sequence[str]) -> Iterator[list[str]]:
    """Settings that hide Hydra's own records of a `--multirun`, for which it requires a folder.

    Raises:
        UserError: several ranks would each search for the best values.
    """
    if not is_sweep(arguments):
        yield []
        return
    sweeper = next((a.partition("=")[2] for a in arguments if a.startswith("hydra/sweeper=")), "basic")
    if sweeper != "basic":
        if "RANK" in os.environ:
            raise UserError(
                f"hydra/sweeper: under torchrun each rank's {sweeper} would choose its own values; start one process "
                "without torchrun, or give each run its ranks with hydra/launcher=submitit_local or submitit_slurm"
            )
        # It writes its result there.
        folder = f"multirun/{sweeper}-{time.strftime('%Y-%m-%d_%H-%M-%S')}"
        print_lines("note", [f"the result of {sweeper} will be in {folder}"])
        yield [f"hydra.sweep.dir={folder}", "hydra.sweep.subdir=."]
        return
    if any(argument.startswith("hydra/launcher=submitit") for argument in arguments):
        # The jobs' inputs and logs belong in a permanent folder that all nodes see.
        yield ["hydra.sweep.dir=multirun", "hydra.sweep.subdir=."]
        return
    with tempfile.TemporaryDirectory() as folder:
        yield [f"hydra.sweep.dir={folder}", "hydra.sweep.subdir=."]


def refuse_shared_folder(overrides: Sequence[str]) -> None:
    """Refuse one `run_dir` for a whole sweep: the second run would resume the first one's and report its result.

    Raises:
        UserError: one `run_dir` for several runs.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except OverrideParseException:
        return  # Hydra parses the overrides next and reports the error.
    given = [override for override in parsed if override.key_or_group == "run_dir"]
    # A sweeper that searches may have its choices in its own settings.
    sweeps = any(
        override.is_sweep_override() or (override.key_or_group == "hydra/sweeper" and override.value() != "basic")
        for override in parsed
    )
    if not given or given[-1].is_sweep_override() or not sweeps:
        return
    value = str(given[-1].get_value_string())
    if "${" not in value:
        raise UserError(
            f"run_dir: {value} for every run of --multirun; leave it out, or give each its own with "
            f"'run_dir={value}/${{hydra:job.num}}' (the command line)"
        )


def objective(status: int) -> float | None:
    """What a sweeper gets from a run: a number to minimise, or None.

    Optuna's records a trial with None as failed and continues; NaN would end its search with a traceback.
    """
    return status.objective if isinstance(status, Finished) else None
