"""Our models compute what timm's and torchvision's do: float64, random values in every tensor, 1e-9 relative.

Weights go through `pycls_fast.models.pretrained`, gradients too, so that a wrong name or cut shows as a wrong
number.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from pycls_fast.errors import UserError
from pycls_fast.models import pretrained
from pycls_fast.models.pretrained.names import read_names
from pycls_fast.models.resnet import ResNet
from pycls_fast.models.vit import VisionTransformer
from pycls_fast.optim.groups import freeze
from tests.factories import Convert, assert_same_bits, in_our_names, randomise


def vit(**kwargs: Any) -> VisionTransformer:
    """ViT-Ti/16."""
    kwargs = {"image_size": 224, "num_classes": 1000, "depth": 12} | kwargs
    return VisionTransformer(patch_size=16, width=192, heads=3, mlp_width=768, **kwargs)


def images(count: int, size: int) -> Tensor:
    return torch.randn(count, 3, size, size, dtype=torch.float64)


def relative_error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return ((found - expected).norm() / expected.norm()).item()


def assert_same_gradients(ours: nn.Module, theirs: nn.Module, convert: Convert) -> None:
    def gradients(model: nn.Module) -> dict[str, Tensor]:
        # Where there are statistics, they stand in for themselves: the conversion wants every name.
        state = model.state_dict(keep_vars=True)
        return {key: (tensor if tensor.grad is None else tensor.grad).double() for key, tensor in state.items()}

    expected, found = convert(gradients(theirs)), gradients(ours)
    scale = max(grad.norm().item() for grad in expected.values())
    for key, grad in expected.items():
        # Relative to the largest: the gradient of a bias of the keys is zero but for rounding.
        assert (found[key] - grad).norm().item() < 1e-9 * max(grad.norm().item(), 1e-3 * scale), key


def test_timm_models_of_another_mathematics_are_refused() -> None:
    for kwargs in ({"qkv_bias": False}, {"pre_norm": True}, {"scale_attn_norm": True}):
        with torch.device("meta"):
            state = timm.create_model("vit_tiny_patch16_224", **kwargs).state_dict()
            ours = vit()
        layout, tensors, rest = read_names(state)
        with pytest.raises(UserError, match=r"does not fit the model: (missing|unexpected)"):
            pretrained.fit(pretrained.ReadWeights("file", layout, tensors, tuple(rest)), ours)


def test_tensors_of_other_shapes_are_not_of_this_layout() -> None:
    state = {name: tensor.clone() for name, tensor in vit(image_size=32).state_dict().items()}
    theirs, _ = pretrained.to_timm_vit(state, norm="norm")
    for key, shape in (("cls_token", (2, 1, 192)), ("blocks.3.attn.qkv.weight", (35, 192))):
        assert read_names(theirs | {key: torch.zeros(shape)})[2] == [key]


def test_the_mean_and_the_taught_outputs_of_deit() -> None:
    """The mean with any biases; in training both, with their gradients, if the two heads have one bias."""
    theirs = randomise(timm.create_model("deit_tiny_distilled_patch16_224", img_size=64, num_classes=11, depth=2))
    ours = vit(image_size=64, num_classes=11, depth=2, distillation_token=True).double()
    batch, cotangent = images(3, 64), torch.randn(3, 2, 11, dtype=torch.float64)
    ours.load_state_dict(in_our_names(theirs.state_dict()))
    assert relative_error(ours.eval()(batch), theirs.eval()(batch)) < 1e-9
    theirs.head_dist.bias = theirs.head.bias
    ours.load_state_dict(in_our_names(theirs.state_dict()))
    back, _ = pretrained.to_timm_vit(ours.state_dict(), norm="norm")
    assert_same_bits(back, theirs.state_dict())
    theirs.set_distilled_training(True)
    ours.taught = True
    found, expected = ours.train()(batch), torch.stack(theirs.train()(batch), dim=1)
    assert relative_error(found, expected) < 1e-9
    for logits in (found, expected):
        (logits * cotangent).sum().backward()
    assert_same_gradients(ours, theirs, in_our_names)
    # A head that is frozen, too.
    freeze(ours, ["blocks"])
    torch.testing.assert_close(ours.train()(batch), expected)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(batch), expected.mean(dim=1))


GAP = {"classifier": "pooled", "classifier_norm": "before_pool"}
DEIT3 = {"position_tokens": "patches", "layer_scale": 0.3}
REG = {"registers": 4, "position_tokens": "patches", "layer_scale": 0.3}
MEAN = {"class_token": False, "global_pool": "avg"}
# timm's name, its arguments, ours. Widths are the models' own, with one or two blocks and a few patches.
VITS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("vit_small_patch32_224.augreg_in21k_ft_in1k", {}, {}),
    ("vit_large_patch16_224.augreg_in21k_ft_in1k", {}, {}),
    ("vit_huge_patch14_224.orig_in21k", {"num_classes": 7}, {}),
    ("vit_giant_patch14_224", {}, {"mlp_width": 6144}),
    ("vit_base_patch16_224.mae", {"num_classes": 7}, {}),
    (
        "vit_base_patch16_224.mae",
        {"num_classes": 7, "global_pool": "avg"},
        {"class_token": True, "classifier": "pooled"},
    ),
    ("vit_base_patch16_gap_224", {}, GAP),
    ("vit_tiny_patch16_224", {"qk_norm": True}, {"qk_norm": True}),
    ("vit_tiny_patch16_224", {**MEAN, "init_values": 0.1}, {"classifier": "pooled", "layer_scale": 0.1}),
    ("vit_tiny_patch16_224", {"global_pool": "map"}, {"class_token": True, "classifier": "map"}),
    ("vit_tiny_patch16_224", {"reg_tokens": 3}, {"registers": 3}),
    ("vit_base_patch16_siglip_224", {"num_classes": 7}, {"classifier": "map"}),
    ("vit_small_patch14_reg4_dinov2", {"num_classes": 7}, REG),
    ("vit_base_patch16_reg4_gap_256", {}, {"registers": 4, "position_tokens": "patches", "classifier": "pooled"}),
    ("flexivit_small", {}, {"position_tokens": "patches"}),
    ("deit_small_patch16_224", {}, {}),
    ("deit3_small_patch16_224", {}, DEIT3),
    ("deit3_huge_patch14_224", {}, DEIT3),
]
RESNETS: list[tuple[str, dict[str, Any]]] = [
    ("resnet26", {"depth": 26}),
    ("resnet34", {"depth": 34}),
    ("resnet101", {"depth": 101}),
    ("resnext50_32x4d", {"depth": 50, "groups": 32, "width_per_group": 4}),
    ("wide_resnet50_2", {"depth": 50, "width_per_group": 128}),
    ("resnet50c", {"depth": 50, "stem": "deep"}),
    ("resnet18d", {"depth": 18, "stem": "deep", "shortcut": "pool"}),
    ("resnet50d", {"depth": 50, "stem": "deep", "shortcut": "pool"}),
]

# What `make test` compares; the other sizes are slow tests.
LIGHT = re.compile("tiny|small|gap|resnet26|resnet18d")


def like(theirs: Any, **kwargs: Any) -> VisionTransformer:
    """Ours with the sizes of timm's vision transformer."""
    block, size = theirs.blocks[0], theirs.patch_embed.img_size[0]
    sizes = {
        "image_size": size,
        "patch_size": theirs.patch_embed.patch_size[0],
        "width": theirs.embed_dim,
        "depth": len(theirs.blocks),
        "heads": block.attn.num_heads,
        "mlp_width": block.mlp.fc1.out_features,
        "num_classes": theirs.num_classes,
        "norm_eps": block.norm1.eps,
    }
    return VisionTransformer(**sizes | kwargs)


@pytest.mark.parametrize(
    ("name", "theirs_kwargs", "ours_kwargs"),
    [pytest.param(*row, marks=[] if LIGHT.search(row[0]) else [pytest.mark.slow]) for row in VITS],
    ids=str,
)
def test_timm_vits(name: str, theirs_kwargs: dict[str, Any], ours_kwargs: dict[str, Any]) -> None:
    side = int(re.search(r"patch(\d+)", name)[1]) if "patch" in name else 16  # type: ignore[index]
    depth = 1 if re.search("large|huge|giant", name) else 2
    theirs: Any = randomise(timm.create_model(name, img_size=3 * side, depth=depth, **theirs_kwargs)).eval()
    ours = like(theirs, **ours_kwargs).double().eval()
    ours.load_state_dict(in_our_names(theirs.state_dict()))
    batch = images(2, 3 * side)
    with torch.no_grad():
        assert relative_error(ours(batch), theirs(batch)) < 1e-9
    norm = "fc_norm" if "fc_norm.weight" in theirs.state_dict() else "norm"
    back, _ = pretrained.to_timm_vit(ours.state_dict(), norm=norm)
    assert_same_bits(back, theirs.state_dict())


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [pytest.param(*row, id=row[0], marks=[] if LIGHT.search(row[0]) else [pytest.mark.slow]) for row in RESNETS],
)
def test_timm_resnets(name: str, kwargs: dict[str, Any]) -> None:
    theirs = randomise(timm.create_model(name)).eval()
    ours = ResNet(num_classes=1000, **kwargs).double().eval()
    ours.load_state_dict(in_our_names(theirs.state_dict()))
    # An odd size: the mean of ResNet-D has to round as the convolutions do.
    batch = images(2, 75)
    with torch.no_grad():
        assert relative_error(ours(batch), theirs(batch)) < 1e-9
    back = pretrained.to_resnet(ours.state_dict(), shortcut=kwargs.get("shortcut", "conv"))
    assert_same_bits(back, theirs.state_dict())


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("depth", [18, *(pytest.param(depth, marks=pytest.mark.slow) for depth in (34, 50))])
def test_torchvision_resnet(depth: Any, training: bool) -> None:
    theirs = randomise(getattr(torchvision.models, f"resnet{depth}")()).train(training)
    ours = ResNet(depth=depth, num_classes=1000).double().train(training)
    ours.load_state_dict(in_our_names(theirs.state_dict()))
    batch = images(2, 96) if training else images(1, 224)
    found, expected = ours(batch), theirs(batch)
    assert relative_error(found, expected) < 1e-9
    # Training has moved the statistics; evaluation has not.
    back = pretrained.to_resnet(ours.state_dict())
    torch.testing.assert_close(back, theirs.state_dict(), rtol=1e-9, atol=1e-9)
    if training:
        cotangent = torch.randn(expected.shape, dtype=torch.float64)
        for logits in (found, expected):
            (logits * cotangent).sum().backward()
        assert_same_gradients(ours, theirs, in_our_names)
