"""Counts of parameters and operations: against published tables and against counting by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pycls_fast.models.complexity import Complexity, complexity
from pycls_fast.models.resnet import ResNet
from pycls_fast.models.vit import VisionTransformer
from pycls_fast.plan.operators import LiveMemory

# Width, depth, heads: Dosovitskiy et al. 2021, table 1 (B, L, H); Touvron et al. (DeiT) 2021, table 1 (Ti, S).
SIZES = {"Ti": (192, 12, 3), "S": (384, 12, 6), "B": (768, 12, 12), "L": (1024, 24, 16), "H": (1280, 32, 16)}


def vit(size: str, patch_size: int = 16, **kwargs: Any) -> VisionTransformer:
    width, depth, heads = SIZES[size]
    sizes: Any = {"image_size": 224, "width": width, "depth": depth, "heads": heads, "mlp_width": 4 * width}
    return VisionTransformer(**{**sizes, "patch_size": patch_size, "num_classes": 1000, **kwargs})


def by_hand(size: str, patch_size: int) -> Complexity:
    """The sums of the layers' textbook counts, written down apart from the code."""
    width, depth, _ = SIZES[size]
    mlp_width, patches = 4 * width, (224 // patch_size) ** 2
    tokens = patches + 1
    pixels = 3 * patch_size**2
    block_parameters = 4 * (width + 1) * width + (width + 1) * mlp_width + (mlp_width + 1) * width + 4 * width
    block_products = tokens * (4 * width**2 + 2 * width * mlp_width) + 2 * tokens**2 * width
    embedding = (pixels + 1) * width + width + tokens * width
    return Complexity(
        parameters=embedding + depth * block_parameters + 2 * width + (width + 1) * 1000,
        forward_flops=2 * (patches * pixels * width + depth * block_products + width * 1000),
    )


PRODUCTS = {"attention": "products", "linear": "products", "patches": "product"}


@pytest.mark.parametrize(
    ("size", "patch_size", "ways"),
    [
        ("Ti", 8, {}),
        ("B", 32, {"attention": "sdpa"}),
        ("S", 16, {**PRODUCTS, "qkv": "separate"}),
        ("S", 16, {**PRODUCTS, "qkv": "fused"}),
        pytest.param("H", 14, {"attention": "sdpa"}, marks=pytest.mark.slow),
    ],
)
def test_vit_is_the_count_by_hand_whatever_computes_it(size: str, patch_size: int, ways: dict[str, str]) -> None:
    with torch.device("meta"):
        model = vit(size, patch_size, **ways)
    assert complexity(model, image_size=224) == by_hand(size, patch_size)


@pytest.mark.parametrize(
    ("depth", "flops", "parameters"),
    # pycls, dev/model_complexity.json, configs/archive/imagenet/resnet/R-{50,101}-1x64d_step_1gpu.yaml.
    [(50, 4_089_185_256, 25_557_032), (101, 7_801_406_440, 44_549_160)],
)
def test_pycls_publishes_the_same_for_resnet(depth: Any, flops: int, parameters: int) -> None:
    """But for what its definition adds: one operation for each bias of the head."""
    found = complexity(ResNet(depth=depth, num_classes=1000), image_size=224)
    assert found.forward_flops == 2 * (flops - 1000)
    assert found.parameters == parameters


def test_nothing_is_made_outside_the_meta_device_and_the_model_stays_as_it_is() -> None:
    model = vit("Ti", image_size=32, drop_path=0.5).train()
    model.head.eval()
    before = {key: (id(tensor), tensor._version) for key, tensor in model.state_dict(keep_vars=True).items()}
    modes = [module.training for module in model.modules()]
    random_state = torch.get_rng_state()
    with LiveMemory() as memory:
        found = complexity(model, image_size=32)
    assert memory.peak == 0
    assert {key: (id(tensor), tensor._version) for key, tensor in model.state_dict(keep_vars=True).items()} == before
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random_state)
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_evaluation_is_counted_where_training_cannot_run() -> None:
    """One image of 32 pixels ends in maps of one pixel, which batch norm refuses in training."""
    found = complexity(ResNet(depth=18, num_classes=10).train(), image_size=32)
    assert found == complexity(ResNet(depth=18, num_classes=10), image_size=32)
