"""A first step that loss scaling skips leaves no trace, whatever the implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.factories import make_optimizer


@pytest.mark.parametrize("implementation", ["loop", "foreach", "fused"])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_as_if_it_had_not_been(name: str, implementation: str) -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(300), [torch.full((300,), torch.inf), torch.randn(300), torch.randn(300)]
    ends = []
    for skipped in (False, True):
        # What the allocator gives back is what was there: not a number.
        del_me = [torch.full((300,), torch.nan) for _ in range(8)]
        del del_me
        parameter = nn.Parameter(start.clone())
        settings: dict[str, Any] = (
            {"momentum": 0.9, "nesterov": True} if name == "sgd" else {"betas": (0.9, 0.99), "eps": 1e-8}
        )
        optimizer = make_optimizer(
            name, [{"params": [parameter], "weight_decay": 0.1}], lr=0.1, implementation=implementation, **settings
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
        for gradient in gradients if skipped else gradients[1:]:
            # scale() is what makes the scaler's tensors.
            scaler.scale(torch.ones(()))
            parameter.grad = gradient * scaler.get_scale()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        ends.append(parameter.detach().clone())
    assert torch.isfinite(ends[1]).all()
    # A power of two scales without rounding.
    assert torch.equal(ends[0], ends[1])
