"""TensorBoard: the numbers of `metrics.jsonl`, under `tensorboard/` in the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pycls_fast.train.run_folder import writing

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_TRAIN = (
    "loss",
    "lr",
    "grad_norm",
    "images_per_second",
    "data_wait_fraction",
    "memory_peak_bytes",
    "loss_scale",
)
_EVAL = ("top1", "top5", "class_top1", "loss")


class Board:
    """Writes event files if enabled.

    Args:
        run_dir: the run folder.
        start_step: later steps that an earlier process wrote are purged from the view.
        enabled: whether this rank writes.
    """

    def __init__(self, run_dir: Path, start_step: int, *, enabled: bool) -> None:
        self._folder = run_dir / "tensorboard"
        self._writer: SummaryWriter | None = None
        if enabled:
            # Slow to import; only the rank that writes pays for it.
            from torch.utils.tensorboard import SummaryWriter

            with writing(self._folder):
                self._writer = SummaryWriter(str(self._folder), purge_step=start_step + 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._writer is not None:
            with writing(self._folder):
                self._writer.close()

    def add(self, record: Mapping[str, Any]) -> None:
        """Write a `train` or `eval` record."""
        if self._writer is None:
            return
        if record["kind"] == "train":
            values = {f"train/{name}": record[name] for name in _TRAIN if name in record}
        else:
            place = f"{record['split']}_{record['weights']}"
            values = {f"{place}/{name}": record[name] for name in _EVAL if record[name] is not None}
        with writing(self._folder):
            for name, value in values.items():
                self._writer.add_scalar(name, value, record["step"])
