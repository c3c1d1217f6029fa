"""Our models compute what timm's and torchvision's do: float64, random values in every tensor, 1e-9 relative.

Weights go through `pycls_fast.models.foreign`, gradients too, so that a wrong name or cut shows as a wrong
number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from pycls_fast.models import ResNet, SinCos2dPositions, VisionTransformer, foreign

WIDTHS = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12)}
Convert = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


def vit(size: str, **kwargs: Any) -> VisionTransformer:
    width, heads = WIDTHS[size]
    kwargs = {"image_size": 224, "num_classes": 1000} | kwargs
    return VisionTransformer(patch_size=16, width=width, depth=12, heads=heads, mlp_width=4 * width, **kwargs)


def randomise(model: nn.Module) -> nn.Module:
    """Random values in every saved tensor, such that activations stay of order 1 and no tensor is at its
    start."""
    torch.manual_seed(0)
    for name, tensor in model.double().state_dict().items():
        if name.endswith("num_batches_tracked"):
            tensor.fill_(int(torch.randint(1, 100, ())))
        elif name.endswith("running_var"):
            tensor.uniform_(0.5, 2)
        elif tensor.ndim >= 2 and "pos_embed" not in name:
            tensor.normal_(std=1.5 / tensor[0].numel() ** 0.5)
        else:
            tensor.normal_(mean=float(name.endswith("weight")), std=0.4)
    return model


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


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
@pytest.mark.parametrize("size", WIDTHS)
def test_timm_vit(size: str, attention: str) -> None:
    theirs = randomise(timm.create_model(f"vit_{size}_patch16_224")).eval()
    ours = vit(size, attention=attention).double().eval()
    ours.load_state_dict(foreign.from_timm_vit(theirs.state_dict()))
    batch = images(2 if size == "tiny" else 1, 224)
    with torch.no_grad():
        assert relative_error(ours(batch), theirs(batch)) < 1e-9
    back = foreign.to_timm_vit(ours.state_dict())
    assert back.keys() == theirs.state_dict().keys()
    assert all(torch.equal(back[key], tensor) for key, tensor in theirs.state_dict().items())


@pytest.mark.parametrize(
    ("ours_kwargs", "theirs_kwargs"),
    [
        ({"classifier": "token"}, {}),
        ({"classifier": "pooled"}, {"class_token": False, "global_pool": "avg"}),
    ],
)
def test_timm_vit_gradients_in_training_mode(ours_kwargs: dict[str, str], theirs_kwargs: dict[str, Any]) -> None:
    theirs = randomise(timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=11, **theirs_kwargs))
    ours = vit("tiny", image_size=64, num_classes=11, **ours_kwargs).double()
    ours.load_state_dict(foreign.from_timm_vit(theirs.state_dict()))
    batch, cotangent = images(3, 64), torch.randn(3, 11, dtype=torch.float64)
    found, expected = ours(batch), theirs(batch)
    assert relative_error(found, expected) < 1e-9
    for logits in (found, expected):
        (logits * cotangent).sum().backward()
    assert_same_gradients(ours, theirs, foreign.from_timm_vit)


def test_fixed_positions_equal_learned_ones_of_the_same_values() -> None:
    """Also with timm: its learned positions set to ours, the class token's to zero."""
    fixed = vit("tiny", image_size=64, positions="sincos2d").double()
    assert isinstance(fixed.positions, SinCos2dPositions)
    fixed.positions.reset_parameters()  # in float64
    theirs: Any = randomise(timm.create_model("vit_tiny_patch16_224", img_size=64)).eval()
    theirs.pos_embed.data.copy_(fixed.positions.value)
    assert not fixed.positions.value[0].any()
    state = foreign.from_timm_vit(theirs.state_dict())
    del state["positions.value"]
    fixed.load_state_dict(state)
    batch = images(1, 64)
    assert relative_error(fixed(batch), theirs(batch)) < 1e-9


def test_timm_models_of_another_mathematics_are_refused() -> None:
    for name, kwargs in (
        ("vit_tiny_patch16_224", {"class_token": False, "global_pool": "avg", "fc_norm": False}),
        ("vit_tiny_patch16_224", {"global_pool": "avg"}),
        ("vit_tiny_patch16_224", {"num_classes": 0}),
        ("vit_tiny_patch16_224", {"init_values": 1e-5}),
    ):
        with torch.device("meta"):
            state = timm.create_model(name, **kwargs).state_dict()
        with pytest.raises(foreign.UserError, match=r"weights: (missing|unexpected)"):
            foreign.from_timm_vit(state)


def test_torchvision_vit_b_16() -> None:
    theirs = randomise(torchvision.models.vit_b_16()).eval()
    ours = vit("base").double().eval()
    ours.load_state_dict(foreign.from_torchvision_vit(theirs.state_dict()))
    batch = images(1, 224)
    with torch.no_grad():
        assert relative_error(ours(batch), theirs(batch)) < 1e-9
    back = foreign.to_torchvision_vit(ours.state_dict())
    assert back.keys() == theirs.state_dict().keys()
    assert all(torch.equal(back[key], tensor) for key, tensor in theirs.state_dict().items())


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("depth", [18, 50])
def test_torchvision_resnet(depth: Any, training: bool) -> None:
    theirs = randomise(getattr(torchvision.models, f"resnet{depth}")()).train(training)
    ours = ResNet(depth=depth, num_classes=1000).double().train(training)
    ours.load_state_dict(foreign.from_torchvision_resnet(theirs.state_dict()))
    batch = images(2, 96) if training else images(1, 224)
    found, expected = ours(batch), theirs(batch)
    assert relative_error(found, expected) < 1e-9
    # Training has moved the statistics; evaluation has not.
    back = foreign.to_torchvision_resnet(ours.state_dict())
    assert back.keys() == theirs.state_dict().keys()
    for key, tensor in theirs.state_dict().items():
        torch.testing.assert_close(back[key], tensor, rtol=1e-9, atol=1e-9)
    if training:
        cotangent = torch.randn(expected.shape, dtype=torch.float64)
        for logits in (found, expected):
            (logits * cotangent).sum().backward()
        assert_same_gradients(ours, theirs, foreign.from_torchvision_resnet)


@pytest.mark.parametrize("depth", [34, 101, 152])
def test_other_depths_have_torchvisions_and_timms_tensors(depth: Any) -> None:
    with torch.device("meta"):
        ours = ResNet(depth=depth, num_classes=1000).state_dict()
        peers = [getattr(torchvision.models, f"resnet{depth}")(), timm.create_model(f"resnet{depth}")]
    for peer in peers:
        expected = foreign.from_torchvision_resnet(peer.state_dict())
        assert {key: tensor.shape for key, tensor in ours.items()} == {
            key: tensor.shape for key, tensor in expected.items()
        }
