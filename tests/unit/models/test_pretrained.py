"""What the conversions of checkpoints refuse, and that both directions undo each other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from pycls_fast.errors import UserError
from pycls_fast.models import ResNet, VisionTransformer, pretrained
from pycls_fast.models.pretrained.torchvision import to_torchvision_resnet
from tests.factories import Convert, from_resnet, from_timm_vit
from tests.unit.models.conftest import fill_random


def vit(classifier: str = "token", positions: str = "learned") -> VisionTransformer:
    return VisionTransformer(
        image_size=16,
        patch_size=8,
        width=12,
        depth=11,
        heads=3,
        mlp_width=20,
        num_classes=5,
        classifier=classifier,  # type: ignore[arg-type]
        positions=positions,  # type: ignore[arg-type]
    )


PAIRS: dict[str, tuple[Callable[[], nn.Module], Convert, Convert]] = {
    "timm-token": (vit, pretrained.to_timm_vit, from_timm_vit),
    "timm-pooled": (lambda: vit("pooled"), pretrained.to_timm_vit, from_timm_vit),
    "resnet18": (
        lambda: ResNet(depth=18, num_classes=5),
        to_torchvision_resnet,
        from_resnet,
    ),
    "resnet50": (
        lambda: ResNet(depth=50, num_classes=5),
        to_torchvision_resnet,
        from_resnet,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_there_and_back(name: str) -> None:
    build, to_theirs, to_ours = PAIRS[name]
    state = fill_random(build()).state_dict()
    theirs = to_theirs(state)
    assert not set(theirs) & set(state) - {"head.weight", "head.bias", "norm.weight", "norm.bias"} - {
        key for key in state if key.startswith("blocks.") and (".norm" in key or ".mlp.fc" in key)
    }
    back = to_ours(theirs)
    assert back.keys() == state.keys()
    for key, tensor in state.items():
        assert torch.equal(back[key], tensor), key
        assert back[key].shape == tensor.shape
    build().load_state_dict(back)


@pytest.mark.parametrize("name", PAIRS)
def test_missing_and_unexpected_tensors_are_named(name: str) -> None:
    build, to_theirs, _ = PAIRS[name]
    state = dict(build().state_dict())
    del state["head.bias"]
    with pytest.raises(ValueError, match=r"missing \['head\.bias'\], unexpected \['extra'\]"):
        to_theirs(state | {"extra": torch.zeros(1)})


def test_an_absent_step_counter_is_zero() -> None:
    model = ResNet(depth=18, num_classes=5)
    theirs = to_torchvision_resnet(model.state_dict())
    old = {key: tensor for key, tensor in theirs.items() if not key.endswith("num_batches_tracked")}
    model.stem.norm.num_batches_tracked.fill_(5)  # type: ignore[union-attr]
    model.load_state_dict(from_resnet(old))
    assert model.stem.norm.num_batches_tracked == 0


def test_models_that_are_something_else_are_refused() -> None:
    with pytest.raises(ValueError, match=r"not a vision transformer .*: missing \['positions\.value'\]"):
        pretrained.to_timm_vit(vit(positions="sincos2d").state_dict())
    theirs = pretrained.to_timm_vit(vit().state_dict())
    for key, shape in (("cls_token", (2, 1, 12)), ("blocks.3.attn.qkv.weight", (35, 12))):
        with pytest.raises(UserError, match=f"weights: {key} of shape"):
            from_timm_vit(theirs | {key: torch.zeros(shape)})
