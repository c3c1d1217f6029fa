"""TensorBoard's event files, under `tensorboard/` in the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pycls_fast.train.folder import writing


class TensorBoard:
    """Event files; see `Tracker`.

    Args:
        run_dir: the run folder.
        start_step: later steps that an earlier process wrote are purged from the view.

    Raises:
        UserError: a file cannot be written.
    """

    def __init__(self, run_dir: Path, start_step: int) -> None:
        # Slow to import; only the rank that writes pays for it.
        from torch.utils.tensorboard import SummaryWriter

        self._folder = run_dir / "tensorboard"
        with writing(self._folder):
            self._writer = SummaryWriter(str(self._folder), purge_step=start_step + 1)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of a step."""
        with writing(self._folder):
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def end(self, status: int, final: Mapping[str, float]) -> None:
        """Close the files, which have no place for the state of a run."""
        with writing(self._folder):
            self._writer.close()
