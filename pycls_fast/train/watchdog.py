"""Finds the module that produced the first value that is not finite, forwards or backwards."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pycls_fast.errors import UserError
from pycls_fast.optim.owned_weights import local
from pycls_fast.parallel.fairscale import plain_name


class Watchdog:
    """Checks every module's output and its gradient, except inside compiled parts; waits for the device once per
    microbatch.

    If the loss is `scaled`, overflowing gradients only lower the scale: they are remembered in `last`, and only a
    non-finite forward pass stops the run.
    """

    def __init__(self, network: nn.Module, *, scaled: bool) -> None:
        self.last: str | None = None
        """The last finding, for the message of the code that stops the run."""
        self._network = network
        self._scaled = scaled
        # Way, place, and whether all values are finite, as a flag on the device.
        self._seen: list[tuple[str, str, Tensor]] = []
        for name, module in network.named_modules():
            place = f"the output of {plain_name(name) or 'the whole network'} ({type(module).__name__})"
            module.register_forward_hook(partial(self._watch, place))

    def check(self, step: int, loss: Tensor) -> None:
        """Check the values of a microbatch of `step` (from 0), after its backward pass; a `UserError` names the first
        module whose output (or gradient, if the loss is not scaled) is not finite."""
        self._note("forward", "the loss", loss)
        for name, parameter in self._network.named_parameters():
            if parameter.grad is not None:
                self._note("backward", f"the gradient of the weight {plain_name(name)}", parameter.grad)
        seen, self._seen = sorted(self._seen, key=lambda each: each[0] == "backward"), []
        # Gradients of shards may be on the host (speed.param_offload).
        finite = torch.stack([flag.to(loss.device) for *_, flag in seen]).tolist()
        if all(finite):
            return
        way, place, _ = seen[finite.index(False)]
        self.last = f"the first value that is not finite in the {way} pass of step {step + 1} is in {place}"
        if way == "forward" or not self._scaled:
            raise UserError(
                f"runtime.watchdog: {self.last}; lower optim.lr, set optim.clip_norm, or keep that part in a wider "
                "format with another precision"
            )

    def forget(self) -> None:
        self._seen = []

    def _note(self, way: str, place: str, value: Tensor) -> None:
        self._seen.append((way, place, torch.isfinite(local(value.detach())).all()))

    def _watch(self, place: str, module: nn.Module, inputs: Any, output: Any) -> None:
        # A forward pass that is recomputed within the backward pass was checked before.
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        for value in tree_leaves(output):
            if isinstance(value, Tensor) and value.is_floating_point():
                self._note("forward", place, value)
                if value.requires_grad:
                    value.register_hook(partial(self._note, "backward", f"the gradient that reaches {place}"))
