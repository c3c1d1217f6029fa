"""An optimizer on the host is the optimizer: same numbers, same checkpoint, same groups."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from pycls_fast.optim.optimizers import HostOptimizer, load_named_state, named_state, set_lr
from tests.factories import assert_same_bits, make_optimizer

Make = Callable[[list[dict[str, Any]]], Optimizer]
MAKERS: dict[str, Make] = {
    "adamw": partial(make_optimizer, "adamw", lr=0.1, betas=(0.9, 0.99), implementation="fused"),
    "sgd": partial(make_optimizer, "sgd", lr=0.1, momentum=0.9, implementation="foreach"),
}
by_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def groups(model: nn.Sequential) -> list[dict[str, Any]]:
    return [
        {"params": list(model[0].parameters()), "weight_decay": 0.1, "lr_scale": 0.5, "name": "first"},
        {"params": list(model[2].parameters()), "weight_decay": 0.0, "name": "second"},
    ]


def steps(model: nn.Module, optimizer: Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        torch.manual_seed(step)
        set_lr(optimizer, 0.1 / (step + 1))
        dtype = next(model.parameters()).dtype
        model(torch.randn(5, 6, dtype=dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@by_maker
def test_twenty_steps_are_those_of_the_plain_one(make: Make) -> None:
    plain, offloaded = network(), network()
    plain_optimizer, host = make(groups(plain)), HostOptimizer(groups(offloaded), make)
    steps(plain, plain_optimizer, 0, 20)
    steps(offloaded, host, 0, 20)
    assert_same_bits(offloaded.state_dict(), plain.state_dict())
    expected, found = plain_optimizer.state_dict(), host.state_dict()
    assert_same_bits(found["state"], expected["state"])
    assert [g["name"] for g in host.param_groups] == ["first", "second"]
    assert [g["lr"] for g in found["param_groups"]] == [g["lr"] for g in expected["param_groups"]]


@by_maker
def test_goes_on_from_its_own_and_from_a_plain_checkpoint(make: Make) -> None:
    straight = network()
    steps(straight, HostOptimizer(groups(straight), make), 0, 10)
    for kind in (make, lambda chosen: HostOptimizer(chosen, make)):
        before = network()
        optimizer = kind(groups(before))
        steps(before, optimizer, 0, 5)
        model, saved = network(), copy.deepcopy(optimizer.state_dict())
        host = HostOptimizer(groups(model), make)
        steps(model, host, 7, 9)  # values that have to go
        model.load_state_dict(before.state_dict())
        host.load_state_dict(saved)
        steps(model, host, 5, 10)
        assert_same_bits(model.state_dict(), straight.state_dict())


def test_a_rate_that_is_a_tensor_follows_the_schedule_after_loading() -> None:
    def with_tensors(chosen: list[dict[str, Any]]) -> Optimizer:
        made = MAKERS["adamw"](chosen)
        for group in made.param_groups:
            group["lr"] = torch.tensor(group["lr"])  # as compiled steps have it
        return made

    straight, model = network(), network()
    host = HostOptimizer(groups(straight), with_tensors)
    steps(straight, host, 0, 3)
    model.load_state_dict(straight.state_dict())
    resumed = HostOptimizer(groups(model), with_tensors)
    saved = copy.deepcopy(named_state(host, list(straight.named_parameters())))
    load_named_state(resumed, list(model.named_parameters()), saved)
    steps(straight, host, 3, 8)
    steps(model, resumed, 3, 8)
    assert_same_bits(model.state_dict(), straight.state_dict())


def test_a_head_that_is_fitted_after_the_optimizer_was_made_is_trained_further() -> None:
    plain, offloaded = network(), network()
    plain_optimizer, host = MAKERS["sgd"](groups(plain)), HostOptimizer(groups(offloaded), MAKERS["sgd"])
    for model, optimizer in ((plain, plain_optimizer), (offloaded, host)):
        nn.init.ones_(model[2].weight)
        steps(model, optimizer, 0, 3)
    assert_same_bits(offloaded.state_dict(), plain.state_dict())


def test_small_updates_of_bfloat16_weights_add_up_in_the_float32_copies() -> None:
    model = nn.Linear(4, 4, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    host = HostOptimizer([{"params": list(model.parameters())}], lambda g: torch.optim.SGD(g, lr=1e-4))
    for _ in range(100):
        model.weight.grad = torch.ones_like(model.weight)
        host.step()
    # One update is a fortieth of the distance between two bfloat16 numbers below 1.
    assert torch.equal(model.weight, torch.full_like(model.weight, 0.99))


def test_a_loss_scaler_skips_a_step_with_infinite_gradients() -> None:
    model = network()
    host = HostOptimizer(groups(model), MAKERS["adamw"])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for value, moves in ((float("inf"), False), (1.0, True)):
        before = [p.detach().clone() for p in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        scaler.scale(torch.ones(()))
        scaler.unscale_(host)
        scaler.step(host)
        scaler.update()
        assert all(torch.equal(a, b) != moves for a, b in zip(before, model.parameters(), strict=True))


FORMATS = (torch.contiguous_format, torch.channels_last)


@pytest.mark.parametrize("implementation", ["loop", "foreach", "fused"])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("saved", FORMATS)
def test_going_on_in_another_memory_format(
    name: str, implementation: str, on_host: bool, saved: torch.memory_format
) -> None:
    """Than that in which the state was saved, on the host or not."""

    def made(parameter: nn.Parameter) -> Optimizer:
        chosen = [{"params": [parameter], "weight_decay": 0.01, "lr_scale": 1.0}]
        make = partial(make_optimizer, name, lr=0.1, implementation=implementation)
        return HostOptimizer(chosen, make) if on_host else make(chosen)

    def train(optimizer: Optimizer, parameter: nn.Parameter, gradients: list[torch.Tensor]) -> None:
        for gradient in gradients:
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
            optimizer.step()

    gradients = list(torch.randn(4, 8, 4, 3, 3, generator=torch.Generator().manual_seed(0)))
    straight = nn.Parameter(torch.ones(8, 4, 3, 3).to(memory_format=saved))
    first = made(straight)
    train(first, straight, gradients[:2])
    state = copy.deepcopy(named_state(first, [("p", straight)]))
    (other,) = (f for f in FORMATS if f is not saved)
    resumed = nn.Parameter(straight.detach().clone(memory_format=other))
    second = made(resumed)
    load_named_state(second, [("p", resumed)], state)
    (values,) = (second.inner if isinstance(second, HostOptimizer) else second).state.values()
    assert all(v.stride() == resumed.stride() for v in values.values() if v.shape == resumed.shape)
    train(first, straight, gradients[2:])
    train(second, resumed, gradients[2:])
    torch.testing.assert_close(resumed, straight, rtol=1e-6, atol=1e-7)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_state_is_on_the_host_and_follows_the_plain_one() -> None:
    plain, offloaded = network().cuda(), network().cuda()
    plain_optimizer, host = MAKERS["adamw"](groups(plain)), HostOptimizer(groups(offloaded), MAKERS["adamw"])
    for model, optimizer in ((plain, plain_optimizer), (offloaded, host)):
        for step in range(20):
            torch.manual_seed(step)
            set_lr(optimizer, 0.01)
            model(torch.randn(5, 6).cuda()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(offloaded.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)
    assert {v.device.type for state in host.state_dict()["state"].values() for v in state.values()} == {"cpu"}
