"""What the tests of the models share."""

from __future__ import annotations

import torch
from torch import Tensor


def draw(*shape: int, seed: int) -> Tensor:
    """Normal values in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def check_rounding(
    plain: list[Tensor], found: list[Tensor], exact: list[Tensor], *, factor: float = 4.0, slack: float = 0.0
) -> None:
    """Every error at most so many times that of torch's own way, and a share of the result."""
    for reference, other, right in zip(plain, found, exact, strict=True):
        own = (reference.double() - right).norm()
        assert own > 0 or slack
        assert (other.double() - right).norm() <= factor * own + slack * right.norm()
