"""Optimizers: one function per algorithm, with the implementation (`loop`, `foreach`, `fused`) as an argument.

What else is known of each is in `speed/optimizers.py`. None reads a value from the device: that is why Adafactor is
not torch's, which reads two norms of every tensor on the host at every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pycls_fast.errors import UserError
from pycls_fast.optim.groups import Group

Named = Iterable[tuple[str, nn.Parameter]]


def sgd(groups: Sequence[Group], *, lr: float, momentum: float, nesterov: bool, implementation: str) -> Optimizer:
    """SGD with momentum; `implementation` is loop, foreach or fused."""
    made = torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov, **_flags(implementation))
    if implementation == "fused" and momentum:
        # torch's fused step uses uninitialised memory as momentum if loss scaling skips the first step (2.11 to 2.15).
        for group in made.param_groups:
            for parameter in group["params"]:
                made.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return made


def adamw(
    groups: Sequence[Group], *, lr: float, betas: tuple[float, float], eps: float, implementation: str
) -> Optimizer:
    """AdamW (Loshchilov and Hutter, 2019) with bias correction; `implementation` is loop, foreach or fused."""
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, **_flags(implementation))


def lamb(
    groups: Sequence[Group], *, lr: float, betas: tuple[float, float], eps: float, implementation: str
) -> Optimizer:
    """LAMB (You et al., 2020, algorithm 2), timm's; `implementation` is loop or foreach.

    As in the code that DeiT III and ResNet strikes back were trained with (apex FusedLAMB, timm Lamb): bias
    correction, and no trust ratio for parameters without weight decay. Their clipping of the global gradient norm to 1
    is `optim.clip_norm` here.
    """
    import timm.optim

    made: Optimizer = timm.optim.Lamb(
        groups, lr=lr, betas=betas, eps=eps, max_grad_norm=None, foreach=implementation == "foreach"
    )
    # timm counts steps in the groups; our checkpoints save only the parameters' state.
    made.register_state_dict_post_hook(_steps_into_state)
    made.register_load_state_dict_post_hook(_steps_from_state)
    return made


def lion(groups: Sequence[Group], *, lr: float, betas: tuple[float, float], implementation: str) -> Optimizer:
    """Lion (Chen et al., 2023, algorithm 2), timm's; `implementation` is loop or foreach."""
    import timm.optim

    made: Optimizer = timm.optim.Lion(groups, lr=lr, betas=betas, foreach=implementation == "foreach")
    return made


def adafactor(
    groups: Sequence[Group],
    *,
    lr: float,
    momentum: float,
    momentum_dtype: str,
    beta2_decay: float,
    beta2_cap: float,
    min_factored: int,
    clip_threshold: float | None,
) -> Optimizer:
    """Adafactor (Shazeer and Stern, 2018) as Zhai et al. (2022, section 3.4) changed it for ViTs, timm's; a loop.

    No scaling by the parameter, momentum in `momentum_dtype` (bfloat16 or float32), beta2 of step t is
    `min(beta2_cap, 1 - t ** -beta2_decay)`; second moments of tensors with two axes of `min_factored` or more are
    factored into rows and columns. Weight decay is `lr * weight_decay` per step, as in AdamW.
    """
    import timm.optim

    made: Optimizer = timm.optim.AdafactorBigVision(
        groups,
        lr=lr,
        momentum=momentum,
        momentum_dtype=momentum_dtype,
        decay_rate=beta2_decay,
        beta2_cap=beta2_cap,
        min_dim_size_to_factor=min_factored,
        clipping_threshold=clip_threshold,
    )
    return made


def muon(
    groups: Sequence[Group],
    *,
    lr: float,
    momentum: float,
    nesterov: bool,
    newton_schulz_steps: int,
    betas: tuple[float, float],
    eps: float,
) -> Optimizer:
    """Muon (Jordan et al., 2024) on groups with `hidden`, AdamW on the others, timm's; a loop.

    The update of a matrix is scaled by `0.2 * sqrt(max(rows, columns))`, to the size of AdamW's, so that AdamW's lr and
    weight decay serve both (Liu et al., 2025, section 2.2). Convolutions are flattened to (out, in * height * width).
    """
    import timm.optim

    # Without Nesterov the other parameters get AdamW; with it timm would give them NAdamW.
    # Of the hidden ones timm's `eps` is the least norm in the Newton-Schulz iteration, not AdamW's.
    kinds: dict[bool, dict[str, Any]] = {
        True: {"use_muon": True, "nesterov": nesterov, "eps": 1e-7},
        False: {"use_fallback": True, "nesterov": False},
    }
    made: Optimizer = timm.optim.Muon(
        [{**group, **kinds[group["hidden"]]} for group in groups],
        lr=lr,
        momentum=momentum,
        ns_steps=newton_schulz_steps,
        ns_coefficients="original",
        adjust_lr_fn="match_rms_adamw",
        conv_mode="flatten",
        betas=betas,
        eps=eps,
    )
    return made


def adamw8bit(groups: Sequence[Group], *, lr: float, betas: tuple[float, float], eps: float) -> Optimizer:
    """AdamW with both moments in blocks of 256 8-bit numbers (Dettmers et al., 2022), torchao's.

    Tensors whose size is below 4096 or not a multiple of 256 keep float32 moments. torchao compiles each parameter's
    update, on a CPU with the machine's C++ compiler.

    Raises:
        UserError: torchao is not installed.
    """
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise UserError(
            "optim.name: adamw8bit needs torchao, which is not installed; pip install -e '.[torchao]'"
        ) from error
    return AdamW8bit(groups, lr=lr, betas=betas, eps=eps)


# Too small to change any weight other than 0.
_LEAST_LR = 1e-30


def compile_step(optimizer: Optimizer) -> None:
    """Compile the optimizer's step in place, with each group's lr as a tensor so that a new value compiles nothing."""
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32)
        if group.get("foreach") and "capturable" in group:
            # torch requires this of foreach with a tensor lr; its check of the device is for uncompiled steps.
            group["capturable"] = True
    compiled = torch.compile(optimizer.step)

    def step(*args: Any, **kwargs: Any) -> Any:
        for group in optimizer.param_groups:
            # torch's compiled Adam divides by the lr: at 0, where a warm-up begins, a gradient of zero would make
            # weights NaN. It first multiplies the lr (by 0.3 with betas of 0.9 and 0.999); the product must stay above
            # 0 even if denormals are flushed.
            group["lr"].clamp_(min=_LEAST_LR)
        return compiled(*args, **kwargs)

    optimizer.step = step  # type: ignore[method-assign]


def make_capturable(optimizer: Optimizer, device: torch.device) -> None:
    """Prepare the step for recording in a CUDA graph: each group's lr becomes a tensor that the graph reads."""
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32, device=device)
        if "capturable" in group:
            group["capturable"] = True


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set every group's learning rate, multiplied by the group's `lr_scale` if it has one.

    A learning rate that is a tensor is changed in place.
    """
    for group in optimizer.param_groups:
        value = lr * group.get("lr_scale", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


def named_state(optimizer: Optimizer, parameters: Named) -> dict[str, dict[str, Any]]:
    """The optimizer's state by parameter name, independent of its groups and implementation.

    Args:
        optimizer: any optimizer.
        parameters: its parameters by name (`model.named_parameters()`).
    """
    state = optimizer.state_dict()["state"]
    return {name: state[index] for index, name in _names(optimizer, parameters) if index in state}


def load_named_state(optimizer: Optimizer, parameters: Named, state: Mapping[str, dict[str, Any]]) -> None:
    """Restore what `named_state` returned; the groups keep their settings.

    Raises:
        KeyError: the optimizer does not have a parameter that the state names.
    """
    index_of = {name: index for index, name in _names(optimizer, parameters)}
    by_index = {index_of[name]: values for name, values in state.items()}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": by_index})
    # `HostOptimizer` keeps its state in its inner optimizer.
    _follow_layouts(getattr(optimizer, "inner", optimizer))


def _follow_layouts(optimizer: Optimizer) -> None:
    """Put the state in its parameters' memory format, which may differ from that of the run that saved it.

    torch's fused steps iterate in memory order: with different strides they silently pair the wrong elements (CPU,
    2.11 to 2.15).
    """
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            if type(value) is Tensor and value.shape == parameter.shape and value.stride() != parameter.stride():
                values[key] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _flags(implementation: str) -> dict[str, bool]:
    # Both flags are explicit: with None torch would choose by itself.
    return {"foreach": implementation == "foreach", "fused": implementation == "fused"}


def _names(optimizer: Optimizer, parameters: Named) -> list[tuple[int, str]]:
    # torch numbers parameters in the order of the groups.
    name_of = {parameter: name for name, parameter in parameters}
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [(index, name_of[parameter]) for index, parameter in enumerate(owned)]


def _steps_into_state(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    parameters: dict[int, dict[str, Any]] = {}
    for group in state["param_groups"]:
        for index in group["params"]:
            if index in state["state"]:
                parameters[index] = {**state["state"][index], "step": group["step"]}
    return {**state, "state": parameters}


def _steps_from_state(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        steps = [optimizer.state[p].pop("step") for p in group["params"] if "step" in optimizer.state.get(p, {})]
        if steps:
            # A clone: parameters saved from one group may now be in several, which must not share a counter.
            group["step"] = steps[0].to("cpu", torch.float32).clone()
