"""Clipping is torch's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pycls_fast.parallel import ParallelModel


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("max_norm", [None, 0.1, 1e6])
def test_clipping_is_torchs(foreach: bool, max_norm: float | None) -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).double()
    ours(torch.randn(7, 5, dtype=torch.float64)).square().sum().backward()
    theirs = copy.deepcopy(ours)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert mine.grad is not None
        other.grad = mine.grad.clone()
    wrapped = ParallelModel(forward=ours, evaluated=ours, device=torch.device("cpu"))
    norm = wrapped.clip(list(ours.parameters()), max_norm, foreach=foreach)
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), float("inf") if max_norm is None else max_norm)
    torch.testing.assert_close(norm, expected)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=0)
