"""Loading other projects' weights for training and for scoring."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pycls_fast.errors import UserError
from pycls_fast.models import ResNet, VisionTransformer
from pycls_fast.models.foreign import to_timm_vit
from pycls_fast.train.weights import load_weights


def vit(classes: int) -> VisionTransformer:
    model = VisionTransformer(
        image_size=16, patch_size=8, width=12, depth=1, heads=3, mlp_width=20, num_classes=classes
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def test_a_fresh_head_is_for_training_only(tmp_path: Path) -> None:
    theirs = vit(3)
    torch.save({"model": to_timm_vit(theirs.state_dict())}, tmp_path / "timm.pth")
    network = vit(2)
    before = network.head.weight.clone()
    origin = load_weights(network, tmp_path / "timm.pth", classes=("a", "b"))
    assert (origin.kind, origin.step) == ("model", None)
    assert torch.equal(network.head.weight, before)
    assert torch.equal(network.positions.value, theirs.positions.value)
    with pytest.raises(UserError, match=r"leaves 2 tensors of the model without values \(head.weight: 2 classes, 3"):
        load_weights(vit(2), tmp_path / "timm.pth", classes=("a", "b"), for_training=False)
    same = vit(3)
    load_weights(same, tmp_path / "timm.pth", classes=("a", "b", "c"), for_training=False)
    assert torch.equal(same.head.weight, theirs.head.weight)


def test_other_class_names_get_a_fresh_head(tmp_path: Path) -> None:
    theirs = vit(2)
    saved = {"format": 1, "model": theirs.state_dict(), "ema": None, "classes": ["cat", "dog"], "step": 9}
    torch.save(saved, tmp_path / "step_000000009.pt")
    network = vit(2)
    origin = load_weights(network, tmp_path, classes=("cat", "dog"))
    assert (origin.step, origin.path) == (9, tmp_path / "step_000000009.pt")
    assert torch.equal(network.head.weight, theirs.head.weight)
    network = vit(2)
    before = network.head.weight.clone()
    origin = load_weights(network, tmp_path, classes=("cat", "fox"))
    assert origin.fitted.fresh.keys() == {"head.weight", "head.bias"}
    assert torch.equal(network.head.weight, before)
    with pytest.raises(UserError, match=r"trained on other classes than data\.root has: output 1 was dog and is fox"):
        load_weights(vit(2), tmp_path, classes=("cat", "fox"), for_training=False)


@pytest.mark.parametrize("classes", [("a", "b"), ("a", "c"), ("a", "b", "c")])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_the_other_shortcut_of_a_run_of_ours_is_told(tmp_path: Path, suffix: str, classes: tuple[str, ...]) -> None:
    """Its tensors have the same names and shapes."""
    state, config = ResNet(depth=18, num_classes=2, shortcut="pool").state_dict(), {"model": {"shortcut": "pool"}}
    file = tmp_path / f"theirs{suffix}"
    if suffix == ".pt":
        saved = {"format": 1, "model": state, "ema": None, "classes": ["a", "b"], "step": 9, "config": config}
        torch.save(saved, file)
    else:
        save_file(state, file, {"classes": '["a", "b"]', "step": "9", "config": json.dumps(config)})
    load_weights(ResNet(depth=18, num_classes=len(classes), shortcut="pool"), file, classes=classes)
    with pytest.raises(UserError, match=r"^weights: .*theirs.* is of a ResNet .*; use model\.shortcut=pool$"):
        load_weights(ResNet(depth=18, num_classes=len(classes)), file, classes=classes)


def test_no_such_weights(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is no file of weights and no run folder .* timm:NAME or torchvision:NAME"):
        load_weights(vit(2), tmp_path / "nowhere", classes=("a", "b"))
