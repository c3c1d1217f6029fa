"""Blocks and experts that ranks divide compute what they compute whole: two ranks in this process, by torch's
LocalTensorMode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from pycls_fast import build
from pycls_fast.network import Network
from pycls_fast.optim.groups import freeze
from pycls_fast.parallel.tensor import divide, divide_experts, is_divided
from tests.factories import config_of, imagined, randomise

RANKS = 2
# 17 tokens, of which two ranks cannot have as many each.
SIZES = [
    "model.width=32", "model.depth=2", "model.mlp_width=36", "model.class_token=true", "model.expert_capacity=1",
    "parallel=fsdp", "parallel.tensor_degree=2",
]  # fmt: skip
DRAWN = ["model.drop_path=0.2", "model.qk_norm=true", "model.layer_scale=0.1"]
IMAGES_BCHW = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
Both = list[Tensor]


@pytest.fixture
def ranks() -> Iterator[LocalTensorMode]:
    """A mode in which a tensor has a value on each rank."""
    with imagined(RANKS), LocalTensorMode(RANKS) as mode:
        yield mode


def mesh(name: str) -> DeviceMesh:
    return init_device_mesh("cpu", (RANKS,), mesh_dim_names=(name,))


def network(*overrides: str) -> Network:
    """Of a block with an MLP and one with experts; the same random values each time, in float64."""
    config = config_of(*SIZES, *overrides, name="vit_moe_digits")
    made: Network = randomise(build.model(config, 10, build.switches(config, torch.device("cpu"))))
    return made


def trained(model: Network, images_BCHW: Tensor) -> dict[str, Any]:
    """Logits and gradients of a pass."""
    torch.manual_seed(1)
    logits_BK = model.train()(images_BCHW)
    logits_BK.square().sum().backward()
    return {"logits": logits_BK.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def on_each(value: Any) -> Both:
    """Whole, on each rank."""
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return list(value._local_tensors.values()) if isinstance(value, LocalTensor) else [value] * RANKS


def test_divided_blocks_are_whole_ones(ranks: LocalTensorMode) -> None:
    """With an MLP and with experts: logits and gradients on both ranks, in float64; which parameters are divided."""
    with ranks.disable():
        expected = trained(network(*DRAWN), IMAGES_BCHW)
    ours, among = network(*DRAWN), mesh("tensor")
    divide(ours, [block for _, block in ours.units()], among)
    divide_experts(ours, among)
    found = trained(ours, IMAGES_BCHW)
    assert found.keys() == expected.keys()
    for key, value in found.items():
        for own in on_each(value):
            torch.testing.assert_close(own, expected[key], rtol=0, atol=1e-10, msg=key)
    for parameter in ours.parameters():
        parts = on_each(parameter.to_local() if isinstance(parameter, DTensor) else parameter)
        assert is_divided(parameter) == (parts[0].shape != parameter.shape)
    for _, first, last in ours.experts():
        # As any MLP: its hidden width, so that nothing is exchanged between the two.
        assert (first.weight.placements, last.weight.placements) == ((Shard(1),), (Shard(2),))


def test_what_is_frozen_stays_frozen(ranks: LocalTensorMode) -> None:
    ours = network(*DRAWN)
    freeze(ours, ["head", "blocks.1*"])
    trains = {name: parameter.requires_grad for name, parameter in ours.named_parameters()}
    divide(ours, [block for _, block in ours.units()], mesh("tensor"))
    assert {name: parameter.requires_grad for name, parameter in ours.named_parameters()} == trains
    assert set(trains.values()) == {True, False}


def test_divided_experts_see_the_images_of_all_ranks(ranks: LocalTensorMode) -> None:
    """Gradients of experts are means over the ranks, of all else a rank's own; evaluation sends the experts instead."""
    with ranks.disable():
        theirs = [IMAGES_BCHW * (rank + 1) for rank in range(RANKS)]
        expected = [trained(network(), each) for each in theirs]
        scores = [network().eval()(each) for each in theirs]
    ours = network()
    divide_experts(ours, mesh("expert"))
    seen = ranks.rank_map(lambda rank: theirs[rank])
    for own, alone in zip(on_each(ours.eval()(seen)), scores, strict=True):
        torch.testing.assert_close(own, alone, rtol=0, atol=1e-10)
    for key, value in trained(ours, seen).items():
        for own, alone in zip(on_each(value), expected, strict=True):
            mean = torch.stack([each[key] for each in expected]).mean(0)
            torch.testing.assert_close(own, mean if isinstance(value, DTensor) else alone[key], rtol=0, atol=1e-10)
    assert any(isinstance(parameter, DTensor) for parameter in ours.parameters())
