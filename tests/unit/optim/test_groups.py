"""Groups of parameters: weight decay goes by the owner, layers and their rates are timm's, hidden matrices are Muon's.

Frozen parts do not change, by gradient or by statistics, and cost no optimizer state.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import timm.optim
import torch
from torch import nn

from pycls_fast.errors import UserError
from pycls_fast.models.external import TimmNetwork
from pycls_fast.models.resnet import ResNet
from pycls_fast.models.vit import VisionTransformer
from pycls_fast.network import Network, Units
from pycls_fast.optim.choices import AdamW, Muon
from pycls_fast.optim.groups import Group, by_name, freeze, parameter_groups, parameter_layers
from pycls_fast.parallel.world import floating_buffers
from tests.factories import small_vit


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
    [small_vit(layer_scale=0.1), small_vit(classifier="map", registers=2), ResNet(depth=50, num_classes=3)],
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


class Scaled(nn.MultiheadAttention):
    """What the types of torch do not tell: biases by another name, and scales of the user's own."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.gamma = nn.Parameter(torch.ones(4))


def test_only_matrices_of_an_own_network_decay() -> None:
    assert names(Chain(Scaled()))["decayed"] == ["body.0.in_proj_weight", "body.0.out_proj.weight"]


def scales(model: Network, decay: float) -> dict[str, float]:
    groups = by_name(model, groups_of(model, layer_decay=decay))
    return {name: group["lr_scale"] for group in groups for name in group["params"]}


def timm_scales(model: nn.Module, decay: float) -> dict[str, float]:
    groups = by_name(model, timm.optim.param_groups_layer_decay(model, weight_decay=0.3, layer_decay=decay))
    return {name: group["lr_scale"] for group in groups for name in group["params"]}


def test_a_vit_has_the_rates_that_timm_gives_it() -> None:
    peer = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=16, num_heads=2, num_classes=5)
    ours, theirs = scales(small_vit(depth=12), 0.7), timm_scales(peer, 0.7)
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


def of_convnext(name: str) -> int:
    """`get_num_layer_for_convnext` in ConvNeXt's optim_factory.py for 3, 3, 27 and 3 blocks, by the names of timm."""
    _, kind, *rest = name.split(".")
    if kind != "stages":
        return 0 if kind == "stem" else 13
    stage, part, block, *_ = rest
    if stage == "3":
        return 12
    # What makes maps smaller goes with the blocks behind it.
    return 3 + int(block) // 3 if (stage, part) == ("2", "blocks") else int(stage) + 1


def test_layers_are_convnexts_and_timms() -> None:
    with torch.device("meta"):
        model = TimmNetwork(name="convnext_small", num_classes=5)
    groups = by_name(model, groups_of(model, layer_decay=0.8, layer_decay_groups=12))
    found = {name: group["lr_scale"] for group in groups for name in group["params"]}
    assert found == pytest.approx({name: 0.8 ** (13 - of_convnext(name)) for name in found})
    theirs = {f"network.{name}": scale for name, scale in timm_scales(model.network, 0.8).items()}
    assert scales(model, 0.8) == pytest.approx(theirs)
    assert (
        parameter_layers(model, model.units(), 36)
        == parameter_layers(model, model.units(), 50)
        == parameter_layers(model, model.units())
    )


@pytest.mark.parametrize(
    ("model", "stem"),
    [
        (small_vit(), set()),
        (
            small_vit(stem="conv", stem_widths=(6, 8, 8), stem_strides=(2, 2, 2)),
            {"stem.convs.1.weight", "stem.convs.2.weight", "stem.projection.weight"},
        ),
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


def dropping_vit() -> VisionTransformer:
    torch.manual_seed(0)
    model = small_vit(image_size=8, patch_size=4, num_classes=3, drop_path=0.9)
    nn.init.normal_(model.head.weight)
    return model


def dropping_resnet() -> ResNet:
    torch.manual_seed(0)
    return ResNet(depth=18, num_classes=3, stem="small", zero_init_last_gamma=False, drop_path=0.9)


def dropping_timm() -> TimmNetwork:
    return TimmNetwork(name="resnet18", num_classes=3, image_size=32, drop_path=0.9)


@pytest.mark.parametrize("make", [dropping_vit, dropping_resnet, dropping_timm])
def test_frozen_modules_compute_as_in_evaluation(make: Callable[[], Network]) -> None:
    """Drop-path of 0.9 and batch norm's own statistics would show; a pass through evaluation changes nothing."""
    model = make()
    freeze(model, ["head"])
    trained = [f"{model.head_name}.weight", f"{model.head_name}.bias"]
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == trained
    images = torch.randn(6, 3, *getattr(model, "image_size", (8, 8)))
    model.eval()
    model.train()
    logits = model(images)
    assert logits.requires_grad
    assert torch.equal(logits, model.eval()(images))
    assert model.last_layer().training is False
    assert model.train().last_layer().training is True


def test_units_by_pattern_and_single_parameters() -> None:
    model = dropping_resnet()
    freeze(model, ["head", "stages.3*", "stem.norm.bias"])
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == name.startswith(("head.", "stages.3.", "stem.norm.bias")), name
    # Something in the stem's norm is trained, so its statistics follow; those of frozen stages do not.
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.train()(torch.randn(4, 3, 8, 8))
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]) == name.startswith(("stages.0", "stages.1", "stages.2")), name


def test_only_statistics_that_training_changes_are_shared_among_ranks() -> None:
    model = dropping_resnet()
    every = len(floating_buffers(model.train()))
    freeze(model, ["head", "stages.3.1"])
    model.train()
    own = [b for b in model.stages[3][1].buffers() if b.is_floating_point()]
    assert [id(b) for b in floating_buffers(model)] == [id(b) for b in own]
    assert 0 < len(own) < every


@pytest.mark.parametrize(
    ("pattern", "hint"), [("hed", "did you mean head"), ("blocks.9", "did you mean blocks"), ("x*", "")]
)
def test_a_name_that_is_not_there(pattern: str, hint: str) -> None:
    with pytest.raises(UserError, match=rf"optim.trainable: .*names nothing.*{hint}"):
        freeze(small_vit(), ["head", pattern])


def test_blocks_without_matrices_to_adapt() -> None:
    assert freeze(small_vit(), ["head"], adapted=True)
    with pytest.raises(UserError, match=r"^optim.lora_rank: .* no matrices besides those of optim.trainable; use"):
        freeze(small_vit(), ["head", "blocks"], adapted=True)
