"""Optimizer state that was saved in another memory format than the one its parameters have now."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pycls_fast.optim.offload import HostOptimizer
from pycls_fast.optim.optimizers import load_named_state, named_state
from tests.factories import make_optimizer

FORMATS = (torch.contiguous_format, torch.channels_last)
SHAPE = (8, 4, 3, 3)


def optimizer(name: str, parameter: nn.Parameter, implementation: str, *, on_host: bool) -> torch.optim.Optimizer:
    groups: Any = [{"params": [parameter], "weight_decay": 0.01, "lr_scale": 1.0}]
    if on_host:
        return HostOptimizer(groups, lambda copies: _plain(name, copies, implementation))
    return _plain(name, groups, implementation)


def _plain(name: str, groups: Any, implementation: str) -> torch.optim.Optimizer:
    if name == "adamw":
        return make_optimizer("adamw", groups, lr=0.1, betas=(0.9, 0.999), eps=1e-8, implementation=implementation)
    return make_optimizer("sgd", groups, lr=0.1, momentum=0.9, nesterov=False, implementation=implementation)


def train(stepped: torch.optim.Optimizer, parameter: nn.Parameter, gradients: list[Tensor]) -> None:
    for gradient in gradients:
        parameter.grad = torch.empty_like(parameter).copy_(gradient)
        stepped.step()


@pytest.mark.parametrize("implementation", ["loop", "foreach", "fused"])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("saved", FORMATS)
def test_going_on_in_another_memory_format(
    name: str, implementation: str, on_host: bool, saved: torch.memory_format
) -> None:
    gradients = list(torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(0)))
    start = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    straight = nn.Parameter(start.clone(memory_format=saved))
    first = optimizer(name, straight, implementation, on_host=on_host)
    train(first, straight, gradients[:2])
    state = copy.deepcopy(named_state(first, [("p", straight)]))
    (other,) = (f for f in FORMATS if f is not saved)
    resumed = nn.Parameter(straight.detach().clone(memory_format=other))
    second = optimizer(name, resumed, implementation, on_host=on_host)
    load_named_state(second, [("p", resumed)], state)
    (values,) = (second.inner if isinstance(second, HostOptimizer) else second).state.values()
    assert all(v.stride() == resumed.stride() for v in values.values() if v.shape == resumed.shape)
    train(first, straight, gradients[2:])
    train(second, resumed, gradients[2:])
    torch.testing.assert_close(resumed, straight, rtol=1e-6, atol=1e-7)
