"""Options of groups without a file, such as `model=vit_b16` and `precision=fp32`; a file of the same name wins."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore

from pycls_fast.choice import FAMILIES, Section
from pycls_fast.config.keys import as_typed
from pycls_fast.config.run import Parallel, Precision
from pycls_fast.errors import UserError
from pycls_fast.reading import read_yaml

# Depth, width, heads and the MLP's width. Ti, S and B: DeiT (Touvron et al. 2021, Table 1); L and H: Dosovitskiy et al.
# 2021, Table 1; g: Zhai et al., Scaling Vision Transformers, 2022, Table 2; GF: Xiao et al., Early Convolutions Help
# Transformers See Better, 2021, Table 2 and pycls' branch vitconfigs.
_SIZES = {
    "ti": (12, 192, 3, 768),
    "s": (12, 384, 6, 1536),
    "b": (12, 768, 12, 3072),
    "l": (24, 1024, 16, 4096),
    "h": (32, 1280, 16, 5120),
    "g": (40, 1408, 16, 6144),
    "1gf": (12, 192, 3, 576),
    "4gf": (12, 384, 6, 1152),
    "18gf": (12, 768, 12, 3072),
    "36gf": (14, 1024, 16, 4096),
}


def _vit(size: str, patch_size: int = 16, **more: Any) -> dict[str, Any]:
    depth, width, heads, mlp_width = _SIZES[size]
    sizes = {"width": width, "depth": depth, "heads": heads, "mlp_width": mlp_width}
    return {"kind": "vit", "patch_size": patch_size, **sizes, **more}


def _vit_c(size: str, widths: list[int], strides: list[int]) -> dict[str, Any]:
    """Convolutions for the patches and one block."""
    depth = _SIZES[size][0] - 1
    return _vit(size) | {"depth": depth, "stem": "conv", "stem_widths": widths, "stem_strides": strides}


def _resnet(depth: int, **more: Any) -> dict[str, Any]:
    return {"kind": "resnet", "depth": depth, **more}


def _timm(name: str) -> dict[str, Any]:
    return {"kind": "timm", "name": name}


# The repository of DeiT begins with the values of timm.
_DEIT: dict[str, Any] = {"init": "trunc_normal"}
# DeiT III (Touvron et al. 2022): layer scale, no position for the class token, one drop-path rate.
_DEIT3: dict[str, Any] = {**_DEIT, "position_tokens": "patches", "layer_scale": 1.0e-4, "drop_path_rule": "constant"}
# ResNet-D: He et al., Bag of Tricks, 2019, Table 5; timm's names.
_D = {"stem": "deep", "shortcut": "pool"}
_WIDE_STEM = ([64, 128, 128, 256, 256, 512], [2, 2, 1, 2, 1, 2])

MODELS: dict[str, dict[str, Any]] = {
    "vit_ti16": _vit("ti"),
    "vit_s16": _vit("s"),
    "vit_b16": _vit("b"),
    "vit_l16": _vit("l"),
    "vit_h16": _vit("h"),
    "vit_h14": _vit("h", 14),
    # With its attention pooling: Zhai et al. 2022, section 3.2.
    "vit_g14": _vit("g", 14, classifier="map"),
    # Beyer et al., Better plain ViT baselines for ImageNet-1k, 2022 (big_vision, vit_s16_i1k.py).
    "vit_s16_gap": _vit("s", classifier="pooled", classifier_norm="before_pool", pre_logits=384, positions="sincos2d"),
    "deit_ti16": _vit("ti", **_DEIT),
    "deit_s16": _vit("s", **_DEIT),
    "deit_b16": _vit("b", **_DEIT),
    "deit3_s16": _vit("s", **_DEIT3),
    "deit3_b16": _vit("b", **_DEIT3),
    "deit3_l16": _vit("l", **_DEIT3),
    "deit3_h14": _vit("h", 14, **_DEIT3),
    "vit_p_1gf": _vit("1gf"),
    "vit_p_4gf": _vit("4gf"),
    "vit_p_18gf": _vit("18gf"),
    "vit_p_36gf": _vit("36gf"),
    "vit_c_1gf": _vit_c("1gf", [24, 48, 96, 192], [2, 2, 2, 2]),
    "vit_c_4gf": _vit_c("4gf", [48, 96, 192, 384], [2, 2, 2, 2]),
    "vit_c_18gf": _vit_c("18gf", *_WIDE_STEM),
    "vit_c_36gf": _vit_c("36gf", *_WIDE_STEM),
    # For images of 16 x 16: 16 patches of 4 x 4.
    "vit_digits": {
        "kind": "vit",
        "patch_size": 4,
        "width": 64,
        "depth": 4,
        "heads": 4,
        "mlp_width": 128,
        "classifier": "pooled",
    },
    # For images of 32 x 32: 64 patches of 4 x 4 made by convolutions (Xiao et al. 2021), half of its operations.
    "vit_cifar": {
        "kind": "vit",
        "patch_size": 4,
        "width": 192,
        "depth": 6,
        "heads": 3,
        "mlp_width": 384,
        "classifier": "pooled",
        "stem": "conv",
        "stem_widths": [64, 128, 128, 256, 256],
        "stem_strides": [1, 2, 1, 2, 1],
    },
    # He et al. 2016, Table 1, with the stride in the 3x3 convolution; the depth of ResNet-200: He et al., Identity
    # Mappings, 2016, here with post-activation blocks, as in pycls.
    "resnet18": _resnet(18),
    "resnet34": _resnet(34),
    "resnet50": _resnet(50),
    "resnet101": _resnet(101),
    "resnet152": _resnet(152),
    "resnet200": _resnet(200),
    "resnet50d": _resnet(50, **_D),
    "resnet101d": _resnet(101, **_D),
    "resnet152d": _resnet(152, **_D),
    # Xie et al. 2017, Table 1; torchvision's names. 101_32x4d is pycls' X-101.
    "resnext50_32x4d": _resnet(50, groups=32, width_per_group=4),
    "resnext101_32x4d": _resnet(101, groups=32, width_per_group=4),
    "resnext101_32x8d": _resnet(101, groups=32, width_per_group=8),
    "resnext101_64x4d": _resnet(101, groups=64, width_per_group=4),
    # Zagoruyko and Komodakis 2016, Table 8; torchvision's names.
    "wide_resnet50_2": _resnet(50, width_per_group=128),
    "wide_resnet101_2": _resnet(101, width_per_group=128),
    # Without the early strides, for which 8 x 8 images are too small.
    "resnet_digits": _resnet(18, stem="small"),
    # Radosavovic et al., Designing Network Design Spaces, 2020; Tan and Le 2019.
    "regnetx_4gf": _timm("regnetx_040"),
    "regnety_4gf": _timm("regnety_040"),
    "efficientnet_b0": _timm("efficientnet_b0"),
    # Any model of timm: model=timm model.name=convnext_tiny, or model=convnext_tiny.
    "timm": {"kind": "timm"},
    # The model that `weights` names (timm:NAME, torchvision:NAME, a run's folder); for files that do not say it:
    "of_weights": _vit("b"),
}


def _named(names: typing.Iterable[str]) -> dict[str, dict[str, Any]]:
    return {name: {"name": name} for name in names}


def _names(section: type[Section]) -> Sequence[str]:
    return typing.get_args(section.model_fields["name"].annotation)


PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "model": MODELS,
    # What data.root holds is recognised (auto), or class folders, or random images in memory.
    "data": {name: {"source": name} for name in ("auto", "folder", "synthetic")},
    "loss": _named(FAMILIES["loss"].choices()),
    # step: a tenth of the rate after every 30 epochs (He et al. 2016; torchvision's references).
    "schedule": {
        **_named(FAMILIES["schedule"].choices()),
        "step": {"name": "step", "step_epochs": 30, "step_factor": 0.1},
    },
    "precision": _named(_names(Precision)),
    "parallel": _named(_names(Parallel)),
    "speed": {name: {"preset": name} for name in ("reference", "fast")},
    "runtime": {"default": {"device": "auto"}},
}
"""Group -> option -> its values."""


def options(group: str, folders: Sequence[Path]) -> list[str]:
    """The names that `group=NAME` takes: of presets, and of files in folders of configurations."""
    return sorted(
        {*PRESETS.get(group, ()), *(file.stem for folder in folders for file in (folder / group).glob("*.yaml"))}
    )


def _register() -> None:
    store = ConfigStore.instance()
    for group, presets in PRESETS.items():
        for name, values in presets.items():
            store.store(name, dict(values), group=group, provider="pycls_fast")


# Hydra looks for an option here if no folder has a file for it.
_register()


OF_WEIGHTS = "of_weights"
"""The option of the group `model` with which `weights` chooses the model."""

# torchvision's vision transformers under our names; its ResNets have the same.
_TORCHVISION = {"vit_b_16": "vit_b16", "vit_l_16": "vit_l16", "vit_h_14": "vit_h14"}


def model_of_weights(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The section `model` for what `weights` names: timm's or torchvision's name, or a run's folder.

    `of_weights` itself counts for weights that do not say it.
    """
    weights, given = str(values.get("weights") or ""), dict(values["model"])
    hub, _, name = weights.partition(":")
    found: dict[str, Any] | None = None
    if hub == "timm" and name:
        found = {"kind": "timm", "name": name}
    elif hub == "torchvision" and name:
        name = name.partition(".")[0]
        preset = MODELS.get(_TORCHVISION.get(name, name))
        found = None if preset is None else dict(preset)
    elif weights and (Path(weights) / "config.yaml").is_file():
        try:
            found = {**read_yaml(Path(weights) / "config.yaml")["model"], "num_classes": None}
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(f"weights: {weights}/config.yaml cannot be read ({error}); give its checkpoint") from error
    if found is None:
        return given
    typed = {override.lstrip("+").partition("=")[0].removeprefix("model.") for override in overrides}
    return {**found, **{key: value for key, value in given.items() if key in typed}}


def timm_written_out(override: str, folders: Sequence[Path]) -> list[str]:
    """`model=NAME` as `model=timm model.name=NAME` if only timm has a model of this name; else the override."""
    key, _, name = override.partition("=")
    plain = name.replace("_", "").replace(".", "").isalnum()
    if key != "model" or not plain or name in options("model", folders):
        return [override]
    # Takes a second to import; a mistyped name of ours may take it, too.
    import timm

    return ["model=timm", f"model.name={name}"] if timm.is_model(name) else [override]


# They do not change what trained weights compute; the number of classes follows from the data.
_ONLY_TRAINING = {"num_classes", "drop_path", "drop_path_rule", "init", "zero_init_last_gamma"}


def model_overrides(model: Mapping[str, Any]) -> str | None:
    """The closest preset and what differs from it: `model=resnet50 model.groups=32`.

    Args:
        model: the section `model` of a saved configuration; None is returned if its kind is unknown.
    """
    kind = FAMILIES["model"].choices().get(str(model.get("kind")))
    if kind is None:
        return None
    defaults = {key: field.default for key, field in kind.model_fields.items() if not field.is_required()}
    candidates = []
    for name, preset in MODELS.items():
        if name == OF_WEIGHTS:
            continue
        own = defaults | preset
        if own["kind"] == model["kind"]:
            changed = [key for key, value in model.items() if key not in own or as_typed(value) != as_typed(own[key])]
            computing = [key for key in changed if key not in _ONLY_TRAINING]
            # model=timm leaves the name open, which is closer than a preset with another name.
            contradicted = [key for key in computing if key in own]
            candidates.append((len(contradicted), len(computing), len(changed), name, computing))
    *_, name, keys = min(candidates)
    return " ".join([f"model={name}", *(f"model.{key}={as_typed(model[key])}" for key in keys)])
