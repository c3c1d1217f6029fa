"""Whole checkpoints, saved and loaded at once: training saves in the background and reads only what it needs."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from pycls_fast.parallel import ALONE
from pycls_fast.train import checkpoint


def save_checkpoint(state: checkpoint.State, folder: Path, step: int, *, keep: int) -> Path:
    """Save a nested state of tensors and plain values in one process; other arguments as in `checkpoint.write`."""
    found, plain = checkpoint.split(state)
    return checkpoint.write(found, plain, folder, step, keep=keep, world=ALONE)


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
