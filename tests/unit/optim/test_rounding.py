"""foreach against loop for the average and for clipping, by the rule of the class; averages every N steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pycls_fast.optim.ema import Ema
from pycls_fast.optim.weights import ModelWeights
from pycls_fast.parallel import ParallelModel

CPU = torch.device("cpu")
SHAPES = [(), (7,), (40, 33), (128, 65), (4, 3, 2, 2), (1000,)]


def network(generator: torch.Generator, dtype: torch.dtype) -> nn.ParameterList:
    shapes = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    return nn.ParameterList([nn.Parameter(value.to(dtype)) for value in shapes])


def average(implementation: str, dtype: torch.dtype, *, steps: int = 50) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    model = network(generator, dtype)
    ema = Ema(ModelWeights(model), decay=0.97, warmup=True, implementation=implementation)
    for step in range(steps):
        with torch.no_grad():
            for value in model.parameters():
                change = torch.randn(value.shape, generator=generator, dtype=torch.float64)
                # The same numbers in every format.
                value.add_(change.float().to(dtype))
        ema.update(step)
    return [value.double() for value in ema.values.values()]


def test_the_average_by_foreach_is_as_near_to_float64_as_the_loop() -> None:
    # The weights differ by their own rounding; what is compared is the average of float32 weights.
    def worst(implementation: str) -> float:
        exact = average("loop", torch.float64)
        return max(
            ((one - other).norm() / other.norm()).item()
            for one, other in zip(average(implementation, torch.float32), exact, strict=True)
        )

    reference, fast = worst("loop"), worst("foreach")
    assert 0 < fast <= 4 * reference < 1e-5


@pytest.mark.parametrize("warmup", [False, True])
@pytest.mark.parametrize("implementation", ["loop", "foreach"])
def test_every_third_step_with_the_third_power(implementation: str, warmup: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    model = network(generator, torch.float64)
    ema = Ema(ModelWeights(model), decay=0.9, warmup=warmup, implementation=implementation, every=3)
    expected = [value.detach().clone() for value in model.parameters()]
    updates = 0
    for step in range(100):
        with torch.no_grad():
            for value in model.parameters():
                value.add_(torch.randn(value.shape, generator=generator, dtype=torch.float64))
        ema.update(step)
        if step % 3 == 2:
            updates += 1
            decay = (min(0.9, (1 + step) / (10 + step)) if warmup else 0.9) ** 3
            expected = [decay * e + (1 - decay) * v.detach() for e, v in zip(expected, model.parameters(), strict=True)]
        for value, wanted in zip(ema.values.values(), expected, strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)
    assert updates == 33


def clipped(foreach: bool, dtype: torch.dtype, limit: float) -> tuple[float, list[Tensor]]:
    """The norm before clipping, and the gradients after it."""
    generator = torch.Generator().manual_seed(2)
    model = network(generator, dtype)
    for value in model.parameters():
        value.grad = torch.randn(value.shape, generator=generator, dtype=torch.float64).float().to(dtype)
    gradients = [value.grad for value in model.parameters() if value.grad is not None]
    norm = ParallelModel(model, model, CPU).clip(list(model.parameters()), limit, foreach=foreach)
    return norm.item(), [gradient.double() for gradient in gradients]


@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_clipping_by_foreach_is_as_near_to_float64_as_the_loop(limit: float) -> None:
    norm, exact = clipped(False, torch.float64, limit)
    worst = []
    for foreach in (False, True):
        own_norm, gradients = clipped(foreach, torch.float32, limit)
        error = max(((g - e).norm() / e.norm()).item() for g, e in zip(gradients, exact, strict=True))
        worst.append((abs(own_norm - norm) / norm, error))
    (loop_norm, loop_error), (fast_norm, fast_error) = worst
    # Half a unit in the last place is nobody's error.
    assert fast_norm <= 4 * loop_norm + 6e-8
    assert fast_error <= 4 * loop_error + 6e-8
    assert max(loop_error, fast_error) < 1e-6
    assert min(norm, limit) == pytest.approx(sum(e.square().sum().item() for e in exact) ** 0.5, rel=1e-5)
