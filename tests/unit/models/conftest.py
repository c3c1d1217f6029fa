"""What the tests of the models share."""

from __future__ import annotations

import torch


def draw(*shape: int, seed: int) -> torch.Tensor:
    """Normal values in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)
