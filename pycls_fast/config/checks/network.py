"""Checks of the network's settings."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pycls_fast.config.checks.helpers import default_of, not_divisible
from pycls_fast.config.schema import ResNetModel, RunConfig, TimmModel, ViTModel


def model_problems(config: RunConfig) -> Iterator[tuple[str, str]]:
    """A model's settings among themselves, and with the image size."""
    model, size = config.model, config.data.image_size
    if isinstance(model, ViTModel):
        if size % model.patch_size:
            yield "data.image_size", not_divisible(size, model.patch_size, f"model.patch_size={model.patch_size}")
        if model.width % model.heads:
            yield "model.width", not_divisible(model.width, model.heads, f"model.heads={model.heads}")
        if model.positions == "sincos2d" and model.width % 4:
            yield "model.width", not_divisible(model.width, 4, "4, which model.positions=sincos2d needs")
        yield from _vit_parts(model)
    if isinstance(model, ResNetModel):
        if model.stem != "small" and size < 32:
            yield (
                "data.image_size",
                f"{size} is too small for model.stem={model.stem} (32 at least); use model.stem=small",
            )
        for key in ("groups", "width_per_group"):
            default = default_of(model, key)
            if model.depth in (18, 34) and getattr(model, key) != default:
                yield (
                    f"model.{key}",
                    f"depth {model.depth} has no bottleneck blocks to group or widen; use model.depth=50, or "
                    f"model.{key}={default}",
                )
    if isinstance(model, TimmModel):
        yield from _timm_options(model)
    if model.num_classes == 1:
        yield "model.num_classes", "classification needs at least 2 classes; got 1"


def _vit_parts(model: ViTModel) -> Iterator[tuple[str, str]]:
    if model.stem == "conv":
        if not model.stem_widths or len(model.stem_widths) != len(model.stem_strides):
            yield (
                "model.stem_strides",
                f"needs one stride for each of model.stem_widths, one at least; got {len(model.stem_strides)} for "
                f"{len(model.stem_widths)}",
            )
        elif math.prod(model.stem_strides) != model.patch_size:
            yield (
                "model.stem_strides",
                f"must multiply to model.patch_size={model.patch_size}; got {math.prod(model.stem_strides)}",
            )
    elif model.stem_widths or model.stem_strides:
        yield (
            "model.stem_widths",
            "has no effect with model.stem=patch; use model.stem=conv, or model.stem_widths=[] model.stem_strides=[]",
        )
    if model.classifier == "token" and model.class_token is False:
        yield "model.class_token", "model.classifier=token reads it; use model.class_token=true or classifier=pooled"


# Our settings that replace options of timm's models.
_INSTEAD_OF_TIMM_OPTIONS = {
    "num_classes": "the classes of the data, or model.num_classes, decide it",
    "in_chans": "images are read as RGB, so it is 3",
    "drop_path_rate": "model.drop_path sets it",
    "features_only": "models here end in a classification head",
    "pretrained": "weights=timm:NAME brings weights",
    "pretrained_cfg": "weights=timm:NAME brings weights",
    "pretrained_cfg_overlay": "weights=timm:NAME brings weights",
    "checkpoint_path": "weights=FILE brings weights",
}


def _timm_options(model: TimmModel) -> Iterator[tuple[str, str]]:
    for name in model.options:
        if name in _INSTEAD_OF_TIMM_OPTIONS:
            yield f"model.options.{name}", f"{_INSTEAD_OF_TIMM_OPTIONS[name]}; leave it out (~model.options.{name})"
