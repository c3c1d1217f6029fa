"""The average of the weights against its formula in float64, and the swap that has to give back every bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pycls_fast.optim.ema import Ema
from pycls_fast.optim.owned_weights import OwnedWeights
from tests.factories import assert_same_bits

IMPLEMENTATIONS = ("loop", "foreach")


class Network(nn.Module):
    """Parameters of several shapes, BatchNorm's buffers (one is an integer), a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("table", torch.zeros(5), persistent=False)


def network(dtype: torch.dtype = torch.float64, *, channels_last: bool = False) -> Network:
    model = Network().to(dtype)
    if channels_last:
        model.to(memory_format=torch.channels_last)
    randomise(model, torch.Generator().manual_seed(1))
    return model


def randomise(model: nn.Module, generator: torch.Generator) -> None:
    """New values in place, as an optimizer and BatchNorm would write them."""
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.copy_(torch.randn(value.shape, generator=generator, dtype=torch.float64))
            else:
                value.add_(1)


def copies(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in values.items()}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("warmup", [False, True])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_it_is_its_formula(
    implementation: str, every: int, warmup: bool, channels_last: bool, dtype: torch.dtype, tolerance: float
) -> None:
    model = network(dtype, channels_last=channels_last)
    ema = Ema(OwnedWeights(model), decay=0.9, warmup=warmup, implementation=implementation, every=every)
    expected = {name: value.double().clone() for name, value in model.state_dict().items()}
    generator = torch.Generator().manual_seed(2)
    # With the warm-up (1 + t) / (10 + t) reaches 0.9 at t = 80.
    for step in range(99):
        randomise(model, generator)
        ema.update(step)
        if step % every == every - 1:
            decay = (min(0.9, (1 + step) / (10 + step)) if warmup else 0.9) ** every
            for name, value in model.state_dict().items():
                expected[name] = decay * expected[name] + (1 - decay) * value.double()
    # Counts are not averaged.
    expected["norm.num_batches_tracked"] = torch.tensor(100.0)
    for name, value in model.state_dict().items():
        assert ema.values[name].dtype == value.dtype
    found = {name: value.double() for name, value in ema.values.items()}
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, check_dtype=False)


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_swap_gives_back_every_bit(channels_last: bool) -> None:
    model = network(torch.float32, channels_last=channels_last)
    parameters = dict(model.named_parameters())
    ema = Ema(OwnedWeights(model), decay=0.7, warmup=False, implementation="foreach")
    for step in range(3):
        randomise(model, torch.Generator().manual_seed(step))
        ema.update(step)
    weights, averages = copies(model.state_dict()), copies(ema.values)
    assert not torch.equal(weights["head.weight"], averages["head.weight"])

    def evaluate() -> None:
        with ema.swapped_in():
            assert_same_bits(model.state_dict(), averages)
            assert all(model.get_parameter(name) is parameter for name, parameter in parameters.items())
            raise RuntimeError("in between")

    with pytest.raises(RuntimeError, match="in between"):
        evaluate()
    assert_same_bits(model.state_dict(), weights)
    assert_same_bits(ema.values, averages)
    # And it goes on from there.
    randomise(model, torch.Generator().manual_seed(9))
    ema.update(3)
    expected = 0.7 * averages["scale"] + 0.3 * model.scale.detach()
    torch.testing.assert_close(ema.values["scale"], expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_shared_weight_is_averaged_and_swapped_once(implementation: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    model[1].weight = model[0].weight
    randomise(model, torch.Generator().manual_seed(1))
    start = model[0].weight.detach().clone()
    ema = Ema(OwnedWeights(model), decay=0.9, warmup=False, implementation=implementation)
    randomise(model, torch.Generator().manual_seed(2))
    ema.update(0)
    weights = copies(model.state_dict())
    average = 0.9 * start + 0.1 * weights["0.weight"]
    for name in ("0.weight", "1.weight"):
        torch.testing.assert_close(ema.values[name], average)
    with ema.swapped_in():
        torch.testing.assert_close(model[1].weight.detach(), average)
    assert_same_bits(model.state_dict(), weights)
    torch.testing.assert_close(ema.values["1.weight"], average)
