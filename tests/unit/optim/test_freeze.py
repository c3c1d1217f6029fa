"""Frozen parts do not change, by gradient or by statistics, and cost no optimizer state."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from pycls_fast.errors import UserError
from pycls_fast.models.resnet import ResNet
from pycls_fast.models.vit import VisionTransformer
from pycls_fast.models.wrapped import TimmNetwork
from pycls_fast.network import Network
from pycls_fast.optim.choices import AdamW
from pycls_fast.optim.groups import freeze, parameter_groups
from pycls_fast.parallel.world import floating_buffers
from tests.factories import small_vit


def vit() -> VisionTransformer:
    torch.manual_seed(0)
    model = small_vit(image_size=8, patch_size=4, num_classes=3, drop_path=0.9)
    nn.init.normal_(model.head.weight)
    return model


def resnet() -> ResNet:
    torch.manual_seed(0)
    return ResNet(depth=18, num_classes=3, stem="small", zero_init_last_gamma=False, drop_path=0.9)


def train(model: Network, steps: int = 3) -> None:
    groups = parameter_groups(model, AdamW(lr=1.0, weight_decay=0.1))
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 8, 8)).square().sum().backward()
        optimizer.step()
    owned = {p for group in optimizer.param_groups for p in group["params"]}
    assert owned == {p for p in model.parameters() if p.requires_grad} == set(optimizer.state)


def changed(before: dict[str, torch.Tensor], model: nn.Module) -> set[str]:
    return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}


def timms() -> TimmNetwork:
    return TimmNetwork(name="resnet18", num_classes=3, image_size=32, drop_path=0.9)


@pytest.mark.parametrize("make", [vit, resnet, timms])
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
    model = resnet()
    freeze(model, ["head", "stages.3*", "stem.norm.bias"])
    before = copy.deepcopy(model.state_dict())
    train(model)
    found = changed(before, model)
    assert "stem.norm.bias" in found
    assert {name.split(".")[0] for name in found} == {"head", "stages", "stem"}
    parameters = {name for name, _ in model.named_parameters() if name in found}
    assert all(name.startswith(("head.", "stages.3.", "stem.norm.bias")) for name in parameters)
    assert "stem.norm.weight" not in found
    # Something in the norm is trained, so its statistics follow; those of frozen stages do not.
    assert "stem.norm.running_mean" in found
    assert not any(name.startswith(("stages.0", "stages.1", "stages.2")) for name in found)


def test_only_statistics_that_training_changes_are_shared_among_ranks() -> None:
    model = resnet()
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
        freeze(vit(), ["head", pattern])
