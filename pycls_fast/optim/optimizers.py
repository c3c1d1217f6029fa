"""What is done to every optimizer: rates, compilation, CUDA graphs, state by the names of parameters, the host. The
optimizers themselves are in `choices.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Named = Iterable[tuple[str, nn.Parameter]]
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
    """Set every group's learning rate, multiplied by the group's `lr_scale` if it has one."""
    for group in optimizer.param_groups:
        _set_group_lr(group, lr * group.get("lr_scale", 1.0))


def _set_group_lr(group: dict[str, Any], lr: float) -> None:
    # Compiled and captured steps read this tensor, so it is changed in place.
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


def named_state(optimizer: Optimizer, parameters: Named) -> dict[str, dict[str, Any]]:
    """The optimizer's state by parameter name, independent of its groups and implementation."""
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


def _names(optimizer: Optimizer, parameters: Named) -> list[tuple[int, str]]:
    # torch numbers parameters in the order of the groups.
    name_of = {parameter: name for name, parameter in parameters}
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [(index, name_of[parameter]) for index, parameter in enumerate(owned)]


def steps_into_state(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """A hook of `state_dict`: the steps that timm counts in the groups are copied into the parameters' state."""
    parameters: dict[int, dict[str, Any]] = {}
    for group in state["param_groups"]:
        for index in group["params"]:
            if index in state["state"]:
                parameters[index] = {**state["state"][index], "step": group["step"]}
    return {**state, "state": parameters}


def steps_from_state(optimizer: Optimizer) -> None:
    """The hook that undoes `steps_into_state` after `load_state_dict`."""
    for group in optimizer.param_groups:
        steps = [optimizer.state[p].pop("step") for p in group["params"] if "step" in optimizer.state.get(p, {})]
        if steps:
            # A clone: parameters saved from one group may now be in several, which must not share a counter.
            group["step"] = steps[0].to("cpu", torch.float32).clone()


class HostOptimizer(Optimizer):
    """Runs another optimizer on float32 copies of the parameters on the CPU (ZeRO-Offload, Ren et al. 2021).

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

    def __init__(self, groups: Sequence[dict[str, Any]], make: Callable[[list[dict[str, Any]]], Optimizer]) -> None:
        copy_of = {p: nn.Parameter(_host_like(p).copy_(p.detach())) for group in groups for p in group["params"]}
        self._pairs = list(copy_of.items())
        # A new head is fitted after this optimizer was made.
        self._is_current = False
        self.inner = make([{**group, "params": [copy_of[p] for p in group["params"]]} for group in groups])
        settings = zip(self.inner.param_groups, groups, strict=True)
        super().__init__([{**inner, "params": list(g["params"])} for inner, g in settings], self.inner.defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the device's parameters from their gradients; there is no `closure`."""
        if not self._is_current:
            for parameter, copy in self._pairs:
                copy.copy_(parameter)
            self._is_current = True
        for parameter, copy in self._pairs:
            if parameter.grad is None:
                copy.grad = None
                continue
            if copy.grad is None:
                copy.grad = _host_like(parameter)
            copy.grad.copy_(parameter.grad, non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            _set_group_lr(inner, group["lr"])
        self.inner.step()
        for parameter, copy in self._pairs:
            if parameter.grad is not None:
                parameter.copy_(copy, non_blocking=True)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state; the next step begins with the values that the parameters have then."""
        self.inner.load_state_dict(state_dict)
        self._is_current = False


def _host_like(parameter: Tensor) -> Tensor:
    """An empty CPU tensor in float32 (float64 for float64) and the parameter's memory format."""
    dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    empty = torch.empty_like(parameter, device="cpu", dtype=dtype)
    return empty.pin_memory() if parameter.device.type == "cuda" else empty
