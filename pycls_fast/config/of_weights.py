"""The option `model=of_weights`: the model that `weights` belong to."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from pycls_fast.config.saved import saved_at
from pycls_fast.errors import UserError, refuse
from pycls_fast.files import user_path, weights_at
from pycls_fast.models.choices import PRESETS as MODELS

SOURCES = "a run, a file, timm:NAME, torchvision:NAME or hf:ORG/NAME"
"""What `weights` takes, for messages."""
OF_WEIGHTS = "of_weights"
"""The option of the group `model` with which `weights` chooses the model."""


def none_at(weights: str) -> str:
    """The message that there are no such weights."""
    way_out = f"give {SOURCES}"
    # timm imports torch, which takes seconds: not for the name of a file.
    if not re.search(r"/|\.(safetensors|npz|pyth|pth?)$", weights):
        import timm

        way_out = f"did you mean timm:{weights}?" if timm.is_model_pretrained(weights) else way_out
    return f"there are none at {weights}; {way_out}"


# torchvision's vision transformers under our names; its ResNets have the same.
_TORCHVISION = {"vit_b_16": "vit_b16", "vit_l_16": "vit_l16", "vit_h_14": "vit_h14"}

_DISTILLED = {"deit_tiny": "deit_ti16", "deit_small": "deit_s16", "deit_base": "deit_b16"}


def _of_timm(name: str, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """timm's model; of those with two classifiers, which `TimmNetwork` refuses, our own."""
    preset = _DISTILLED.get(name.partition("_distilled_patch16_")[0])
    if preset:
        return {**MODELS[preset], "distillation_token": True}
    return {"kind": "timm", "name": name, "options": dict(options or {})}


def _of_file(file: str) -> dict[str, Any] | None:
    """The model after which a file is named; None if there is none."""
    # torch's hub adds a part of the file's hash: resnet50-11ad3fa6.pth.
    name = re.sub(r"-[0-9a-f]{8}$", "", file.partition(".")[0])
    preset = MODELS.get(_TORCHVISION.get(name, name))
    if preset is not None:
        return dict(preset)
    import timm

    return _of_timm(name) if timm.is_model(name) else None


def of_weights(values: Mapping[str, Any], kept: Collection[str]) -> tuple[dict[str, Any], Any]:
    """The section `model` for what `weights` names: timm's or torchvision's name, a run or what it saved, or a file
    named as a model (tf_efficientnet_lite0.safetensors, resnet50-11ad3fa6.pth); and the size of the images of a run.

    `of_weights` itself counts for weights that do not say it. The keys that are `kept` stay as they are.

    Raises:
        UserError: there are no weights at a path, so that nothing says for which model the keys are.
    """
    weights, given = str(values.get("weights") or ""), dict(values["model"])
    path = user_path(weights)
    is_missing = bool(weights) and ":" not in weights and weights_at(path) is None
    if is_missing:
        # A run that resumes has its own.
        resume = values.get("resume", "auto")
        run = {"auto": values.get("run_dir"), "never": None}.get(str(resume), resume)
        path = user_path(run or weights)
    hub, _, name = weights.partition(":")
    found: dict[str, Any] | None = None
    size = None
    if hub == "timm" and name:
        found = _of_timm(name)
    elif hub == "torchvision" and name:
        name = name.partition(".")[0]
        preset = MODELS.get(_TORCHVISION.get(name, name))
        if preset is None:
            raise UserError(
                f"weights: torchvision's {name} is no network of ours; see if timm has it: weights=timm:{name}"
            )
        found = dict(preset)
    elif weights and (saved := saved_at(path, around=False)) is not None:
        found, size = {**saved.values["model"], "num_classes": None}, saved.values["data"]["image_size"]
    elif weights and not is_missing:
        from pycls_fast.models import pretrained

        about = pretrained.described(weights)
        if about is not None and about.architecture:
            found = _of_timm(about.architecture, about.options)
        elif path.is_file():
            found = _of_file(path.name)
    if found is None:
        if is_missing:
            refuse([f"weights: {none_at(weights)}"])
        return given, None
    return {**found, **{key: value for key, value in given.items() if key in kept}}, size
