"""Seeded draws that touch no global generator and do not change with the version of a library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def frozen_generator(seed: int) -> np.random.RandomState:
    """A NumPy generator for a seed in [0, 2**63).

    `RandomState` is the one generator whose stream NumPy promises never to change (NEP 19), so a resumed run keeps its
    order of samples after an upgrade. It takes 32-bit words, hence the two halves.
    """
    return np.random.RandomState(np.array([seed & 0xFFFFFFFF, seed >> 32], dtype=np.uint32))


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators of the CPU and of `device`, from which a training step draws.

    The streams are those after `torch.manual_seed`, which costs more: it formats the Python stack once for each kind of
    accelerator that is not in use.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)


@contextmanager
def seeded_torch(seed: int) -> Iterator[None]:
    """Seed torch's default CPU generator within the block; restore its state afterwards.

    torchvision's transforms always draw from that generator. `torch.manual_seed` is avoided because it also seeds the
    accelerators' generators, which belong to the training step.
    """
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)
