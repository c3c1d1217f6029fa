"""Full names and image preprocessing of other projects' weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pycls_fast.errors import UserError
from pycls_fast.files import user_path
from pycls_fast.reading import read_json


@dataclass(frozen=True)
class Preprocessing:
    """Preprocessing for scoring: resize, cut out the centre, normalise.

    Attributes:
        weights: the full name, such as "timm:deit_small_patch16_224.fb_in1k".
        image_size: side of the crop in pixels.
        trained_size: the same in training, for torchvision's weights in testing; None if the description lacks it.
        resized_side: length in pixels to which the side or sides that `crop` names are resized.
        interpolation: that of the resizing.
        mean, std: per channel, as fractions of 255.
        crop: "center" resizes the short side, "squash" both, "border" the long one (timm's `crop_mode`).
        unknown: what of it is not supported here, in words; empty if everything is.
    """

    weights: str
    image_size: int
    resized_side: int
    interpolation: str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    crop: str = "center"
    unknown: str = ""
    trained_size: int | None = None


def described(source: str | Path, *, model: str | None = None, for_scoring: bool = True) -> Preprocessing | None:
    """The preprocessing that comes with weights, by timm's or torchvision's name, or from a timm `config.json`.

    Args:
        source: what `read_weights` takes, or a path, beside which the `config.json` lies.
        model: timm's name of the model, whose preprocessing counts for a file that does not describe its own.
        for_scoring: all of it has to be supported here; else only mean and std.

    Returns:
        None for weights that come without one.

    Raises:
        UserError: no such weights, or, for scoring, a preprocessing that is not supported here.
    """
    about = _described(str(source))
    if about is None and model is not None:
        about = _of_timm_model(model)
    if about is not None and for_scoring and about.unknown:
        raise UserError(f"weights: {source} asks for {about.unknown}; preprocessing=config takes the configuration's")
    return about


def _described(text: str) -> Preprocessing | None:
    if text.startswith("timm:"):
        return _of_timm_name(text.removeprefix("timm:"))
    if text.startswith("torchvision:"):
        return _of_torchvision_name(text.removeprefix("torchvision:"))
    path = user_path(text)
    about = path.parent / "config.json"
    if path.suffix not in (".safetensors", ".bin", ".pth") or not about.is_file():
        return None
    try:
        config = read_json(about)
    except (OSError, ValueError) as error:
        raise UserError(f"weights: {about} is not valid JSON ({error})") from error
    # Other libraries keep a config.json beside their weights, too.
    kept = config.get("pretrained_cfg") if isinstance(config, dict) else None
    return _of_timm(kept, str(config.get("architecture", ""))) if isinstance(kept, dict) else None


def _timm_config(name: str) -> Any:
    """timm's `PretrainedCfg`; None for a model or a tag that it does not have."""
    import timm as library

    try:
        return library.models.get_pretrained_cfg(name) if library.is_model(name) else None
    except RuntimeError:
        return None


def _of_timm_model(name: str) -> Preprocessing | None:
    kept = _timm_config(name)
    # A model of the user's own, registered with timm, has none, or one without weights.
    return _of_timm(kept.to_dict(), name) if kept is not None and kept.has_weights else None


def _of_timm_name(name: str) -> Preprocessing | None:
    kept = _timm_config(name)
    if kept is None:
        raise UserError(f"weights: timm has no weights {name}")
    return _of_timm(kept.to_dict(), str(kept.architecture or name.partition(".")[0]))


def _of_timm(kept: Mapping[str, Any], architecture: str) -> Preprocessing:
    """The preprocessing as `timm.data.create_transform` reads it, at the size meant for testing."""
    trained = kept.get("input_size")
    height, size = _height_and_width(kept.get("test_input_size") or trained or (3, 224, 224))
    ratio = kept.get("test_crop_pct") or kept.get("crop_pct") or 0.875
    crop = kept.get("crop_mode") or "center"
    interpolation = str(kept.get("interpolation", "bicubic"))
    return Preprocessing(
        weights=f"timm:{architecture}.{kept['tag']}" if kept.get("tag") else f"timm:{architecture}",
        image_size=int(size),
        resized_side=math.floor(size / ratio),
        interpolation=interpolation,
        mean=rgb_triple(kept.get("mean", (0.485, 0.456, 0.406))),
        std=rgb_triple(kept.get("std", (0.229, 0.224, 0.225))),
        crop=crop,
        unknown=_unknown_crop(crop, ratio, height, size) or _unknown(interpolation),
        trained_size=_height_and_width(trained)[1] if trained else None,
    )


def _height_and_width(size: Any) -> tuple[int, int]:
    """Height and width of an input size in pixels, (C, height, width), or without C as some files have it."""
    match size:
        case (*_, int(height), int(width)):
            return height, width
    raise UserError(f"weights: input_size in their config.json is {size}; correct it to [channels, height, width]")


def torchvision_weights(name: str) -> tuple[str, Any]:
    """Model name and torchvision's `WeightsEnum` entry for "resnet50.IMAGENET1K_V2" or "resnet50".

    Raises:
        UserError: torchvision has no such weights.
    """
    import torchvision as library

    model, _, tag = name.partition(".")
    try:
        return model, library.models.get_model_weights(model)[tag or "DEFAULT"]
    except (KeyError, ValueError) as error:
        raise UserError(f"weights: torchvision {library.__version__} has no weights {name} ({error})") from error


def _of_torchvision_name(name: str) -> Preprocessing:
    model, weights = torchvision_weights(name)
    steps = weights.transforms()
    return Preprocessing(
        weights=f"torchvision:{model}.{weights.name}",
        image_size=steps.crop_size[0],
        resized_side=steps.resize_size[0],
        interpolation=steps.interpolation.value,
        mean=rgb_triple(steps.mean),
        std=rgb_triple(steps.std),
        unknown=_unknown(steps.interpolation.value),
        trained_size=steps.crop_size[0],
    )


def _unknown_crop(crop: str, ratio: float, height: int, width: int) -> str:
    if height != width:
        return f"images of {height} x {width} pixels, but only square ones are supported"
    if crop not in ("center", "squash", "border") or ratio > 1:
        return (
            f"crop_mode={crop} with crop_pct={ratio:g}, but only center, squash and border with at most 1 are supported"
        )
    return ""


def _unknown(interpolation: str) -> str:
    has_it = interpolation in ("bilinear", "bicubic")
    return "" if has_it else f"interpolation={interpolation}, but only bilinear and bicubic are supported"


def rgb_triple(values: Any) -> tuple[float, float, float]:
    """Three floats, one per RGB channel; the one of a model for gray images counts for all three."""
    first, second, third = (float(value) for value in (tuple(values) * 3 if len(values) == 1 else values))
    return first, second, third
