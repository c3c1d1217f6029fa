"""Finds the module that produced the first value that is not finite, forwards or backwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pycls_fast.errors import UserError
from pycls_fast.optim.weights import local
from pycls_fast.parallel import plain_name


class Watchdog:
    """Checks every module's output and its gradient; waits for the device once per microbatch.

    Args:
        network: gets hooks on all its modules; modules inside a compiled part are not seen.
        scaled: the loss is scaled. Overflowing gradients then only lower the scale: they are remembered in `last`, and
            only a non-finite forward pass stops the run.
    """

    def __init__(self, network: nn.Module, *, scaled: bool) -> None:
        self.last: str | None = None
        """The last finding, for the message of the code that stops the run."""
        self._network = network
        self._scaled = scaled
        self._forward: list[tuple[str, Tensor]] = []
        self._backward: list[tuple[str, Tensor]] = []
        for name, module in network.named_modules():
            place = plain_name(name) or "the whole network"
            module.register_forward_hook(self._watch(place, type(module).__name__))

    def check(self, step: int, loss: Tensor) -> None:
        """Check the values of a microbatch of `step` (from 0), after its backward pass.

        Raises:
            UserError: names the first module whose output (or gradient, if the loss is not scaled) is not finite.
        """
        forward = [*self._forward, ("the loss", _finite(loss))]
        weights = [
            (f"the gradient of the weight {plain_name(name)}", _finite(p.grad))
            for name, p in self._network.named_parameters()
            if p.grad is not None
        ]
        backward = [*self._backward, *weights]
        self._forward, self._backward = [], []
        found = _first_bad([*forward, *backward])
        if found is None:
            return
        place = [*forward, *backward][found][0]
        is_forward = found < len(forward)
        way = "forward" if is_forward else "backward"
        self.last = f"the first value that is not finite in the {way} pass of step {step + 1} is in {place}"
        if is_forward or not self._scaled:
            raise UserError(
                f"runtime.watchdog: {self.last}; lower optim.lr, set optim.clip_norm, or keep that part in a wider "
                "format with another precision"
            )

    def _watch(self, name: str, kind: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            # A forward pass that is recomputed within the backward pass was checked before.
            if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
                return
            for value in tree_leaves(output):
                if isinstance(value, Tensor) and value.is_floating_point():
                    self._forward.append((f"the output of {name} ({kind})", _finite(value)))
                    if value.requires_grad:
                        value.register_hook(self._gradient(name, kind))

        return hook

    def _gradient(self, name: str, kind: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            self._backward.append((f"the gradient that reaches the output of {name} ({kind})", _finite(gradient)))

        return hook


def _finite(value: Tensor) -> Tensor:
    """Whether this rank's values are all finite, as a flag on the device."""
    return torch.isfinite(local(value.detach())).all()


def _first_bad(flags: list[tuple[str, Tensor]]) -> int | None:
    finite = torch.stack([flag for _, flag in flags]).tolist()
    return finite.index(False) if False in finite else None
