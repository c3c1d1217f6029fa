"""An optimizer whose state and copy of the weights live in the host's memory (ZeRO-Offload, Ren et al. 2021)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pycls_fast.optim.groups import Group


class HostOptimizer(Optimizer):
    """Runs another optimizer on float32 copies of the parameters on the CPU, and writes the result back.

    A step copies the gradients to the host (pinned if the parameters are on CUDA), **waits for them**, updates on the
    CPU, and starts the copy back. The device keeps only weights and gradients; the update's time on the CPU is added to
    every step. torchao has a CPUOffloadOptimizer that overlaps the two; it runs only on CUDA and XPU, and keeps one
    optimizer per parameter, so that its saved state has a different layout.

    `param_groups` hold the device's parameters with the settings of the inner optimizer's groups; `state_dict` is the
    inner optimizer's, the same as without this class.

    Args:
        groups: groups of parameters on their device, in any floating-point format.
        make: makes the inner optimizer from the groups of copies.
    """

    def __init__(self, groups: Sequence[Group], make: Callable[[list[Group]], Optimizer]) -> None:
        self._owned: list[list[nn.Parameter]] = [list(group["params"]) for group in groups]
        self._copies = [[nn.Parameter(_host_like(p).copy_(p.detach())) for p in owned] for owned in self._owned]
        self.inner = make([{**g, "params": copies} for g, copies in zip(groups, self._copies, strict=True)])
        own = [{**g, "params": owned} for g, owned in zip(self.inner.param_groups, self._owned, strict=True)]
        super().__init__(own, self.inner.defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the device's parameters from their gradients; `closure` is not supported."""
        if closure is not None:
            raise ValueError("an optimizer on the host takes no closure")
        devices = set()
        for parameter, copy in self._pairs():
            if parameter.grad is None:
                copy.grad = None
                continue
            if copy.grad is None:
                copy.grad = _host_like(parameter)
            copy.grad.copy_(parameter.grad, non_blocking=True)
            devices.add(parameter.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            if isinstance(inner["lr"], Tensor):
                # A compiled step reads this tensor, so it is changed in place; loading a state replaces the tensor.
                inner["lr"].fill_(group["lr"])
            else:
                inner["lr"] = group["lr"]
        self.inner.step()
        for parameter, copy in self._pairs():
            if parameter.grad is not None:
                parameter.copy_(copy, non_blocking=True)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, on the CPU."""
        return self.inner.state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state; the copies take the parameters' current values, so load the parameters first."""
        self.inner.load_state_dict(state_dict)
        for parameter, copy in self._pairs():
            copy.copy_(parameter)

    def _pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return [
            pair
            for owned, copies in zip(self._owned, self._copies, strict=True)
            for pair in zip(owned, copies, strict=True)
        ]


def _host_like(parameter: Tensor) -> Tensor:
    """An empty CPU tensor in float32 (float64 for float64) and the parameter's memory format."""
    dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    empty = torch.empty_like(parameter, device="cpu", dtype=dtype, requires_grad=False)
    return empty.pin_memory() if parameter.device.type == "cuda" else empty
