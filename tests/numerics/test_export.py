"""Exported files compute what the model computes, on bytes, and say what they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config
from torch import Tensor, nn

from pycls_fast.data.choices import Augment
from pycls_fast.data.decoders import PillowPicture
from pycls_fast.data.transforms import EvalTransform
from pycls_fast.errors import UserError
from pycls_fast.models import export_formats
from pycls_fast.models.export_formats import open_exported
from pycls_fast.models.external import TimmNetwork
from pycls_fast.models.resnet import ResNet
from tests.factories import randomise, small_vit
from tests.numerics.test_models_peers import relative_error

SIZE = 32
HOW: dict[str, Any] = {"image_size": SIZE, "mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.25)}
HOW |= {"crop_ratio": 0.9, "crop": "center", "interpolation": "bilinear"}
ABOUT = export_formats.About(["cat", "dog, old", "été"], HOW)


def vit(**kwargs: Any) -> nn.Module:
    return randomise(small_vit(**{"image_size": SIZE, "num_classes": 3, **kwargs})).float().eval()


def resnet(**kwargs: Any) -> nn.Module:
    return randomise(ResNet(**{"depth": 18, "num_classes": 3, **kwargs})).float().eval()


MODELS = {
    "vit": vit,
    "vit-pooled": lambda: vit(classifier="pooled", layer_scale=0.1, attention="sdpa"),
    "vit-before": lambda: vit(classifier="pooled", classifier_norm="before_pool", positions="sincos2d"),
    "vit-mae": lambda: vit(classifier="pooled", class_token=True),
    "vit-map": lambda: vit(classifier="map", registers=2, position_tokens="patches"),
    "vit-norms": lambda: vit(num_classes=4, qk_norm=True, registers=1, layout="batch_second", qkv="fused"),
    "vit-distilled": lambda: vit(num_classes=4, distillation_token=True, layer_scale=0.1, qk_norm=True),
    "resnet18d": lambda: resnet(num_classes=4, stem="deep", shortcut="pool"),
    "resnext50": lambda: resnet(depth=50, groups=32, width_per_group=4),
    "regnet": lambda: randomise(TimmNetwork(name="regnety_002", num_classes=4)).float().eval(),
}


def pictures(count: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, SIZE, SIZE), generator=generator, dtype=torch.uint8)


def expected(model: nn.Module, batch: Tensor) -> Tensor:
    """By hand: fractions of 255, mean off, divided by the standard deviation."""
    mean, std = (torch.tensor(values, dtype=torch.float64).view(3, 1, 1) for values in (HOW["mean"], HOW["std"]))
    with torch.no_grad():
        return model.double()((batch.double() / 255 - mean) / std)


@pytest.mark.parametrize("name", MODELS)
def test_timm_opens_the_folder_and_has_identical_logits(tmp_path: Path, name: str) -> None:
    model: Any = MODELS[name]()
    outputs = model.last_layer().out_features
    export_formats.FORMATS["timm"](model, tmp_path / "out", ABOUT)
    theirs = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    batch = torch.randn(2, 3, SIZE, SIZE, dtype=torch.float64)
    with torch.no_grad():
        assert relative_error(theirs.double()(batch), model.double()(batch)) < 1e-9
    # An output that no class has, as of a run with model.num_classes.
    assert theirs.pretrained_cfg["label_names"] == [*ABOUT.classes, "output 3"][:outputs]
    assert tuple(theirs.pretrained_cfg["input_size"]) == (3, SIZE, SIZE)
    # What timm changes for other channels, and for other classes.
    convolutions = [layer for layer, module in theirs.named_modules() if isinstance(module, nn.Conv2d)]
    assert theirs.pretrained_cfg["first_conv"] == convolutions[0]
    heads = theirs.pretrained_cfg["classifier"]
    assert {theirs.get_submodule(head) for head in ([heads] if isinstance(heads, str) else heads)} == {
        module for module in theirs.modules() if isinstance(module, nn.Linear) and module.out_features == outputs
    }


@pytest.mark.parametrize("crop", ["center", "squash", "border"])
@pytest.mark.parametrize(("size", "ratio"), [(32, 0.9), (32, 0.875), (32, 1.0), (64, 64 / 93)])
def test_timm_preprocesses_images_as_evaluation_does(tmp_path: Path, crop: Any, size: int, ratio: float) -> None:
    """Where the resized side is no whole number, timm rounds it down, and evaluation to the nearest."""
    about = replace(ABOUT, how=HOW | {"image_size": size, "crop_ratio": ratio, "crop": crop})
    export_formats.FORMATS["timm"](resnet(), tmp_path / "out", about)
    settings = resolve_data_config(model=timm.create_model(f"local-dir:{tmp_path / 'out'}"))
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8))
    augment = Augment(eval_crop=crop, eval_crop_ratio=ratio)
    ours = EvalTransform(augment, image_size=size, mean=HOW["mean"])(PillowPicture(image), 0)
    theirs = create_transform(**settings, normalize=False)(image)
    np.testing.assert_array_equal(ours.image_HWC, theirs.permute(1, 2, 0).numpy())


# The exporters trace the model, for seconds: the kinds that differ.
EXPORTED = ["vit-map", "vit", "vit-norms", "resnet18d", "regnet"]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["program", "onnx"])
@pytest.mark.parametrize("name", EXPORTED)
def test_exported_files_compute_what_the_model_does(tmp_path: Path, name: str, form: str) -> None:
    """On any number of images. What else is in the files is in tests/unit/inference/test_export.py."""
    model, file = MODELS[name](), tmp_path / f"model{export_formats.SUFFIXES[form]}"
    export_formats.FORMATS[form](model, file, ABOUT)
    assert list(tmp_path.iterdir()) == [file]
    run, _ = open_exported(file)
    for count in (1, 3):
        assert relative_error(run(pictures(count)).double(), expected(model, pictures(count))) < 1e-4
        model.float()


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: vit(stem="conv", stem_widths=(8, 8, 8), stem_strides=(2, 2, 2)), "model.stem=conv"),
        (lambda: vit(pre_logits=24), "model.pre_logits"),
        (lambda: vit(norm_eps=1e-5), "model.norm_eps=1e-05"),
        (lambda: vit(distillation_token=True, position_tokens="patches"), "model.distillation_token with model.pos"),
        (lambda: resnet(stem="small"), "model.stem=small"),
    ],
)
def test_what_timm_does_not_have_is_told(tmp_path: Path, build: Any, key: str) -> None:
    with pytest.raises(UserError, match=f"format: timm has no {key}.*; export as safetensors"):
        export_formats.to_timm(build(), tmp_path / "out", ABOUT)
    assert not (tmp_path / "out").exists()
