"""Adapted weights, against factors that autograd differentiates itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from pycls_fast.optim.owned_weights import LowRank
from tests.factories import assert_same_bits


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.Flatten(), nn.Linear(6 * 4, 5)).double()


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 3, 4, 4, dtype=torch.float64, generator=generator) for _ in range(6)]


def stepped(rank: int, *, at_once: bool) -> tuple[nn.Sequential, LowRank, torch.optim.Optimizer]:
    """Three steps of two microbatches."""
    model = network()
    weights = LowRank(model, {"0.weight", "2.weight"}, rank, seed=3, at_once=at_once)
    (group,) = weights.owned_groups([{"params": list(model.parameters()), "weight_decay": 0.0}])
    optimizer = torch.optim.AdamW(group["params"], lr=0.01, weight_decay=0.1)
    for index, images in enumerate(batches()):
        model(images).square().mean().backward()
        assert (model[0].weight.grad is None) == at_once
        if index % 2:
            weights.take_gradients()
            optimizer.step()
            optimizer.zero_grad()
            weights.copy_to_model()
    return model, weights, optimizer


@pytest.mark.parametrize("at_once", [True, False])
def test_steps_are_those_of_the_factors(at_once: bool) -> None:
    model, _, _ = stepped(2, at_once=at_once)
    plain = network()
    start = LowRank(plain, {"0.weight", "2.weight"}, 2, seed=3, at_once=False)
    factors = {name: value for name, value in start.named_parameters() if name.endswith((".down", ".up"))}
    own = {name: nn.Parameter(value.detach().clone()) for name, value in plain.named_parameters()}
    biases = [own["0.bias"], own["2.bias"]]
    optimizer = torch.optim.AdamW([*factors.values(), *biases], lr=0.01, weight_decay=0.1)

    def whole() -> dict[str, Any]:
        sums = {
            name: own[name].detach() + 8.0 * (factors[f"{name}.up"] @ factors[f"{name}.down"]).view_as(own[name])
            for name in ("0.weight", "2.weight")
        }
        return {**own, **sums}

    for index, images in enumerate(batches()):
        functional_call(plain, whole(), (images,)).square().mean().backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(dict(model.named_parameters()), whole(), rtol=1e-12, atol=1e-12)
    assert not torch.equal(model[0].weight, network()[0].weight)


def test_it_begins_with_the_network_as_it_is() -> None:
    model = network()
    weights = LowRank(model, {"0.weight"}, 2, seed=3, at_once=True)
    weights.copy_to_model()
    assert torch.equal(model[0].weight, network()[0].weight)
    assert {name for name, _ in weights.named_parameters()} == {
        "0.weight.down", "0.weight.up", "0.bias", "2.weight", "2.bias",
    }  # fmt: skip


def test_what_was_saved_goes_on_with_the_same_bits() -> None:
    model, weights, optimizer = stepped(2, at_once=True)
    saved = torch.utils._pytree.tree_map(
        lambda value: value.clone() if isinstance(value, Tensor) else value,
        {"model": weights.state_dict(), "optimizer": weights.optimizer_state(optimizer)},
    )
    assert saved["optimizer"].keys() == dict(model.named_parameters()).keys()
    other, into, fresh = stepped(2, at_once=True)
    for parameter in into.parameters:
        parameter.data.normal_()
    into.load_state_dict(saved["model"])
    into.load_optimizer_state(fresh, saved["optimizer"])
    for a, w, o in ((model, weights, optimizer), (other, into, fresh)):
        a(batches()[0]).square().mean().backward()
        o.step()
        w.copy_to_model()
    assert_same_bits(other.state_dict(), model.state_dict())
