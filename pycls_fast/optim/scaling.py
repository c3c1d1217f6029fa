"""Loss scaling for float16 (Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor


class ConstantScaler(torch.amp.GradScaler):
    """A loss scale that stays: steps with gradients that are not finite are skipped, and nothing else happens."""

    def __init__(self, device: str, scale: float) -> None:
        super().__init__(device, init_scale=scale)
        self._constant = scale

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Ends the step. The argument is there for the base class's sake."""
        super().update(self._constant)


def loss_scaler(
    device: str,
    *,
    enabled: bool,
    constant: float | None = None,
    start: float = 65536.0,
    growth: float = 2.0,
    backoff: float = 0.5,
    interval: int = 2000,
) -> torch.amp.GradScaler:
    """A scale that is constant, or that grows after `interval` whole steps and shrinks at every overflow.

    Args:
        device: "cpu" or "cuda".
        enabled: otherwise it does nothing.
        constant: the scale; None for a dynamic one.
        start, growth, backoff, interval: of the dynamic one.
    """
    if enabled and constant is not None:
        return ConstantScaler(device, constant)
    return torch.amp.GradScaler(
        device,
        init_scale=start,
        growth_factor=growth,
        backoff_factor=backoff,
        growth_interval=interval,
        enabled=enabled,
    )
