"""Weight decay goes by the owner of a parameter, layers and their rates are timm's, hidden matrices are Muon's."""

from __future__ import annotations

import itertools

import pytest
import timm.optim
import torch
from torch import nn

from pycls_fast.models.resnet import ResNet
from pycls_fast.models.vit import VisionTransformer
from pycls_fast.network import Network, Units
from pycls_fast.optim.choices import AdamW, Muon
from pycls_fast.optim.groups import Group, by_name, layers, parameter_groups
from pycls_fast.optim.optimizers import set_lr


def vit(**kwargs: object) -> VisionTransformer:
    sizes = {"image_size": 32, "patch_size": 16, "width": 16, "depth": 12, "heads": 2, "mlp_width": 24}
    return VisionTransformer(**{**sizes, "num_classes": 5, **kwargs})  # type: ignore[arg-type]


def conv_vit() -> VisionTransformer:
    return vit(image_size=8, patch_size=4, depth=2, stem="conv", stem_widths=(6, 8, 8), stem_strides=(2, 1, 2))


class Chain(Network):
    """Modules in a row, of which some are units."""

    def __init__(self, *modules: nn.Module, units: range = range(0)) -> None:
        super().__init__()
        self.body = nn.Sequential(*modules)
        self._units = units

    def units(self) -> Units:
        return [(f"body.{index}", self.body[index]) for index in self._units]


def groups_of(network: Network, **keys: object) -> list[Group]:
    return parameter_groups(network, AdamW(lr=1.0, weight_decay=0.3, **keys))


def names(network: Network, **keys: object) -> dict[str, list[str]]:
    """Group name -> names of its parameters."""
    return {str(group["name"]): group["params"] for group in by_name(network, groups_of(network, **keys))}


def kind(name: str, model: nn.Module) -> str:
    if name in ("class_token.value", "positions.value", "registers.value", "pooling.probe"):
        return "embedding"
    if "scale" in name or isinstance(model.get_submodule(name.rpartition(".")[0]), nn.LayerNorm | nn.BatchNorm2d):
        return "norm"
    return "bias" if name.endswith(".bias") else "weight"


@pytest.mark.parametrize(
    "model",
    [vit(layer_scale=0.1), vit(classifier="map", registers=2), ResNet(depth=50, num_classes=3)],
    ids=["vit", "map", "50"],
)
@pytest.mark.parametrize("decay", list(itertools.product([False, True], repeat=3)))
def test_every_combination_of_kinds(model: Network, decay: tuple[bool, bool, bool]) -> None:
    norms, biases, embeddings = decay
    wanted = {"norm": norms, "bias": biases, "embedding": embeddings, "weight": True}
    everything = [name for name, _ in model.named_parameters()]
    decayed = {name for name in everything if wanted[kind(name, model)]}
    found = names(model, decay_norms=norms, decay_biases=biases, decay_embeddings=embeddings)
    assert set(found["decayed"]) == decayed
    assert set(found.get("not decayed", [])) == set(everything) - decayed
    assert sum(map(len, found.values())) == len(everything)


@pytest.mark.parametrize(
    "norm",
    [nn.LayerNorm(4), nn.RMSNorm(4), nn.GroupNorm(2, 4), nn.BatchNorm1d(4), nn.InstanceNorm2d(4, affine=True)],
    ids=lambda norm: type(norm).__name__,
)
def test_every_kind_of_norm(norm: nn.Module) -> None:
    for decays in (False, True):
        (group,) = groups_of(Chain(norm), decay_norms=decays)
        assert group["weight_decay"] == (0.3 if decays else 0.0)


def test_a_shared_parameter_is_there_once_and_a_frozen_one_not_at_all() -> None:
    model = Chain(nn.Linear(3, 3), nn.Linear(3, 3), nn.LayerNorm(3))
    model.body[1].weight = model.body[0].weight
    model.body[0].bias.requires_grad_(False)
    model.body[2].requires_grad_(False)
    assert names(model) == {"decayed": ["body.0.weight"], "not decayed": ["body.1.bias"]}
    model.requires_grad_(False)
    assert groups_of(model) == []


def scales(model: Network, decay: float) -> dict[str, float]:
    groups = by_name(model, groups_of(model, layer_decay=decay))
    return {name: group["lr_scale"] for group in groups for name in group["params"]}


def timm_scales(model: nn.Module, decay: float) -> dict[str, float]:
    groups = by_name(model, timm.optim.param_groups_layer_decay(model, weight_decay=0.3, layer_decay=decay))
    return {name: group["lr_scale"] for group in groups for name in group["params"]}


def test_a_vit_has_the_rates_that_timm_gives_it() -> None:
    peer = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=16, num_heads=2, num_classes=5)
    ours, theirs = scales(vit(), 0.7), timm_scales(peer, 0.7)
    pairs = {
        "stem.projection.weight": "patch_embed.proj.weight",
        "class_token.value": "cls_token",
        "positions.value": "pos_embed",
        "head.weight": "head.weight",
    }
    pairs |= {f"blocks.{index}.mlp.fc1.bias": f"blocks.{index}.mlp.fc1.bias" for index in range(12)}
    for name, of_timm in pairs.items():
        assert ours[name] == pytest.approx(theirs[of_timm], rel=1e-12), name
    # The one difference: the final norm is the head's layer in BEiT and MAE, whose code this follows; timm gives it
    # the last block's.
    assert ours["norm.weight"] == ours["norm.bias"] == 1.0
    assert theirs["norm.weight"] == pytest.approx(0.7)


def test_a_resnet_has_the_rates_that_timm_gives_it() -> None:
    ours = scales(ResNet(depth=18, num_classes=5), 0.8)
    theirs = timm_scales(timm.create_model("resnet18", num_classes=5), 0.8)
    assert sorted(ours.values()) == pytest.approx(sorted(theirs.values()), rel=1e-12)


def test_what_stands_between_units_goes_with_the_one_before() -> None:
    model = Chain(*(nn.Linear(1, 1) for _ in range(5)), units=range(1, 4, 2))
    layer_of = layers(model, model.units())
    assert [layer_of[p] for p in model.parameters()] == [0, 0, 1, 1, 1, 1, 2, 2, 3, 3]


def test_groups_of_blocks_are_convnexts() -> None:
    """`get_num_layer_for_convnext` in the optim_factory.py of ConvNeXt, for its 3, 3, 27 and 3 blocks."""
    model = Chain(*(nn.Linear(1, 1) for _ in range(38)), units=range(1, 37))
    theirs = [0, *[1] * 3, *[2] * 3, *(3 + block // 3 for block in range(27)), *[12] * 3, 13]
    layer_of = layers(model, model.units(), 12)
    assert [layer_of[module.weight] for module in model.body] == theirs
    assert layers(model, model.units(), 36) == layers(model, model.units(), 50) == layers(model, model.units())
    groups = groups_of(model, layer_decay=0.8, layer_decay_groups=12)
    scale_of = {parameter: group["lr_scale"] for group in groups for parameter in group["params"]}
    assert [scale_of[m.weight] for m in model.body] == pytest.approx([0.8 ** (13 - layer) for layer in theirs])


def test_the_schedule_reaches_every_layer() -> None:
    optimizer = torch.optim.SGD(groups_of(vit(), layer_decay=0.5), lr=1.0)
    set_lr(optimizer, 0.2)
    assert {group["lr"] for group in optimizer.param_groups} == {0.2 * 0.5**n for n in range(14)}


@pytest.mark.parametrize(
    ("model", "stem"),
    [
        (vit(), set()),
        (conv_vit(), {"stem.convs.1.weight", "stem.convs.2.weight", "stem.projection.weight"}),
        (ResNet(depth=50, num_classes=5, stem="deep"), {"stem.deep.1.conv.weight", "stem.conv.weight"}),
    ],
    ids=["vit", "vit_conv", "50_deep"],
)
@pytest.mark.parametrize("layer_decay", [None, 0.7])
def test_hidden_are_the_matrices_between_the_image_and_the_head(
    model: Network, stem: set[str], layer_decay: float | None
) -> None:
    groups = by_name(model, parameter_groups(model, Muon(lr=1.0, layer_decay=layer_decay)))
    assert {name for group in groups if group["hidden"] for name in group["params"]} == stem | {
        name for name, p in model.named_parameters() if p.ndim >= 2 and name.startswith(("blocks.", "stages."))
    }
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    assert len({group["name"] for group in groups}) == len(groups)


def test_depthwise_convolutions_are_not_hidden_matrices() -> None:
    """Each channel has its own kernel: (C, 1, k, k). Nor is a vector with added dimensions, such as a temperature."""
    model = Chain(nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 16, 1), nn.Linear(4, 1), units=range(3))
    groups = by_name(model, parameter_groups(model, Muon(lr=1.0)))
    assert [name for group in groups if group["hidden"] for name in group["params"]] == ["body.1.weight"]
