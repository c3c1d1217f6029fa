"""Whole checkpoints: training reads only what it needs of them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from pycls_fast.train import checkpoint


def load_checkpoint(
    path: Path, parts: Collection[str] = ("model", "ema", "optimizer", "compression")
) -> checkpoint.State:
    """The complete state of a checkpoint, on the CPU, in one process.

    Args:
        path: the checkpoint's folder.
        parts: the tensors to read.

    Raises:
        UserError: see `checkpoint.open_checkpoint`.
    """
    opened = checkpoint.open_checkpoint(path)
    into = {
        name: torch.empty(spec.shape, dtype=spec.dtype)
        for name, spec in opened.specs.items()
        if name.partition("/")[0] in parts
    }
    opened.read(into)
    return opened.state(into)
