"""Loss scaling for float16 (Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class RanksScaler(torch.amp.GradScaler):
    """torch's dynamic scale with one verdict for ranks that each hold a part of the gradients.

    A part may overflow on one rank alone. Unless all skip that step and lower the scale, weights and scales go
    different ways on different ranks. What FairScale's ShardedGradScaler is for, on CUDA; this one runs on CPUs too.

    Args:
        device: "cpu" or "cuda".
        ranks: those that hold parts; None: each has all of the gradients.
        settings: torch's.
    """

    def __init__(self, device: str, *, ranks: dist.ProcessGroup | None = None, **settings: Any) -> None:
        super().__init__(device, **settings)
        self._ranks = ranks

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the scale and the whole steps since it grew; factors and interval stay this scaler's own."""
        own = self.state_dict()
        if own:
            # At the interval the scale grows; a count that is beyond a shorter one would never meet it.
            steps = min(state["_growth_tracker"], own["growth_interval"] - 1)
            super().load_state_dict({**own, "scale": state["scale"], "_growth_tracker": steps})

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = super()._unscale_grads_(*args, **kwargs)
        if self._ranks is None:
            return found
        assert self._scale is not None
        if not found:
            # This rank's part is empty.
            found = {self._scale.device: torch.zeros(1, device=self._scale.device)}
        for device, flag in found.items():
            # Of gradients on the host too, where the ranks' backend may not reach.
            shared = flag.to(self._scale.device)
            dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self._ranks)
            found[device] = shared.to(device)
        return found


class ConstantScaler(RanksScaler):
    """A loss scale that stays: steps with gradients that are not finite are skipped, and nothing else happens."""

    def __init__(self, device: str, scale: float, *, ranks: dist.ProcessGroup | None = None) -> None:
        super().__init__(device, ranks=ranks, init_scale=scale)
        self._constant = scale

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: the scale is a setting."""

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
    ranks: dist.ProcessGroup | None = None,
) -> torch.amp.GradScaler:
    """A scale that is constant, or that grows after `interval` whole steps and shrinks at every overflow.

    Args:
        device: "cpu" or "cuda".
        enabled: otherwise it does nothing.
        constant: the scale; None for a dynamic one.
        start, growth, backoff, interval: of the dynamic one.
        ranks: see `RanksScaler`.
    """
    if enabled and constant is not None:
        return ConstantScaler(device, constant, ranks=ranks)
    return RanksScaler(
        device,
        ranks=ranks,
        init_scale=start,
        growth_factor=growth,
        backoff_factor=backoff,
        growth_interval=interval,
        enabled=enabled,
    )
