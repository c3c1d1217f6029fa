"""Layers and their learning rates against timm's, on timm's models and ours."""

from __future__ import annotations

import pytest
import timm.optim
import torch
from torch import nn

from pycls_fast.models import ClassToken, LearnedPositions, ResNet, VisionTransformer
from pycls_fast.network import Network
from pycls_fast.optim.groups import Decay, Kinds, layers, parameter_groups
from pycls_fast.optim.optimizers import set_lr

KINDS = Kinds(embeddings=(ClassToken, LearnedPositions))


def vit(classifier: str = "token", positions: str = "learned") -> VisionTransformer:
    return VisionTransformer(
        image_size=32, patch_size=16, width=16, depth=12, heads=2, mlp_width=24, num_classes=5,
        classifier=classifier, positions=positions,  # type: ignore[arg-type]
    )  # fmt: skip


def conv_vit() -> VisionTransformer:
    return VisionTransformer(
        image_size=8, patch_size=4, width=16, depth=2, heads=2, mlp_width=24, num_classes=5, classifier="pooled",
        stem="conv", stem_widths=(6, 8, 8), stem_strides=(2, 1, 2),
    )  # fmt: skip


def scales(model: nn.Module, decay: float) -> dict[str, tuple[float, float]]:
    """Name -> (scale of the rate, weight decay)."""
    groups = parameter_groups(model, Decay(0.3), KINDS, units=model.units(), layer_decay=decay)  # type: ignore[operator]
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    found = {name_of[p]: (group["lr_scale"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert len(found) == sum(len(group["params"]) for group in groups) == len(name_of)
    return found


def timm_scales(model: nn.Module, decay: float) -> dict[str, float]:
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    groups = timm.optim.param_groups_layer_decay(model, weight_decay=0.3, layer_decay=decay)
    return {name_of[p]: group["lr_scale"] for group in groups for p in group["params"]}


def test_a_vit_has_the_rates_that_timm_gives_it() -> None:
    ours, theirs = (
        scales(vit(), 0.7),
        timm_scales(
            timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=16, num_heads=2, num_classes=5), 0.7
        ),
    )
    pairs = {
        "stem.projection.weight": "patch_embed.proj.weight",
        "stem.projection.bias": "patch_embed.proj.bias",
        "class_token.value": "cls_token",
        "positions.value": "pos_embed",
        "head.weight": "head.weight",
        "head.bias": "head.bias",
    }
    for name, of_timm in pairs.items():
        assert ours[name][0] == pytest.approx(theirs[of_timm], rel=1e-12), name
    for block in range(12):
        own = {scale for name, (scale, _) in ours.items() if name.startswith(f"blocks.{block}.")}
        timms = {scale for name, scale in theirs.items() if name.startswith(f"blocks.{block}.")}
        assert own == {0.7 ** (12 - block)}
        assert list(timms) == pytest.approx(list(own), rel=1e-12)
    # The one difference: the final norm is the head's layer in BEiT and MAE, whose code this follows; timm gives it
    # the last block's.
    assert ours["norm.weight"][0] == ours["norm.bias"][0] == 1.0
    assert theirs["norm.weight"] == pytest.approx(0.7)


def test_a_resnet_has_the_rates_that_timm_gives_it() -> None:
    ours = list(scales(ResNet(depth=18, num_classes=5), 0.8).items())
    theirs = list(timm_scales(timm.create_model("resnet18", num_classes=5), 0.8).items())
    # In the order of the model, in which timm's shortcut and ours stand at the same place up to inside a block.
    assert sorted(scale for _, (scale, _) in ours) == pytest.approx(sorted(scale for _, scale in theirs), rel=1e-12)
    by_name = dict(ours)
    for block in range(8):
        inside = {s for name, (s, _) in ours if name.startswith(f"stages.{block // 2}.{block % 2}.")}
        assert inside == {0.8 ** (8 - block)}
    assert by_name["stem.conv.weight"] == (0.8**9, 0.3)
    assert by_name["head.weight"] == (1.0, 0.3)
    assert by_name["head.bias"] == (1.0, 0.0)


@pytest.mark.parametrize("classifier", ["token", "pooled"])
@pytest.mark.parametrize("positions", ["learned", "sincos2d"])
def test_layers_of_every_kind_of_vit(classifier: str, positions: str) -> None:
    model = vit(classifier, positions)
    layer_of = layers(model, model.units())
    for name, parameter in model.named_parameters():
        if name.startswith("blocks."):
            assert layer_of[parameter] == int(name.split(".")[1]) + 1
        else:
            assert layer_of[parameter] == (13 if name.startswith(("norm", "head")) else 0), name


def test_what_stands_between_units_goes_with_the_one_before() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.LayerNorm(1), nn.Linear(1, 1), nn.Linear(1, 1))
    layer_of = layers(model, [("1", model[1]), ("3", model[3])])
    assert [layer_of[p] for p in model.parameters()] == [0, 0, 1, 1, 1, 1, 2, 2, 3, 3]


def test_groups_of_blocks_are_convnexts() -> None:
    """`get_num_layer_for_convnext` in the optim_factory.py of ConvNeXt, for its 3, 3, 27 and 3 blocks."""
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(38)))
    blocks = [(str(index), model[index]) for index in range(1, 37)]
    theirs = [0, *[1] * 3, *[2] * 3, *(3 + block // 3 for block in range(27)), *[12] * 3, 13]
    layer_of = layers(model, blocks, 12)
    assert [layer_of[module.weight] for module in model] == theirs
    groups = parameter_groups(model, Decay(0.3), units=blocks, layer_decay=0.8, layer_decay_groups=12)
    scale_of = {parameter: group["lr_scale"] for group in groups for parameter in group["params"]}
    assert [scale_of[module.weight] for module in model] == pytest.approx([0.8 ** (13 - layer) for layer in theirs])


@pytest.mark.parametrize("groups", [12, 20])
def test_as_many_groups_as_blocks_change_nothing(groups: int) -> None:
    model = vit()
    assert layers(model, model.units(), groups) == layers(model, model.units())


def test_no_decay_of_layers_is_one_rate_for_all_and_frozen_ones_stay_out() -> None:
    model = vit()
    model.stem.requires_grad_(False)
    groups = parameter_groups(model, Decay(0.3), KINDS, units=model.units(), layer_decay=1.0)
    assert {group["lr_scale"] for group in groups} == {1.0}
    owned = {p for group in groups for p in group["params"]}
    assert owned == {p for p in model.parameters() if p.requires_grad}
    plain = parameter_groups(model, Decay(0.3), KINDS, units=model.units())
    assert [group["name"] for group in plain] == ["decayed", "not decayed"]
    assert all("lr_scale" not in group for group in plain)


def test_the_schedule_reaches_every_layer() -> None:
    model = vit()
    groups = parameter_groups(model, Decay(0.3), KINDS, units=model.units(), layer_decay=0.5)
    optimizer = torch.optim.SGD(groups, lr=1.0)
    set_lr(optimizer, 0.2)
    assert {group["lr"] for group in optimizer.param_groups} == {0.2 * 0.5**n for n in range(14)}


@pytest.mark.parametrize(
    ("model", "stem"),
    [
        (vit(), set()),
        (
            conv_vit(),
            {"stem.convs.1.weight", "stem.convs.2.weight", "stem.projection.weight"},
        ),
        (ResNet(depth=18, num_classes=5), set()),
        (ResNet(depth=50, num_classes=5, stem="deep"), {"stem.deep.1.conv.weight", "stem.conv.weight"}),
    ],
    ids=["vit", "vit_conv", "18", "50_deep"],
)
@pytest.mark.parametrize("layer_decay", [None, 0.7])
def test_hidden_are_the_matrices_between_the_image_and_the_head(
    model: Network, stem: set[str], layer_decay: float | None
) -> None:
    groups = parameter_groups(
        model,
        Decay(0.3),
        KINDS,
        units=model.units(),
        layer_decay=layer_decay,
        split_hidden=True,
        first_conv_name=model.first_conv_name,
    )
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    hidden = {name_of[p] for group in groups if group["hidden"] for p in group["params"]}
    assert hidden == stem | {
        name for name, p in model.named_parameters() if p.ndim >= 2 and name.startswith(("blocks.", "stages."))
    }
    assert sum(len(group["params"]) for group in groups) == len(name_of)
    assert len({group["name"] for group in groups}) == len(groups)


def test_depthwise_convolutions_are_not_hidden_matrices() -> None:
    """Each channel has its own kernel: (C, 1, k, k). Nor is a vector with added dimensions, such as a temperature."""
    block = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 16, 1), nn.Linear(4, 1))
    groups = parameter_groups(block, Decay(0.3), units=[("0", block)], split_hidden=True)
    assert [p for group in groups if group["hidden"] for p in group["params"]] == [block[1].weight]
