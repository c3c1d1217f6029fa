"""Precisions that need help: CPU autocast aligned with CUDA's, float16's loss scaling, and linear layers in float8.

Float8 (Micikevicius et al., FP8 Formats for Deep Learning, 2022) is torchao's: activations and weights in e4m3,
gradients in e5m2, with dynamic scales per tensor or per row; the weights that the optimizer owns keep their format and
names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pycls_fast.errors import UserError, refusing
from pycls_fast.network import HEAD, is_inside, named_parts, unknown_part
from pycls_fast.parallel.launch import need_cuda

# CUDA's autocast computes these in float32 (torch's documentation, "CUDA Ops that can autocast to float32"), the CPU's
# only losses (torch 2.11 and 2.15). Batch norm is on neither list: its output has the input's format, its statistics
# and its arithmetic are float32.
_ADDED = (
    "layer_norm", "group_norm", "softmax.int", "log_softmax.int",
    "exp", "log", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar",
)  # fmt: skip


def keep_in_float32(device: torch.device) -> None:
    """Make the CPU's autocast compute norms, softmax, powers and logarithms in float32, as CUDA's does.

    A mode or a cast in the model would not apply to a forward pass that is recomputed in the backward pass.
    """
    if device.type == "cpu":
        _register()


@cache
def _register() -> torch.library.Library:
    """Kernels of torch's dispatcher, for the whole process."""
    library = torch.library.Library("aten", "IMPL")
    for name in _ADDED:
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(name, _in_float32(operator), "AutocastCPU")
    # Kernels are unregistered when the library is freed; the cache keeps it alive.
    return library


def _in_float32(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    autocast_keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def kernel(*arguments: Any, **named: Any) -> Tensor:
        with torch._C._ExcludeDispatchKeyGuard(autocast_keys):
            return operator(*map(_wide, arguments), **named)

    return kernel


def _wide(value: Any) -> Any:
    is_half = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_half else value


class RanksScaler(torch.amp.GradScaler):
    """torch's dynamic loss scale with one overflow decision for ranks that each hold a part of the gradients
    (Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2).

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


# torch._scaled_mm requires sides that are multiples of 16.
_MULTIPLE = 16
# Skipped by default, and not in every network.
_POOLING = "pooling"


def use_float8(
    network: nn.Module, device: torch.device, *, recipe: str, skip: Sequence[str], emulate: bool, head: str
) -> None:
    """Replace the network's linear layers in place by ones that multiply in float8.

    Args:
        network: its parameters stay the same objects.
        recipe: torchao's: "tensorwise", "rowwise" or "rowwise_with_gw_hp" (gradients of weights in high precision).
        skip: layers that are not replaced: "head", and qualified names of layers or of what they are in, with * for any
            part of a name.
        emulate: round to float8 and multiply in the wider format, on hardware without float8.

    Raises:
        UserError: the device has no float8, torchao is not installed, the network does not have a skipped name, or no
            layer qualifies.
    """
    if not emulate:
        # Ada and Hopper were the first with tensor cores for float8.
        instead = "precision=amp_bf16, or precision.fp8_emulate=true to try its rounding, slowly"
        need_cuda(device, "precision: fp8", instead, (8, 9))
    with refusing("precision: fp8 needs torchao", ImportError, use="pip install 'pycls_fast[torchao]'"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    skipped: list[str] = []
    for pattern in skip:
        parts = named_parts(network, pattern, head=head)
        if not parts and pattern != _POOLING:
            raise unknown_part("precision.fp8_skip", pattern, network, what="nothing in this network", words=(HEAD,))
        skipped += parts
    converted: list[str] = []

    def fits(module: nn.Module, name: str) -> bool:
        if not isinstance(module, nn.Linear) or is_inside(name, skipped):
            return False
        if module.in_features % _MULTIPLE or module.out_features % _MULTIPLE:
            return False
        converted.append(name)
        return True

    # The weight gradient is a product over a microbatch's tokens, whose number may not be a multiple of 16.
    settings: Any = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe), emulate=emulate, pad_inner_dim=True
    )
    convert_to_float8_training(network, config=settings, module_filter_fn=fits)
    if device.type == "cpu":
        for name in converted:
            network.get_submodule(name).register_forward_pre_hook(_autocast_input)
    if not converted:
        raise UserError(
            f"precision: fp8 found no linear layer with sides that are multiples of {_MULTIPLE} and outside "
            f"precision.fp8_skip={list(skip)}; use precision=amp_bf16"
        )


def _autocast_input(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Cast inputs as CPU autocast would: torchao only checks CUDA's autocast."""
    return tuple(x.to(torch.get_autocast_dtype("cpu")) for x in inputs) if torch.is_autocast_enabled("cpu") else inputs
