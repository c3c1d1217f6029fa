"""Networks in a half format, and the float32 master weights that the optimizer updates instead.

Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.1: an update smaller than half a unit in the last
place of a weight is lost when added in the weight's own format; added to a float32 master it is kept, and enough of
them change the rounded weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from pycls_fast.optim.groups import BATCH_NORM, NORMS
from pycls_fast.optim.owned_weights import OwnedWeights


class MasterWeights(OwnedWeights):
    """Casts a network in place to a narrow format and holds wide master copies, which the optimizer owns.

    One step: backward fills the network's gradients, `take_gradients` adds them to the masters' in the wide format
    (still multiplied by the loss scale), the optimizer updates the masters, `copy_to_model` rounds them into the
    network.

    Args:
        model: on its device, its parameters in `wide`.
        dtype: the format of its parameters and floating-point buffers afterwards.
        wide_norms: leave normalisation layers in `wide`. Batch norm stays in `wide` whenever masters are kept: its
            statistics change by small steps, which a half format would round away.
        kept: keep the masters from step to step. Otherwise each step starts from the rounded weights, and between
            steps the masters have no memory: full half-precision training with the arithmetic of the update in `wide`.
        wide: the masters' format.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype,
        wide_norms: bool,
        kept: bool,
        wide: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(model)
        self._wide = wide
        self._kept = kept
        # Whether masters that are not kept hold this step's weights: at first they hold initial values.
        self._current = False
        wide_modules = NORMS if wide_norms else (BATCH_NORM,) if kept else ()
        owned = (p for module in _outside(model, wide_modules) for p in module.parameters(recurse=False))
        # Each once, in the model's order.
        self._narrow: list[Tensor] = list(dict.fromkeys(p for p in owned if p.is_floating_point()))
        self.masters: list[Tensor] = [nn.Parameter(p.detach().clone(), p.requires_grad) for p in self._narrow]
        # Parameters that are not cast are their own masters.
        self._in_place_of = {id(p): {"": master} for p, master in zip(self._narrow, self.masters, strict=True)}
        for parameter in self._narrow:
            # Keep the object: optimizer groups and hooks may refer to it.
            parameter.data = parameter.data.to(dtype)
        cast_buffers(model, dtype, wide_modules)
        for module in model.modules():
            if isinstance(module, wide_modules):
                cast_around(module, dtype)

    @torch.no_grad()
    def take_gradients(self) -> None:
        self._allocate()
        new, added = [], []
        for parameter, master in zip(self._narrow, self.masters, strict=True):
            if parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = torch.empty_like(master)
                new.append((master.grad, parameter.grad))
            else:
                added.append((master.grad, parameter.grad))
            parameter.grad = None
        if new:
            torch._foreach_copy_([to for to, _ in new], [gradient for _, gradient in new])
        if added:
            # Widened within the addition: copies in the wide format would take as much memory again.
            torch._foreach_add_([to for to, _ in added], [gradient for _, gradient in added])

    @torch.no_grad()
    def copy_to_model(self) -> None:
        torch._foreach_copy_(self._narrow, self.masters)
        if not self._kept:
            # Only the update is in the wide format: the next step starts from the rounded weights.
            for master in self.masters:
                master.untyped_storage().resize_(0)
            self._current = False

    @torch.no_grad()
    def refresh_model(self) -> None:
        if self._kept:
            torch._foreach_copy_(self._narrow, self.masters)

    def live(self) -> dict[str, Tensor]:
        return {name: self._owned(v)[""] if self._kept else v for name, v in super().live().items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Values in the wide format, which share the memory of kept masters."""
        live = {name: value.detach() for name, value in self.live().items()}
        return {name: v.to(self._wide) if v.is_floating_point() else v for name, v in live.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict(state)
        for name, value in self.live().items():
            value.copy_(state[name])

    def _allocate(self) -> None:
        if self._kept or self._current:
            return
        for master in self.masters:
            master.untyped_storage().resize_(master.numel() * master.element_size())
        torch._foreach_copy_(self.masters, self._narrow)
        self._current = True


Modules = tuple[type[nn.Module], ...]


def _outside(model: nn.Module, wide: Modules) -> list[nn.Module]:
    return [m for m in model.modules() if not isinstance(m, wide)]


def cast_around(norm: nn.Module, dtype: torch.dtype) -> None:
    """Have a norm with wide weights compute in their format, between layers in a narrow one; in place."""
    weight = next(norm.parameters(), None)
    # Batch norm accepts half-precision maps with wide statistics and weights.
    if weight is not None and not isinstance(norm, BATCH_NORM):
        norm.register_forward_pre_hook(partial(cast_inputs, weight.dtype))
        norm.register_forward_hook(partial(cast_output, dtype))


def cast_buffers(model: nn.Module, dtype: torch.dtype, wide: Modules = (BATCH_NORM,)) -> None:
    """Cast floating-point buffers to a half format, except those of `wide` modules (batch norm's statistics)."""
    for module in _outside(model, wide):
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))


def cast_inputs(dtype: torch.dtype, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A forward pre-hook, once it has its format (a partial: a model can be copied and pickled)."""
    return tuple(x.to(dtype) for x in inputs)


def cast_output(dtype: torch.dtype, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """A forward hook, once it has its format."""
    return output.to(dtype)
