"""Channels-last really is channels-last, from the images to the gradients, and contiguous really is contiguous."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pycls_fast.data.batch import Batch
from pycls_fast.data.prepare import Prepare
from pycls_fast.models.resnet import ResNet
from tests.factories import randomise, small_vit
from tests.unit.models.conftest import draw

FORMATS: dict[str, torch.memory_format] = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
MODELS: dict[str, Any] = {
    "resnet18-small": lambda: ResNet(depth=18, num_classes=5, stem="small", drop_path=0.2),
    "resnet50": lambda: ResNet(depth=50, num_classes=5),
    "vit": lambda: small_vit(num_classes=5, attention="sdpa"),
}

# Of the images: deep maps of one pixel would make BatchNorm divide by differences of a few numbers.
SIDES = {"resnet18-small": 32, "resnet50": 64, "vit": 32}


def is_in(tensor: torch.Tensor, memory_format: torch.memory_format) -> bool:
    return tensor.is_contiguous(memory_format=memory_format)


class Training:
    """A model and its images in a memory format, as the run makes them."""

    def __init__(self, name: str, memory_format: Any) -> None:
        torch.manual_seed(0)
        self.format = FORMATS[memory_format]
        self.model: nn.Module = MODELS[name]().to(memory_format=self.format)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, foreach=True)
        generator = torch.Generator().manual_seed(0)
        batch = Batch(
            images_BHWC=torch.randint(0, 256, (4, 32, 32, 3), dtype=torch.uint8, generator=generator),
            labels_B=torch.arange(4),
            indices_B=torch.arange(4),
            erase_B4=None,
        )
        self.images_BCHW = Prepare((0.5,) * 3, (0.25,) * 3, memory_format=memory_format)(batch)

    def backward(self) -> None:
        self.model(self.images_BCHW).square().mean().backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_every_map_weight_and_gradient_is_in_the_format(name: str, memory_format: str) -> None:
    training = Training(name, memory_format)
    found: dict[str, bool] = {}

    def look(layer: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            found[layer] = output.ndim != 4 or is_in(output, training.format)

        return hook

    for layer, module in training.model.named_modules():
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d | nn.MaxPool2d):
            module.register_forward_hook(look(layer))
    training.backward()
    assert found
    if memory_format == "channels_last" or name != "resnet50":
        assert [layer for layer, right in found.items() if not right] == []
    else:
        # oneDNN answers 1x1 maps and strided 1x1 convolutions in strides that count as either; the stem cannot.
        assert found["stem.conv"]
        assert found["stages.0.0.conv2"]
    # The fused optimizers walk over memory: a gradient in another order than its weight would be added wrongly.
    for key, parameter in training.model.named_parameters():
        assert parameter.grad.stride() == parameter.stride(), key
        assert parameter.ndim != 4 or is_in(parameter, training.format), key


def gradients(name: str, memory_format: str, dtype: torch.dtype) -> torch.Tensor:
    """The logits and all gradients of one batch of random images, as one vector in float64."""
    model = randomise(MODELS[name]()).to(dtype=dtype, memory_format=FORMATS[memory_format])
    images_BCHW = draw(8, 3, 64, 64, seed=1)[:, :, : SIDES[name], : SIDES[name]]
    # The same samples are dropped in every format.
    torch.manual_seed(3)
    logits_BK = model(images_BCHW.to(dtype).contiguous(memory_format=FORMATS[memory_format]))
    (logits_BK * draw(8, 5, seed=2).to(dtype)).sum().backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(found) == len(list(model.parameters()))
    # `reshape` reads channels-last tensors in their logical order.
    return torch.cat([tensor.detach().double().reshape(-1) for tensor in (logits_BK, *found)])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_channels_last_rounds_no_more_than_four_times_as_contiguous(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 against float64. A ReLU that rounding turns over would be a thousand times the error of all else."""
    monkeypatch.setattr(F, "relu", lambda maps, inplace=False: F.silu(maps))
    exact, other = (gradients(name, memory_format, torch.float64) for memory_format in FORMATS)
    plain, found = (gradients(name, memory_format, torch.float32) for memory_format in FORMATS)
    assert (other - exact).norm() <= 1e-12 * exact.norm()
    reference = (plain - exact).norm()
    assert 0 < reference <= 1e-4 * exact.norm()
    assert (found - exact).norm() <= 4 * reference
