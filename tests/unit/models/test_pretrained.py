"""Names of other projects: there and back. What their files compute is compared in `numerics/`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from pycls_fast.errors import UserError
from pycls_fast.models import ResNet, VisionTransformer, pretrained
from tests.factories import Convert, in_our_names
from tests.unit.models.conftest import fill_random


def vit(**kwargs: object) -> VisionTransformer:
    sizes = {"image_size": 16, "patch_size": 8, "width": 12, "depth": 11, "heads": 3, "mlp_width": 20, "num_classes": 5}
    return VisionTransformer(**{**sizes, **kwargs})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("build", "to_theirs"),
    [
        (vit, pretrained.to_timm_vit),
        (lambda: vit(classifier="pooled", registers=1), pretrained.to_timm_vit),
        (lambda: ResNet(depth=18, num_classes=5), pretrained.to_resnet),
        (lambda: ResNet(depth=26, num_classes=5, stem="deep"), pretrained.to_resnet),
    ],
)
def test_there_and_back(build: Callable[[], nn.Module], to_theirs: Convert) -> None:
    state = fill_random(build()).state_dict()
    back = in_our_names(to_theirs(state))
    assert back.keys() == state.keys()
    for key, tensor in state.items():
        assert torch.equal(back[key], tensor), key
        assert back[key].shape == tensor.shape
    with pytest.raises(ValueError, match=r"no name for \['extra'\]"):
        to_theirs(dict(state) | {"extra": torch.zeros(1)})


def test_shapes_of_something_else_are_refused() -> None:
    theirs = pretrained.to_timm_vit(vit().state_dict())
    for key, shape in (("cls_token", (2, 1, 12)), ("blocks.3.attn.qkv.weight", (35, 12))):
        with pytest.raises(UserError, match=f"weights: {key} of shape"):
            in_our_names(theirs | {key: torch.zeros(shape)})
