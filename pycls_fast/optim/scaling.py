"""Loss scaling for float16 (Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class RanksScaler(torch.amp.GradScaler):
    """torch's dynamic loss scale with one overflow decision for ranks that each hold a part of the gradients.

    Gradients may overflow on one rank only. Unless all ranks skip that step and lower the scale, their weights and
    scales diverge. FairScale's ShardedGradScaler does the same on CUDA; this one runs on CPUs too.

    `ranks` are groups of the ranks that hold parts, none if each has all gradients; `settings` are torch's.
    """

    def __init__(self, device: str, *, ranks: Sequence[dist.ProcessGroup] = (), **settings: Any) -> None:
        super().__init__(device, **settings)
        self._ranks = ranks

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scale and the count of steps since it last grew; factors and interval stay this scaler's own.
        A scaler that is not enabled has an empty state."""
        own = self.state_dict()
        if own and state:
            # The scale grows when the count equals the interval; a count beyond a shorter interval never would.
            steps = min(state["_growth_tracker"], own["growth_interval"] - 1)
            super().load_state_dict({**own, "scale": state["scale"], "_growth_tracker": steps})

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = super()._unscale_grads_(*args, **kwargs)
        if not self._ranks:
            return found
        assert self._scale is not None
        if not found:
            # This rank's part is empty.
            found = {self._scale.device: torch.zeros(1, device=self._scale.device)}
        for device, flag in found.items():
            # Gradients may be on the host, which the ranks' backend may not be able to access.
            shared = flag.to(self._scale.device)
            for group in self._ranks:
                dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
            found[device] = shared.to(device)
        return found


class ConstantScaler(RanksScaler):
    """A constant loss scale: steps with non-finite gradients are skipped, and nothing else happens."""

    def __init__(self, device: str, scale: float, *, ranks: Sequence[dist.ProcessGroup] = ()) -> None:
        super().__init__(device, ranks=ranks, init_scale=scale)
        self._constant = scale

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the scale is a setting, not a state."""

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """End the step; the base class has the argument."""
        super().update(self._constant)
