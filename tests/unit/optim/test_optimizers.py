"""loop, foreach and fused are one mathematics: that of the papers, written out here in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pycls_fast.optim.optimizers import set_lr
from tests.factories import make_optimizer

IMPLEMENTATIONS = ("loop", "foreach", "fused")
SHAPES = [(), (7,), (3, 5), (4, 3, 2, 2), (33,)]
DECAYS = [0.3, 0.0, 0.05]
STEPS = 20

Update = Callable[[Tensor, Tensor, dict[str, Tensor], float, float, int], Tensor]


def adamw_formula(w: Tensor, g: Tensor, state: dict[str, Tensor], lr: float, decay: float, t: int) -> Tensor:
    """Algorithm 2 of Loshchilov and Hutter (2019) with torch's decay of lr * weight_decay; t counts from 1."""
    b1, b2, eps = 0.8, 0.95, 1e-3
    state["m"] = b1 * state.get("m", torch.zeros_like(w)) + (1 - b1) * g
    state["v"] = b2 * state.get("v", torch.zeros_like(w)) + (1 - b2) * g * g
    m, v = state["m"] / (1 - b1**t), state["v"] / (1 - b2**t)
    return w - lr * decay * w - lr * m / (v.sqrt() + eps)


def sgd_formula(nesterov: bool, momentum: float) -> Update:
    """Sutskever et al. (2013) as torch writes it: the buffer holds gradients, lr multiplies at the end."""

    def update(w: Tensor, g: Tensor, state: dict[str, Tensor], lr: float, decay: float, t: int) -> Tensor:
        g = g + decay * w
        state["b"] = g if t == 1 else momentum * state["b"] + g
        return w - lr * (g + momentum * state["b"] if nesterov else state["b"])

    return update


def run(make: Callable[[list[dict[str, object]]], torch.optim.Optimizer], formula: Update, dtype: torch.dtype) -> float:
    """The largest difference to the formula, relative to a parameter's size, after random steps."""
    generator = torch.Generator().manual_seed(3)

    def random(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    groups: list[dict[str, object]] = []
    own: list[tuple[nn.Parameter, float, float]] = []
    for decay, scale in zip(DECAYS, (1.0, 0.1, 2.0), strict=True):
        parameters = [nn.Parameter(random(shape).to(dtype)) for shape in SHAPES]
        groups.append({"params": parameters, "weight_decay": decay, "lr_scale": scale})
        own += [(parameter, decay, scale) for parameter in parameters]
    expected = [parameter.detach().double() for parameter, _, _ in own]
    states: list[dict[str, Tensor]] = [{} for _ in own]
    optimizer = make(groups)
    for step in range(STEPS):
        lr = 0.05 * (1 + math.sin(step)) + 1e-3
        set_lr(optimizer, lr)
        for i, (parameter, decay, scale) in enumerate(own):
            gradient = random(tuple(parameter.shape)).to(dtype)
            parameter.grad = gradient
            expected[i] = formula(expected[i], gradient.double(), states[i], lr * scale, decay, step + 1)
        optimizer.step()
    return max(
        ((parameter.detach().double() - wanted).abs().max() / wanted.abs().max()).item()
        for (parameter, _, _), wanted in zip(own, expected, strict=True)
    )


TOLERANCE = [(torch.float64, 1e-13), (torch.float32, 3e-5)]


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCE)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_adamw_is_its_formula(implementation: str, dtype: torch.dtype, tolerance: float) -> None:
    def make(groups: list[dict[str, object]]) -> torch.optim.Optimizer:
        return make_optimizer("adamw", groups, lr=9.0, betas=(0.8, 0.95), eps=1e-3, implementation=implementation)

    assert run(make, adamw_formula, dtype) < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCE)
@pytest.mark.parametrize(("nesterov", "momentum"), [(True, 0.9), (False, 0.7), (False, 0.0)])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sgd_is_its_formula(
    implementation: str, nesterov: bool, momentum: float, dtype: torch.dtype, tolerance: float
) -> None:
    def make(groups: list[dict[str, object]]) -> torch.optim.Optimizer:
        return make_optimizer(
            "sgd", groups, lr=9.0, momentum=momentum, nesterov=nesterov, implementation=implementation
        )

    assert run(make, sgd_formula(nesterov, momentum), dtype) < tolerance


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_implementation_is_the_one_asked_for(implementation: str) -> None:
    wanted = {"foreach": implementation == "foreach", "fused": implementation == "fused"}
    groups = [{"params": [nn.Parameter(torch.ones(1))]}]
    for optimizer in (
        make_optimizer("adamw", groups, lr=1, betas=(0.9, 0.9), eps=1, implementation=implementation),
        make_optimizer("sgd", groups, lr=1, momentum=0, nesterov=False, implementation=implementation),
    ):
        assert {name: optimizer.defaults[name] for name in wanted} == wanted


def test_set_lr_scales_groups_that_have_a_scale() -> None:
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    optimizer = torch.optim.SGD(
        [
            {"params": parameters[:1]},
            {"params": parameters[1:2], "lr_scale": 0.25},
            {"params": parameters[2:], "lr_scale": 0.0},
        ],
        lr=1.0,
    )
    for lr in (0.2, 0.6):
        set_lr(optimizer, lr)
        assert [group["lr"] for group in optimizer.param_groups] == [lr, 0.25 * lr, 0.0]
