"""Activation checkpointing: a unit keeps its input and runs again in the backward pass.

Training Deep Nets with Sublinear Memory Cost (Chen et al. 2016, arXiv 1604.06174), by `torch.utils.checkpoint`; the
selective form is that of Korthikanti et al. (Reducing Activation Recomputation in Large Transformer Models, 2022, arXiv
2205.05198) turned into a rule about operators. The second forward draws the same random numbers as the first
(`preserve_rng_state`) and does not change buffers, so gradients and BatchNorm statistics are bit-identical.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from pycls_fast.network import Units

RecomputeName = Literal["off", "full", "selective", "budget"]
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_aten = torch.ops.aten
_CONVOLUTIONS = {_aten.convolution.default}
_PRODUCTS = {_aten.mm.default, _aten.addmm.default}
if torch.backends.mkldnn.is_available():
    # What speed.linear=products runs on a CPU.
    _PRODUCTS.add(torch.ops.mkldnn._linear_pointwise.default)
# What speed.convolution=products runs in compiled code for 1x1 kernels.
_COMPILED_POINTWISE = "pycls_fast::pointwise"
_BATCHED_PRODUCTS = {_aten.bmm.default, _aten.baddbmm.default}


def recompute_units(units: Units, *, recompute: RecomputeName, every: int = 1) -> None:
    """Make each `every`-th unit, the first one among them, recompute its activations; in place, names unchanged.

    Args:
        units: the model's repeated blocks in forward order.
        recompute: "off"; "full": only the unit's input is kept; "selective": the results of convolutions and of
            products with weights are kept as well, so that attention, norms and activations run again
            (`KeepProducts`); "budget": nothing here, for the compiler chooses (`compile_model`).
        every: 1 for all units.
    """
    if recompute in ("off", "budget"):
        return
    for _, unit in list(units)[::every]:
        unit.forward = Recomputed(unit, selective=recompute == "selective")


class Recomputed:
    """Stands in for a unit's `forward`.

    An object and not a wrapping module: the unit keeps its type and its names, and a copy of it calls the copy.
    """

    def __init__(self, unit: nn.Module, *, selective: bool) -> None:
        self.unit = unit
        self.inner: Callable[[Tensor], Tensor] = unit.forward
        self.selective = selective

    def __call__(self, features: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.inner(features)
        extra: dict[str, Any] = {}
        if torch.compiler.is_compiling():
            # A compiled unit is recomputed by its graph, which writes buffers once; our buffer contexts do not apply.
            # Nothing of this object goes in, or each unit would have a graph of its own.
            extra = {"context_fn": _keep_products} if self.selective else {}
        elif self.selective or self._has_buffers():
            extra = {"context_fn": self._contexts}
        return checkpoint(self.inner, features, use_reentrant=False, preserve_rng_state=True, **extra)

    def _has_buffers(self) -> bool:
        return next(self.unit.buffers(), None) is not None

    def _contexts(self) -> Contexts:
        """Contexts for the forward pass and for its repetition in the backward pass."""
        first: AbstractContextManager[Any] = nullcontext()
        again: AbstractContextManager[Any] = nullcontext()
        if self.selective:
            first, again = _keep_products()
        return first, _both(buffers_put_back(self.unit), again)


def _keep_products() -> Contexts:
    first, again = create_selective_checkpoint_contexts(KeepProducts())
    return first, again


class KeepProducts:
    """The policy of `selective` for one forward pass: keeps results of convolutions and of products with weights.

    The product after attention, its output projection, is not kept: it is a twelfth of the operations of a ViT block's
    products with weights, and a tenth of what would be kept.
    """

    def __init__(self) -> None:
        # Separate for the first run and the repetition: older versions of torch call the policy in both.
        self._after_attention = {False: False, True: False}

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Decide for one operator; called for every operator in execution order."""
        again = context.is_recompute
        if operator in _PRODUCTS:
            is_projection, self._after_attention[again] = self._after_attention[again], False
            return CheckpointPolicy.PREFER_RECOMPUTE if is_projection else CheckpointPolicy.MUST_SAVE
        if operator in _CONVOLUTIONS or operator.name() == _COMPILED_POINTWISE:
            return CheckpointPolicy.MUST_SAVE
        if operator in _BATCHED_PRODUCTS or "scaled_dot_product" in operator.name():
            self._after_attention[again] = True
        return CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def buffers_put_back(unit: nn.Module) -> Iterator[None]:
    """Replace all buffers by copies inside the context, so that BatchNorm's statistics count a batch only once."""
    owned = [(module, name, value) for module in unit.modules() for name, value in module.named_buffers(recurse=False)]
    for module, name, value in owned:
        setattr(module, name, value.clone())
    try:
        yield
    finally:
        for module, name, value in owned:
            setattr(module, name, value)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield
