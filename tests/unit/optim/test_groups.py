"""Weight decay goes by the type of the module that owns a parameter."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from pycls_fast.models import ClassToken, LearnedPositions, ResNet, VisionTransformer
from pycls_fast.optim.groups import Decay, Kinds, parameter_groups

KINDS = Kinds(embeddings=(ClassToken, LearnedPositions))


def names(model: nn.Module, groups: Sequence[dict[str, object]]) -> dict[str, set[str]]:
    """Group name -> names of its parameters; fails when one is there twice."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {}
    seen: set[int] = set()
    for group in groups:
        parameters = group["params"]
        assert isinstance(parameters, list)
        assert not seen & {id(p) for p in parameters}
        assert len({id(p) for p in parameters}) == len(parameters) > 0
        seen |= {id(p) for p in parameters}
        found[str(group["name"])] = {name_of[id(p)] for p in parameters}
    return found


def vit() -> VisionTransformer:
    return VisionTransformer(image_size=16, patch_size=8, width=8, depth=2, heads=2, mlp_width=12, num_classes=5)


def kind(name: str, model: nn.Module) -> str:
    owner = model.get_submodule(name.rpartition(".")[0])
    if isinstance(owner, nn.LayerNorm | nn.BatchNorm2d):
        return "norm"
    if isinstance(owner, KINDS.embeddings):
        return "embedding"
    return "bias" if name.endswith(".bias") else "weight"


@pytest.mark.parametrize(
    "model", [vit(), ResNet(depth=18, num_classes=3), ResNet(depth=50, num_classes=3)], ids=["vit", "18", "50"]
)
@pytest.mark.parametrize("decay", list(itertools.product([False, True], repeat=3)))
def test_every_combination_of_kinds(model: nn.Module, decay: tuple[bool, bool, bool]) -> None:
    norms, biases, embeddings = decay
    groups = parameter_groups(model, Decay(0.3, norms=norms, biases=biases, embeddings=embeddings), KINDS)
    wanted = {"norm": norms, "bias": biases, "embedding": embeddings, "weight": True}
    everything = {name for name, _ in model.named_parameters()}
    decayed = {name for name in everything if wanted[kind(name, model)]}
    found = names(model, groups)
    assert found["decayed"] == decayed
    assert found.get("not decayed", set()) == everything - decayed
    assert {str(group["name"]): group["weight_decay"] for group in groups} == (
        {"decayed": 0.3, "not decayed": 0.0} if everything - decayed else {"decayed": 0.3}
    )


def test_a_vit_by_name() -> None:
    """Written out, so that the test above cannot share a mistake with the code."""
    model = vit()
    found = names(model, parameter_groups(model, Decay(0.1), KINDS))
    matrices = {name for name, p in model.named_parameters() if p.ndim > 1 and not name.startswith("positions")}
    assert "head.weight" in matrices
    assert found["decayed"] == matrices
    assert {name for name in found["not decayed"] if name.endswith("value")} == {"class_token.value", "positions.value"}


class Odd(nn.Module):
    """Names that say the opposite of what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_weight = nn.Linear(3, 3)
        self.bias = nn.Linear(3, 3, bias=False)
        self.weight = nn.LayerNorm(3)
        self.position_table = nn.Linear(3, 3)
        self.plain = LearnedPositions(4, 3)
        self.norm = nn.Parameter(torch.zeros(3))


def test_names_decide_nothing() -> None:
    model = Odd()
    found = names(model, parameter_groups(model, Decay(0.1), KINDS))
    assert found == {
        "decayed": {"norm_weight.weight", "bias.weight", "position_table.weight", "norm"},
        "not decayed": {"norm_weight.bias", "weight.weight", "weight.bias", "position_table.bias", "plain.value"},
    }


class ScaledLinear(nn.Linear):
    """A linear layer that owns a parameter with a norm's name, and one below nobody."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.norm_weight = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize(
    "norm",
    [nn.LayerNorm(4), nn.RMSNorm(4), nn.GroupNorm(2, 4), nn.BatchNorm1d(4), nn.InstanceNorm2d(4, affine=True)],
    ids=lambda norm: type(norm).__name__,
)
def test_every_kind_of_norm(norm: nn.Module) -> None:
    (group,) = parameter_groups(nn.Sequential(norm), Decay(0.1))
    assert (group["name"], group["weight_decay"]) == ("not decayed", 0.0)
    (group,) = parameter_groups(nn.Sequential(norm), Decay(0.1, norms=True))
    assert (group["name"], group["weight_decay"]) == ("decayed", 0.1)


def test_a_shared_parameter_is_there_once_and_a_frozen_one_not_at_all() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.LayerNorm(3))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    model[2].requires_grad_(False)
    assert names(model, parameter_groups(model, Decay(0.1))) == {
        "decayed": {"0.weight"},
        "not decayed": {"1.bias"},
    }
    model.requires_grad_(False)
    assert parameter_groups(model, Decay(0.1)) == []
