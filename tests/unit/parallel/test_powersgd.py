"""What low-rank gradients leave out, by parameter, in each memory format; one rank in this process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pycls_fast.parallel.powersgd import PowerSGD

FORMATS = (torch.contiguous_format, torch.channels_last)


pytestmark = pytest.mark.usefixtures("world")


def network(memory_format: torch.memory_format) -> nn.Module:
    torch.manual_seed(0)
    return nn.Conv2d(16, 16, 3).to(memory_format=memory_format)  # type: ignore[call-overload, no-any-return]


def compressed(memory_format: torch.memory_format) -> tuple[DistributedDataParallel, PowerSGD]:
    model = DistributedDataParallel(network(memory_format), gradient_as_bucket_view=True)
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    return model, PowerSGD(model, names, rank=1, start_step=2)


def gradient(model: nn.Module, step: int) -> Tensor:
    """Of the convolution, from the images of a step."""
    model.zero_grad()
    model(torch.randn(4, 16, 8, 8, generator=torch.Generator().manual_seed(step))).square().mean().backward()
    (weight,) = (parameter for parameter in model.parameters() if parameter.ndim == 4)
    assert weight.grad is not None
    return weight.grad.clone()


def left_out(memory_format: torch.memory_format) -> tuple[PowerSGD, Tensor]:
    """After two steps exchanged whole and one compressed one; what the latter left out."""
    model, compression = compressed(memory_format)
    for step in range(2):
        torch.testing.assert_close(gradient(model, step), gradient(network(memory_format), step))
    missing = gradient(network(memory_format), 2) - gradient(model, 2)
    assert missing.norm() > 0.5 * gradient(model.module, 2).norm()
    return compression, missing


@pytest.mark.parametrize("memory_format", FORMATS)
def test_what_is_left_out_is_known_by_parameter(memory_format: torch.memory_format) -> None:
    compression, missing = left_out(memory_format)
    torch.testing.assert_close(compression.carried()["weight"], missing)


@pytest.mark.parametrize("after", FORMATS)
@pytest.mark.parametrize("before", FORMATS)
def test_it_comes_back_in_any_memory_format(before: torch.memory_format, after: torch.memory_format) -> None:
    compression, missing = left_out(before)
    model, resumed = compressed(after)
    resumed.load(compression.carried(), step=3)
    torch.testing.assert_close(gradient(model, 3), gradient(network(after), 3) + missing)
