"""Batch norm over ranks, with one rank in this process; tests/integration compares several."""

from __future__ import annotations

import copy

import torch
from torch import nn

from pycls_fast.parallel import World
from pycls_fast.parallel.batch_norm import synchronise


def test_batch_norm_over_one_rank_is_batch_norm(world: World) -> None:
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(3).double()
    nn.init.normal_(plain.weight)
    nn.init.normal_(plain.bias)
    synchronised = copy.deepcopy(plain)
    owned = dict(synchronised.named_parameters())
    synchronise(nn.Sequential(synchronised), torch.device("cpu"))
    assert type(synchronised) is not nn.BatchNorm2d
    assert all(value is owned[name] for name, value in synchronised.named_parameters())
    for _ in range(2):
        maps = torch.randn(4, 3, 5, 5, dtype=torch.float64) * 3 + 1
        results = []
        for norm in (plain, synchronised):
            images = maps.clone().requires_grad_()
            out = norm(images)
            out.square().mul(torch.arange(5.0)).sum().backward()
            results.append((out, images.grad, norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var))
        for mine, other in zip(*results, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)
    assert synchronised.num_batches_tracked == 2
    plain.eval()
    synchronised.eval()
    torch.testing.assert_close(synchronised(maps), plain(maps), rtol=1e-12, atol=1e-12)
