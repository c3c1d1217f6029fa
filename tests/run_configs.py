"""Configurations of run folders, as tools that score take them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pycls_fast.config import Purpose, RunConfig
from pycls_fast.config.compose import check
from pycls_fast.config.saved import compose_saved, saved_in_run


def load_run_config(run_dir: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration that a run folder was made with, with overrides.

    Raises:
        UserError: there is no such run, or an override is wrong.
    """
    return check(compose_saved(saved_in_run(run_dir), overrides), Purpose(scores_sets=True))
