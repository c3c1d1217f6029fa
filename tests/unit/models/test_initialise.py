"""Starting values: their distributions, that none is left out, and that the way a model is built does not
matter."""

from __future__ import annotations

import math
from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pycls_fast.models.external import TimmNetwork
from pycls_fast.models.moe import Experts
from pycls_fast.models.resnet import ResNet
from pycls_fast.models.vit import VisionTransformer
from pycls_fast.parallel.ddp import synchronise
from tests.factories import assert_same_bits, small_vit

Check = Callable[[Tensor], None]
WIDTH, MLP_WIDTH = 192, 512


def vit(classifier: str = "token", positions: str = "learned", **kwargs: Any) -> VisionTransformer:
    sizes = {"image_size": 64, "width": WIDTH, "depth": 2, "mlp_width": MLP_WIDTH, "num_classes": 10}
    return small_vit(classifier=classifier, positions=positions, **sizes, **kwargs)


CONV = {"stem": "conv", "stem_widths": (32, 64, 96), "stem_strides": (2, 2, 2)}
PARTS = {"registers": 3, "layer_scale": 0.1, "qk_norm": True, "pre_logits": 64}
MODELS: dict[str, Callable[[], VisionTransformer | ResNet | TimmNetwork]] = {
    "vit": vit,
    "vit-pooled-sincos2d": partial(vit, "pooled", "sincos2d"),
    "vit-token-sincos2d": partial(vit, "token", "sincos2d"),
    "vit-conv-stem": partial(vit, **CONV),
    "vit-distilled": partial(vit, distillation_token=True),
    "vit-all-parts": partial(vit, "map", **PARTS),
    "vit-trunc-normal": partial(vit, "map", class_token=True, **PARTS, init="trunc_normal"),
    "vit-trunc-normal-conv-stem": partial(vit, **CONV, init="trunc_normal"),
    "vit-trunc-normal-experts": partial(vit, experts=Experts(count=4), init="trunc_normal"),
    "vit-experts": partial(vit, experts=Experts(count=4)),
    "resnet18": partial(ResNet, depth=18, num_classes=10),
    "resnext50d": partial(
        ResNet, depth=50, num_classes=10, groups=32, width_per_group=4, stem="deep", shortcut="pool",
        zero_init_last_gamma=True,
    ),
    "timm-vit": partial(TimmNetwork, name="vit_tiny_patch16_224", num_classes=10, image_size=32, options={"depth": 2}),
    "timm-regnet": partial(TimmNetwork, name="regnety_002", num_classes=10),
    "resnet50": partial(ResNet, depth=50, num_classes=10, stem="small", zero_init_last_gamma=False),
}  # fmt: skip


def everything(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, those too that are not saved."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def assert_uniform(tensor: Tensor, bound: float) -> None:
    assert 0.9 * bound < tensor.abs().max() <= bound
    # Relative to the standard deviation that of a sample's is sqrt(1 / (5 n)).
    assert tensor.std().item() == pytest.approx(bound / math.sqrt(3), rel=5 / math.sqrt(5 * tensor.numel()))


def assert_zero(*tensors: Tensor | None) -> None:
    for tensor in tensors:
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
    assert_same_bits(everything(late), everything(direct))
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("name", ["vit-conv-stem", "resnet18"])
def test_batch_norms_of_all_ranks_begin_like_those_of_one(name: str) -> None:
    torch.manual_seed(3)
    direct, converted = MODELS[name](), MODELS[name]()
    synchronise(converted, torch.device("cuda"))
    torch.manual_seed(3)
    converted.initialise()
    assert_same_bits(everything(converted), everything(direct))


def uniform(bound: float) -> Check:
    return lambda tensor: assert_uniform(tensor, bound)


def normal(std: float, cut: float = math.inf) -> Check:
    """`cut`: no value is further from 0, in units of `std`."""

    def check(tensor: Tensor) -> None:
        assert tensor.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * tensor.numel()))
        if tensor.numel() > 1000:
            assert min(0.98 * cut, 2.5) * std < tensor.abs().max() <= cut * (1 + 1e-6) * std

    return check


def always(value: float) -> Check:
    return lambda tensor: assert_zero(tensor - value)


# Of a unit normal that is cut at 2 and then has a variance of 1 again.
CUT = 2 / 0.87962566103423978
EVERY_SCHEME = {"*norm*.weight": always(1), "*norm*.bias": always(0), "*.scale?.value": always(0.1),
                "registers.value": normal(1e-6), "positions.value": normal(0.02),
                "pooling.probe": uniform(math.sqrt(6 / (1 + WIDTH)))}  # fmt: skip
JAX = {
    "*.attention.*.weight": uniform(math.sqrt(6 / (2 * WIDTH))),
    "*.mlp.*.weight": uniform(math.sqrt(6 / (WIDTH + MLP_WIDTH))),
    "*.mlp.*.bias": normal(1e-6),
    "pre_logits.weight": normal(WIDTH**-0.5, CUT),
    "class_token.value": always(0),
    "head.weight": always(0),
    "*.bias": always(0),
}
DEIT = {"class_token.value": normal(0.02), "*.weight": normal(0.02), "*.bias": always(0)}
# By scheme and stem: the first rule that fits a parameter's name.
RULES: dict[tuple[str, str], dict[str, Check]] = {
    # google-research/vision_transformer and big_vision; the convolutions are pycls'.
    ("jax", "patch"): EVERY_SCHEME | {"stem.projection.weight": normal((3 * 8 * 8) ** -0.5, CUT)} | JAX,
    ("jax", "conv"): EVERY_SCHEME
    | {f"stem.convs.{n}.weight": normal(math.sqrt(2 / width)) for n, width in enumerate((32, 64, 96))}
    | {"stem.projection.weight": normal(WIDTH**-0.5)}
    | JAX,
    # DeiT and timm; torch's own values for convolutions.
    ("trunc_normal", "patch"): EVERY_SCHEME | {"stem.*": uniform((3 * 8 * 8) ** -0.5)} | DEIT,
    ("trunc_normal", "conv"): EVERY_SCHEME
    | {f"stem.convs.{n}.weight": uniform((9 * width) ** -0.5) for n, width in enumerate((3, 32, 64))}
    | {"stem.projection.*": uniform(96**-0.5)}
    | DEIT,
}


@pytest.mark.parametrize(("init", "stem"), RULES)
def test_vit_values_follow_the_code_that_they_are_from(init: str, stem: str) -> None:
    torch.manual_seed(0)
    parts: dict[str, Any] = {"registers": 200, "layer_scale": 0.1, "qk_norm": True, "pre_logits": 300}
    model = vit("map", class_token=True, **parts, **(CONV if stem == "conv" else {}), init=init)
    for name, parameter in model.named_parameters():
        rule = next(rule for rule in RULES[init, stem] if fnmatch(name, rule))
        RULES[init, stem][rule](parameter.detach())


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
