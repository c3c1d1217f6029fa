"""The module that first gives a value that is not finite is named."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pycls_fast.errors import UserError
from pycls_fast.models import ResNet, VisionTransformer
from pycls_fast.train.watchdog import Watchdog


class Spoiler(torch.autograd.Function):
    """Identity whose gradient is not finite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return torch.full_like(gradient, float("inf"))


def vit() -> nn.Module:
    torch.manual_seed(0)
    model = VisionTransformer(image_size=8, patch_size=4, width=16, depth=3, heads=2, mlp_width=24, num_classes=5)
    nn.init.normal_(model.head.weight)
    return model


def resnet() -> nn.Module:
    torch.manual_seed(0)
    return ResNet(depth=18, num_classes=5, stem="small", zero_init_last_gamma=False)


def run(model: nn.Module, watchdog: Watchdog) -> None:
    loss = F.cross_entropy(model(torch.randn(2, 3, 8, 8)), torch.tensor([1, 2]))
    loss.backward()
    watchdog.check(6, loss)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize(
    ("build", "name", "kind"),
    [
        (vit, "blocks.1.mlp.fc2", "Linear"),
        (vit, "stem.projection", "Conv2d"),
        (vit, "head", "Linear"),
        (resnet, "stages.1.0.norm1", "BatchNorm2d"),
    ],
)
def test_forward(build: Any, name: str, kind: str, scaled: bool) -> None:
    model = build()
    watchdog = Watchdog(model, scaled=scaled)
    run(model, watchdog)
    assert watchdog.last is None
    module = model.get_submodule(name)
    with torch.no_grad():
        module.bias[0] = float("nan") if module.bias is not None else 0
    message = f"in the forward pass of step 7 is in the output of {name} ({kind}); lower optim.lr"
    with pytest.raises(UserError, match=re.escape(message)):
        run(model, watchdog)


@pytest.mark.parametrize("build", [vit, resnet])
def test_backward(build: Any) -> None:
    """The gradient is spoilt between two blocks: the one in front is the first that it reaches."""
    for scaled in (True, False):
        model = build()
        (before, _), (_, after) = model.units()[:2]
        after.register_forward_pre_hook(lambda module, inputs: (Spoiler.apply(inputs[0]),))
        watchdog = Watchdog(model, scaled=scaled)
        place = f"in the backward pass of step 7 is in the gradient that reaches the output of {before} ("
        if scaled:
            run(model, watchdog)
            assert place in (watchdog.last or "")
        else:
            with pytest.raises(UserError, match=re.escape(place)):
                run(model, watchdog)


def test_gradient_of_a_weight() -> None:
    model = vit()
    watchdog = Watchdog(model, scaled=False)
    model.blocks[1].mlp.fc1.weight.register_hook(lambda gradient: gradient * float("inf"))  # type: ignore[union-attr,index]
    with pytest.raises(UserError, match=r"the gradient of the weight blocks\.1\.mlp\.fc1\.weight; "):
        run(model, watchdog)
