"""Weights & Biases. Entity, mode and login come from its own environment variables (`WANDB_*`)."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class WandB:
    """A run of Weights & Biases, whose files are under `wandb/` in the run folder; see `Tracker`.

    Args:
        run_dir: the run folder, whose name is the run's.
        project: created if it does not exist.
        settings: the configuration, with dotted keys.
        run_id: of the run to continue; None for a new one.
    """

    way_out = "log in with `wandb login`, or set WANDB_MODE=offline"

    def __init__(self, run_dir: Path, *, project: str, settings: Mapping[str, Any], run_id: str | None) -> None:
        import wandb

        # Not W&B's own: WANDB_RUN_ID would give every run of a sweep the same.
        self.id = run_id or secrets.token_hex(8)
        self._run = wandb.init(
            project=project,
            name=run_dir.name,
            dir=run_dir,
            id=self.id,
            resume="allow",
            config=dict(settings),
            allow_val_change=True,
            # A run that the calling program has open stays its own.
            reinit="create_new",
        )
        # W&B's own count of steps would refuse those that a resumed run repeats.
        self._run.define_metric("*", step_metric="step")

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers of a step."""
        self._run.log({"step": step, **values})

    def end(self, status: int, final: Mapping[str, float]) -> None:
        """Send the final numbers and the exit status."""
        self._run.summary.update(dict(final))
        self._run.finish(exit_code=status)
