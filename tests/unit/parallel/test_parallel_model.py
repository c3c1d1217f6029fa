"""Clipping against torch's, the buckets of replicas, batch norm over ranks with one rank in this process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pycls_fast.models.external import GivenNetwork
from pycls_fast.optim.groups import keep_statistics
from pycls_fast.parallel.ddp import HostSyncBatchNorm, bucket_megabytes, replicate, synchronise
from pycls_fast.parallel.parallel_model import ParallelModel, StrategySettings
from pycls_fast.parallel.world import World
from pycls_fast.values import Size

SHAPES = [(), (7,), (40, 33), (128, 65), (4, 3, 2, 2), (1000,)]


def clipped(dtype: torch.dtype, limit: float | None, *, foreach: bool | None) -> tuple[float, list[Tensor]]:
    """The norm before clipping, and the gradients after it; by torch's function without `foreach`."""
    generator = torch.Generator().manual_seed(2)
    weights = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    for value in weights:
        # The same numbers in every format.
        value.grad = torch.randn(value.shape, generator=generator, dtype=torch.float64).float().to(dtype)
    model = nn.ParameterList(weights)
    if foreach is None:
        norm = nn.utils.clip_grad_norm_(weights, float("inf") if limit is None else limit)
    else:
        norm = ParallelModel(model, model, torch.device("cpu")).clip(weights, limit, foreach=foreach)
    return norm.item(), [value.grad.double() for value in weights if value.grad is not None]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("limit", [None, 0.1, 1e6])
def test_clipping_is_torchs_in_float64(
    foreach: bool, limit: float | None, dtype: torch.dtype, tolerance: float
) -> None:
    norm, ours = clipped(dtype, limit, foreach=foreach)
    expected, theirs = clipped(torch.float64, limit, foreach=None)
    assert norm == pytest.approx(expected, rel=tolerance)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=0)


@pytest.mark.parametrize(
    # ResNet-50, ViT-B, ViT-L, ViT-H.
    ("millions", "megabytes"),
    [(25, 25), (86, 25), (304, 72), (632, 100)],
)
def test_large_models_have_large_buckets_and_every_model_several(millions: int, megabytes: int) -> None:
    assert bucket_megabytes(4e6 * millions) == megabytes


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_frozen_batch_norm_of_all_ranks_stays_frozen(device: str) -> None:
    network = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3))
    keep_statistics(network[0])
    synchronise(network, torch.device(device))
    assert not any(isinstance(norm, nn.BatchNorm2d) for norm in network)
    network.eval().train()
    assert [norm.training for norm in network] == [False, True]
    network.eval()
    maps = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(network(maps), maps / (1 + 1e-5))


@pytest.mark.parametrize(
    ("sides", "keys"),
    [
        (1, {}),
        (2, {}),
        # A given module may lack parts, as the norm before a linear probe (MAE's), which has no weights.
        (1, {"affine": False, "momentum": None}),
        (2, {"track_running_stats": False}),
    ],
)
def test_batch_norm_over_one_rank_is_batch_norm(world: World, sides: int, keys: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = (nn.BatchNorm1d if sides == 1 else nn.BatchNorm2d)(3, **keys).double()
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    synchronised = copy.deepcopy(plain)
    owned = dict(synchronised.named_parameters())
    synchronise(nn.Sequential(synchronised), torch.device("cpu"))
    assert type(synchronised) is HostSyncBatchNorm
    assert all(value is owned[name] for name, value in synchronised.named_parameters())
    for _ in range(3):
        maps = torch.randn(4, 3, *[5] * sides, dtype=torch.float64) * 3 + 1
        results = []
        for norm in (plain, synchronised):
            images = maps.clone().requires_grad_()
            out = norm(images)
            out.square().mul(torch.arange(5.0)).sum().backward()
            gradients = [parameter.grad for parameter in norm.parameters()]
            results.append((out, images.grad, gradients, dict(norm.named_buffers())))
        torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)
    plain.eval()
    synchronised.eval()
    torch.testing.assert_close(synchronised(maps), plain(maps), rtol=1e-12, atol=1e-12)


class Masked(nn.Sequential):
    """Has a parameter that no step uses, as encoders that were trained on masked images."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(48, 5))
        self.mask_token = nn.Parameter(torch.zeros(8))


@pytest.mark.parametrize("module", [Masked(), nn.Sequential(nn.Flatten(), nn.Linear(48, 5))])
def test_replicas_of_a_given_module_may_leave_parameters_out(world: World, module: nn.Module) -> None:
    network = GivenNetwork(module, 5, Size(4, 4))
    forward = replicate(network, world, StrategySettings()).forward
    images_BCHW = torch.randn(2, 3, 4, 4)
    for _ in range(3):
        forward(images_BCHW).square().mean().backward()
    alone = copy.deepcopy(module)
    alone(images_BCHW).square().mean().backward()
    for ours, theirs in zip(network.network.parameters(), alone.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None and theirs.grad is not None:
            torch.testing.assert_close(ours.grad, 3 * theirs.grad)
