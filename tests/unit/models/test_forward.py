"""What every model promises: shapes, names, layouts, dtypes, devices, and that each sample and parameter counts.

Channels-last really is channels-last, from the images to the gradients, and contiguous really is contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pycls_fast.data.batch import Batch
from pycls_fast.data.prepare import Prepare
from pycls_fast.models.resnet import ResNet
from pycls_fast.models.vit import VisionTransformer
from tests.factories import draw, randomise, small_vit

Model = VisionTransformer | ResNet


resnet = partial(ResNet, num_classes=7)
MODELS: dict[str, Callable[..., Model]] = {
    "vit": small_vit,
    "vit-sdpa": partial(small_vit, attention="sdpa"),
    "vit-pooled-sincos2d": partial(small_vit, classifier="pooled", positions="sincos2d"),
    "vit-conv-stem": partial(small_vit, stem="conv", stem_widths=(6, 8, 12), stem_strides=(2, 2, 2), layer_scale=0.3),
    "vit-map": partial(
        small_vit, classifier="map", registers=2, qk_norm=True, position_tokens="patches", attention="sdpa"
    ),
    "vit-mean-with-token": partial(
        small_vit, classifier="pooled", class_token=True, classifier_norm="before_pool", pre_logits=20
    ),
    "resnet18": partial(resnet, depth=18, stem="small"),
    "resnet50d": partial(resnet, depth=50, stem="deep", shortcut="pool", groups=2, width_per_group=16),
    "resnet50": partial(resnet, depth=50),
}
BLOCKS = {name: 3 for name in MODELS if name.startswith("vit")} | {"resnet18": 8, "resnet50": 16, "resnet50d": 16}


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def draw_images(count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return draw(count, 3, 32, 32, seed=1).to(dtype)


def test_units_are_named_and_in_forward_order(name: str) -> None:
    model = MODELS[name]()
    units = model.units()
    assert len(units) == BLOCKS[name]
    assert all(model.get_submodule(unit_name) is unit for unit_name, unit in units)
    assert len({type(unit) for _, unit in units}) == 1
    ran: list[nn.Module] = []
    for _, unit in units:
        unit.register_forward_hook(lambda module, *_: ran.append(module))
    model.eval()(draw_images(1, dtype=torch.float32))
    assert [id(module) for module in ran] == [id(unit) for _, unit in units]


def test_fused_attention_never_gets_a_single_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of its keys may be NaN on Hopper (see `MapPooling`)."""
    asked, fused = [], F.scaled_dot_product_attention

    def ask(queries_BHNE: Tensor, *others: Tensor) -> Tensor:
        asked.append(queries_BHNE.shape[2])
        return fused(queries_BHNE, *others)

    monkeypatch.setattr(F, "scaled_dot_product_attention", ask)
    MODELS["vit-map"]()(draw_images(1, dtype=torch.float32))
    assert len(asked) == 3
    assert min(asked) > 1


def test_head_name_is_the_last_layer(name: str) -> None:
    model = MODELS[name]()
    head = model.last_layer()
    assert head is model.get_submodule(model.head_name)
    outs: list[Tensor] = []
    head.register_forward_hook(lambda module, args, out: outs.append(out))
    logits_BK = model.eval()(draw_images(2, dtype=torch.float32))
    assert logits_BK is outs[0]
    assert logits_BK.shape == (2, 7)


def test_every_parameter_and_pixel_counts(name: str) -> None:
    model = randomise(MODELS[name]()).train()
    images = draw_images(2).requires_grad_()
    torch.manual_seed(0)
    model(images).square().sum().backward()
    assert images.grad is not None
    assert (images.grad != 0).all()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        # Softmax does not see a number added to all its inputs, which is all that a bias of the keys does.
        assert key.endswith("key.bias") or parameter.grad.any(), key


@pytest.mark.slow
def test_autocast_is_near_and_float32_stays_whole(name: str) -> None:
    model: Any = randomise(MODELS[name]()).float().eval()
    images = draw_images(2, dtype=torch.float32)
    expected = model(images)
    residual: list[torch.dtype] = []
    last_block = model.units()[-1][1]
    last_block.register_forward_hook(lambda module, args, out: residual.append(out.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(images)
    assert found.dtype == torch.bfloat16
    assert (found - expected).norm() < 0.05 * expected.norm()
    if isinstance(model, VisionTransformer):
        # Learned positions or fixed: the sum over the branches is kept in float32.
        assert residual == [torch.float32]


def test_state_dict_has_no_more_than_weights_and_statistics(name: str) -> None:
    """Fixed positions follow from the configuration and are not saved; a copy takes a state strictly."""
    model, other = MODELS[name](), MODELS[name]()
    other.load_state_dict(model.state_dict())
    expected = {key for key, _ in model.named_parameters()}
    expected |= {key for key, _ in model.named_buffers() if "norm" in key}
    assert set(model.state_dict()) == expected


def test_images_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="built for images of 32 x 32 pixels; got 32 x 40"):
        MODELS["vit"]()(torch.zeros(1, 3, 32, 40))
    # A teacher's are those of the network that it teaches, of which no configuration of its own says anything.
    with pytest.raises(ValueError, match="image_size has to be a multiple of patch_size"):
        small_vit(image_size=33)


FORMATS: dict[str, torch.memory_format] = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def is_in(tensor: torch.Tensor, memory_format: torch.memory_format) -> bool:
    return tensor.is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("name", ["resnet18", "resnet50", "vit-sdpa"])
def test_every_map_weight_and_gradient_is_in_the_format(name: str, memory_format: Any) -> None:
    """As the run makes model and images."""
    model = MODELS[name](drop_path=0.2).to(memory_format=FORMATS[memory_format])
    bytes_BHWC = torch.randint(0, 256, (4, 32, 32, 3), dtype=torch.uint8)
    batch = Batch(bytes_BHWC, torch.arange(4), torch.arange(4), None)
    images_BCHW = Prepare((0.5,) * 3, (0.25,) * 3, memory_format=memory_format)(batch)
    found: dict[str, bool] = {}

    def look(layer: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            found[layer] = output.ndim != 4 or is_in(output, FORMATS[memory_format])

        return hook

    for layer, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d | nn.MaxPool2d):
            module.register_forward_hook(look(layer))
    model(images_BCHW).square().mean().backward()
    assert found
    if memory_format == "channels_last" or name != "resnet50":
        assert [layer for layer, right in found.items() if not right] == []
    else:
        # oneDNN answers 1x1 maps and strided 1x1 convolutions in strides that count as either; the stem cannot.
        assert found["stem.conv"]
        assert found["stages.0.0.conv2"]
    # The fused optimizers walk over memory: a gradient in another order than its weight would be added wrongly.
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.stride() == parameter.stride(), key
        assert parameter.ndim != 4 or is_in(parameter, FORMATS[memory_format]), key
