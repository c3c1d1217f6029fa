"""Starting values: their distributions, that none is left out, and that the way a model is built does not
matter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pycls_fast.models import ResNet, TimmNetwork, VisionTransformer
from pycls_fast.models.vit import Block
from pycls_fast.models.vit_parts import LayerScale

WIDTH, MLP_WIDTH = 192, 512


def vit(classifier: str = "token", positions: str = "learned", **kwargs: Any) -> VisionTransformer:
    return VisionTransformer(
        **kwargs,
        image_size=64,
        patch_size=8,
        width=WIDTH,
        depth=2,
        heads=3,
        mlp_width=MLP_WIDTH,
        num_classes=10,
        classifier=classifier,  # type: ignore[arg-type]
        positions=positions,  # type: ignore[arg-type]
    )


CONV = {"stem": "conv", "stem_widths": (32, 64, 96), "stem_strides": (2, 2, 2)}
MODELS: dict[str, Callable[[], VisionTransformer | ResNet | TimmNetwork]] = {
    "vit": vit,
    "vit-pooled-sincos2d": lambda: vit("pooled", "sincos2d"),
    "vit-token-sincos2d": lambda: vit("token", "sincos2d"),
    "vit-conv-stem": lambda: vit(**CONV),
    "vit-all-parts": lambda: vit("map", registers=3, layer_scale=0.1, qk_norm=True, pre_logits=64),
    "vit-trunc-normal": lambda: vit(
        "map", class_token=True, registers=3, layer_scale=0.1, qk_norm=True, pre_logits=64, init="trunc_normal"
    ),
    "vit-trunc-normal-conv-stem": lambda: vit(**CONV, init="trunc_normal"),
    "resnet18": lambda: ResNet(depth=18, num_classes=10),
    "resnext50d": lambda: ResNet(
        depth=50, num_classes=10, groups=32, width_per_group=4, stem="deep", shortcut="pool", zero_init_last_gamma=True
    ),
    "timm-vit": lambda: TimmNetwork(name="vit_tiny_patch16_224", num_classes=10, image_size=32, options={"depth": 2}),
    "timm-regnet": lambda: TimmNetwork(name="regnety_002", num_classes=10),
    "resnet50": lambda: ResNet(depth=50, num_classes=10, stem="small", zero_init_last_gamma=False),
}


def everything(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, those too that are not saved."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def assert_uniform(tensor: Tensor, bound: float) -> None:
    assert 0.97 * bound < tensor.abs().max() <= bound
    assert tensor.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03)


def assert_zero(*tensors: Tensor | None) -> None:
    for tensor in tensors:
        assert tensor is not None
        assert not tensor.any()


@pytest.mark.parametrize("name", MODELS)
def test_meta_then_to_empty_then_initialise_is_the_direct_build(name: str) -> None:
    torch.manual_seed(3)
    direct = MODELS[name]()
    after = torch.get_rng_state()
    torch.manual_seed(3)
    with torch.device("meta"):
        late = MODELS[name]()
    assert all(tensor.is_meta for tensor in everything(late).values())
    late.to_empty(device="cpu")
    for tensor in everything(late).values():
        tensor.data.fill_(float("nan") if tensor.is_floating_point() else 77)
    late.initialise()
    assert everything(late).keys() == everything(direct).keys()
    for key, tensor in everything(direct).items():
        assert torch.equal(everything(late)[key], tensor), key
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("name", ["vit-conv-stem", "resnet18"])
def test_batch_norms_of_all_ranks_begin_like_those_of_one(name: str) -> None:
    """torch's conversion, which CUDA takes, makes other modules of them."""
    torch.manual_seed(3)
    direct = MODELS[name]()
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(MODELS[name]())
    torch.manual_seed(3)
    converted.initialise()
    for key, tensor in everything(direct).items():
        assert torch.equal(everything(converted)[key], tensor), key


def test_vit_values_follow_the_papers_code() -> None:
    torch.manual_seed(0)
    model = vit()
    stem = model.stem.projection
    fan_in = 3 * 8 * 8
    assert stem.weight.std().item() == pytest.approx(fan_in**-0.5, rel=0.02)
    cut = 2 / (0.87962566103423978 * math.sqrt(fan_in))
    assert 0.98 * cut < stem.weight.abs().max() <= cut * (1 + 1e-6)
    assert model.class_token is not None
    assert_zero(stem.bias, model.class_token.value, model.head.weight, model.head.bias, model.norm.bias)
    assert model.positions.value.std().item() == pytest.approx(0.02, rel=0.03)
    assert model.positions.value.abs().max() > 0.06  # not cut
    assert torch.equal(model.norm.weight, torch.ones(WIDTH))
    for _, block in model.units():
        assert isinstance(block, Block)
        attention, mlp = block.attention, block.mlp
        for linear in (attention.query, attention.key, attention.value, attention.projection):
            assert_uniform(linear.weight, math.sqrt(6 / (2 * WIDTH)))
            assert_zero(linear.bias)
        for linear in (mlp.fc1, mlp.fc2):
            assert_uniform(linear.weight, math.sqrt(6 / (WIDTH + MLP_WIDTH)))
            assert linear.bias.std().item() == pytest.approx(1e-6, rel=0.15)
        for norm in (block.norm1, block.norm2):
            assert torch.equal(norm.weight, torch.ones(WIDTH))
            assert_zero(norm.bias)


@pytest.mark.parametrize("stem", ["patch", "conv"])
def test_vit_values_follow_deits_code(stem: str) -> None:
    torch.manual_seed(0)
    parts: dict[str, Any] = {"registers": 100, "layer_scale": 0.1, "qk_norm": True, "pre_logits": 128}
    model = vit("map", class_token=True, **parts, **(CONV if stem == "conv" else {}), init="trunc_normal")
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert module.weight.std().item() == pytest.approx(0.02, rel=0.05), name
            assert module.weight.abs().max() > 0.05  # a normal, cut at +-2
            assert_zero(module.bias)
        elif isinstance(module, nn.Conv2d):
            bound = module.weight[0].numel() ** -0.5
            assert_uniform(module.weight, bound)
            if module.bias is not None:
                assert 0.9 * bound < module.bias.abs().max() <= bound
        elif isinstance(module, nn.LayerNorm | nn.BatchNorm2d):
            assert (module.weight == 1).all()
            assert_zero(module.bias)
    assert model.head.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.class_token is not None
    assert model.registers is not None
    assert model.pooling is not None
    assert model.class_token.value.std().item() == pytest.approx(0.02, rel=0.15)
    assert model.positions.value.std().item() == pytest.approx(0.02, rel=0.03)
    assert model.registers.value.std().item() == pytest.approx(1e-6, rel=0.03)
    assert model.pooling.probe.std().item() == pytest.approx(math.sqrt(2 / (1 + WIDTH)), rel=0.15)
    scales = [module.value for module in model.modules() if isinstance(module, LayerScale)]
    assert len(scales) == 4
    assert all((value == 0.1).all() for value in scales)


def test_the_values_of_the_other_parts() -> None:
    torch.manual_seed(0)
    model = vit("map", registers=200, layer_scale=0.1, qk_norm=True, pre_logits=300)
    assert model.registers is not None
    assert model.registers.value.std().item() == pytest.approx(1e-6, rel=0.02)
    assert model.pooling is not None
    assert_uniform(model.pooling.attention.query.weight, math.sqrt(6 / (2 * WIDTH)))
    assert 0 < model.pooling.probe.abs().max() <= math.sqrt(6 / (1 + WIDTH))
    assert model.pooling.probe.std().item() == pytest.approx(math.sqrt(2 / (1 + WIDTH)), rel=0.15)
    assert model.pre_logits is not None
    assert model.pre_logits.weight.std().item() == pytest.approx(WIDTH**-0.5, rel=0.02)
    assert_zero(model.pre_logits.bias)
    for _, block in model.units():
        assert isinstance(block, Block)
        for scale in (block.scale1, block.scale2):
            assert scale is not None
            assert torch.equal(scale.value, torch.full((WIDTH,), 0.1))
        for norm in (block.attention.query_norm, block.attention.key_norm):
            assert norm is not None
            assert torch.equal(norm.weight, torch.ones(WIDTH // 3))
    conv = vit(**CONV).stem
    for layer, width in zip((*conv.convs, conv.projection), (32, 64, 96, WIDTH), strict=True):
        gain = 1.0 if layer is conv.projection else 2.0
        assert layer.weight.std().item() == pytest.approx(math.sqrt(gain / width), rel=0.05)


@pytest.mark.parametrize("depth", [18, 50])
@pytest.mark.parametrize("zero_init", [True, False])
def test_resnet_values(depth: int, zero_init: bool) -> None:
    torch.manual_seed(0)
    model = ResNet(depth=depth, num_classes=50, zero_init_last_gamma=zero_init)
    last_norms = {id(getattr(block, "norm2" if depth == 18 else "norm3")) for _, block in model.units()}
    zero_gammas = 0
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * module.kernel_size[0] * module.kernel_size[1]
            assert module.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.06)
            assert module.weight.abs().max() > 3.2 * math.sqrt(2 / fan_out)  # a normal, not a uniform
        elif isinstance(module, nn.BatchNorm2d):
            assert_zero(module.bias, module.running_mean, module.num_batches_tracked)
            assert module.running_var is not None
            assert (module.running_var == 1).all()
            is_zero = zero_init and id(module) in last_norms
            zero_gammas += is_zero
            assert (module.weight == (0 if is_zero else 1)).all()
    assert zero_gammas == (len(model.units()) if zero_init else 0)
    assert model.head.weight.std().item() == pytest.approx(0.01, rel=0.02)
    assert_zero(model.head.bias)
