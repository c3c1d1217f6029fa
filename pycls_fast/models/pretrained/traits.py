"""What comes with weights: settings of the model that the tensors do not show (same names and shapes, but a different
function), and the preprocessing of images."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from pycls_fast.errors import UserError, did_you_mean, refuse, refusing
from pycls_fast.files import user_path
from pycls_fast.models.choices import INSTEAD_OF_TIMM_OPTIONS
from pycls_fast.models.resnet import ResNet
from pycls_fast.models.vit import VisionTransformer
from pycls_fast.reading import TimmConfig, check, read_json
from pycls_fast.values import Size

_CLASSIFIERS: dict[str, str] = {"token": "token", "avg": "pooled", "map": "map"}


@dataclass(frozen=True)
class Traits:
    """Settings of the model that weights belong to (keys of `model`); None or empty if the source does not say.

    Attributes:
        bgr: its first layer takes the channels in the order blue, green, red.
        unlike: what that model does and ours cannot, as a phrase after "a model that".
        pools_unlike: the same for its pooling.
        model: timm's name of it.
        layers: what each of timm's layers computes besides its tensors, see `layers_of`.
    """

    heads: int | None = None
    norm_eps: float | None = None
    classifier: str | None = None
    classifier_norm: str | None = None
    shortcut: str | None = None
    bgr: bool = False
    unlike: str = ""
    pools_unlike: str = ""
    model: str = ""
    layers: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


def layers_of(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """The kind of each layer with weights and of each activation, by its name, with the settings that change what it
    computes: tf_efficientnet_b0 has the names and shapes of efficientnet_b0."""
    settings = ("eps", "stride", "padding", "dilation")
    return {
        path: (type(module).__name__, *(getattr(module, key, None) for key in settings))
        for path, module in model.named_modules()
        if getattr(module, "weight", None) is not None or path.rpartition(".")[2].startswith("act")
    }


def timm_traits(name: str, model: Any) -> Traits:
    known = Traits(model=name, layers=layers_of(model))
    if any(path.endswith(".aa") and not isinstance(module, nn.Identity) for path, module in model.named_modules()):
        return replace(known, unlike="smooths maps before it makes them smaller")
    block: Any = next(iter(getattr(model, "blocks", ())), None)
    if not hasattr(block, "attn"):
        return known
    unlike = ""
    # GELU by tanh counts as GELU, as timm itself treats Google's models, which were trained with it: the two differ by
    # 5e-4 at most.
    activation = type(getattr(block.mlp, "act", nn.GELU())).__name__
    if getattr(model, "rope", None) is not None:
        unlike = "rotates queries and keys (RoPE)"
    elif "Post" in type(block).__name__:
        unlike = "normalises after attention and MLP"
    elif activation not in ("GELU", "GELUTanh"):
        unlike = f"has {activation} in its MLPs"
    pool = getattr(model, "global_pool", "")
    pools_unlike = "" if not pool or pool in _CLASSIFIERS else f"pools by {pool}"
    if getattr(model, "pool_include_prefix", False) and model.num_prefix_tokens:
        pools_unlike = "pools over class token and registers, too"
    return replace(
        known,
        heads=getattr(block.attn, "num_heads", None),
        norm_eps=getattr(getattr(block, "norm1", None), "eps", None),
        classifier=_CLASSIFIERS.get(pool),
        unlike=unlike,
        pools_unlike=pools_unlike,
    )


def pycls_traits(settings: str) -> Traits:
    """Traits of a model of pycls, from the configuration of its run."""
    found = yaml.safe_load(settings) or {}
    kind, resnet = found.get("MODEL", {}).get("TYPE"), found.get("RESNET", {})
    # pycls reads ImageNet's images with OpenCV and keeps its channel order (`datasets/imagenet.py`, all versions), also
    # for the published weights; FFCV's images and CIFAR-10's are red, green, blue.
    by_ffcv = found.get("DATA_LOADER", {}).get("MODE") == "ffcv"
    traits = Traits(bgr=not by_ffcv and found.get("TRAIN", {}).get("DATASET") != "cifar10")
    if kind == "vit":
        return replace(traits, heads=found.get("VIT", {}).get("NUM_HEADS"), norm_eps=found.get("LN", {}).get("EPS"))
    if kind == "resnet" and resnet.get("STRIDE_1X1") and resnet.get("TRANS_FUN") == "bottleneck_transform":
        return replace(traits, unlike="makes maps smaller in its 1x1 convolutions (RESNET.STRIDE_1X1)")
    return traits


def check_settings(network: nn.Module, traits: Traits, source: str, *, with_head: bool) -> None:
    """Refuse weights of a model with other settings, whose tensors fit the network; one line for each setting."""
    found: list[tuple[str, object, object]] = []
    if isinstance(network, ResNet):
        found.append(("shortcut", traits.shortcut, network.shortcut))
    elif isinstance(network, VisionTransformer):
        if traits.pools_unlike and with_head:
            raise other_model(traits.pools_unlike, traits, source)
        block: Any = network.blocks[0]
        found += [("heads", traits.heads, block.attention.heads), ("norm_eps", traits.norm_eps, network.norm.eps)]
        if with_head:
            found.append(("classifier", traits.classifier, network.classifier))
    refuse(
        f"weights: {source} was trained with model.{key}={_text(theirs)} and the model has {_text(ours)}, which "
        f"computes something else with the same tensors; use model.{key}={_text(theirs)}"
        for key, theirs, ours in found
        if theirs not in (None, ours)
    )


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def other_model(unlike: str, traits: Traits, source: str) -> UserError:
    timms = f"use model=timm model.name={traits.model}"
    way_out = timms if traits.model else "no model here does; choose other weights"
    return UserError(f"weights: {source} is of a model that {unlike}, and the model does not; {way_out}")


@dataclass(frozen=True)
class Description:
    """What their publisher says of weights: their name, the preprocessing for scoring (resize, cut out the centre,
    normalise), and their classes.

    Attributes:
        weights: the full name, such as "timm:deit_small_patch16_224.fb_in1k".
        image_size: that of the crop.
        trained_size: the image size in training (for torchvision's weights, in testing); None if it is not known.
        classes: the names of the outputs; empty for weights without a head, or of classes that nobody names.
        label_names: the same, if they are not ImageNet's, which folders of images rarely have.
        crop_ratio: the crop's size as a share of the size to which images are resized, as `crop` says.
        interpolation: the filter that resizes images.
        mean, std: per channel, as fractions of 255.
        crop: "center", "squash" or "border" (timm's `crop_mode`); see `data.transforms.EvalTransform`.
        unknown: the part that is not supported here, in words; empty if everything is.
        architecture: timm's name of the model; empty for torchvision's.
        options: its arguments, without those that our settings replace.
    """

    weights: str
    image_size: Size
    crop_ratio: float
    interpolation: str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    crop: str = "center"
    unknown: str = ""
    trained_size: Size | None = None
    classes: tuple[str, ...] = ()
    label_names: tuple[str, ...] = ()
    architecture: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def traits(self) -> Traits:
        """Those of timm's model; none of one that timm does not have."""
        import timm

        if not timm.is_model(self.architecture):
            return Traits()
        what = f"weights: {self.weights}: timm {timm.__version__} cannot build it with {self.options}"
        with refusing(what, Exception), torch.device("meta"):
            return timm_traits(self.architecture, timm.create_model(self.architecture, **self.options))


def description_of(source: str | Path, *, model: str | None = None, for_scoring: bool = True) -> Description | None:
    """What is said of weights, by timm's or torchvision's name, or from a timm `config.json`.

    Args:
        source: what `read_weights` takes, or a path, beside which the `config.json` lies.
        model: timm's name of the model, whose description counts for a file that does not describe its own, nor has
            the name of timm's weights.
        for_scoring: all of the preprocessing has to be supported here; else only mean and std.

    Returns:
        None for weights that come without one.

    Raises:
        UserError: no such weights, or, for scoring, a preprocessing that is not supported here.
    """
    project, _, name = str(source).partition(":")
    if project == "timm":
        about: Description | None = timm_weights(name)
    elif project == "torchvision":
        about = _of_torchvision(name)
    else:
        path = user_path(source)
        # A file's name with a tag of timm's says which of the model's weights they are.
        names = [name for name in (path.stem if "." in path.stem else None, model) if name]
        about = _beside(path) or next(filter(None, map(_of_timm_model, names)), None)
    if about is not None and for_scoring and about.unknown:
        raise UserError(f"weights: {source} asks for {about.unknown}; preprocessing=config takes the configuration's")
    return about


def _beside(path: Path) -> Description | None:
    """That of the `config.json` beside a file; other libraries keep one there, too."""
    about = path.parent / "config.json"
    if path.suffix not in (".safetensors", ".bin", ".pth") or not about.is_file():
        return None
    what = f"weights: {about} is not timm's description of a model"
    with refusing(what, OSError, ValueError, TypeError, use="correct it"):
        config = read_json(about)
        if isinstance(config, dict) and "architecture" in config and "pretrained_cfg" not in config:
            # As timm wrote it in 2022.
            config = {**config, "pretrained_cfg": config, "label_names": config.get("labels", ())}
        kept = config.get("pretrained_cfg") if isinstance(config, dict) else None
        if not isinstance(kept, dict) or not kept:
            return None
        kept = kept | {key: config[key] for key in ("num_classes", "label_names", "model_args") if key in config}
        check(TimmConfig, kept)
        return _of_timm(kept, str(config.get("architecture", "")))


def timm_weights(name: str) -> Description:
    """The description of timm's weights; a `UserError` if it has none of this name."""
    import timm

    about = _of_timm_model(name)
    if about is None:
        known = (each if "." in name else each.partition(".")[0] for each in timm.list_pretrained())
        raise UserError(f"weights: timm has no weights {name}{did_you_mean(name, known)}")
    return about


def _of_timm_model(name: str) -> Description | None:
    """That of timm's own weights; None for a name without any, such as a user's own model."""
    import timm

    try:
        kept = timm.models.get_pretrained_cfg(name) if timm.is_model(name) else None
    except RuntimeError:
        return None
    if kept is None or not kept.has_weights:
        return None
    return _of_timm(kept.to_dict(), str(kept.architecture or name.partition(".")[0]))


def _of_timm(kept: Mapping[str, Any], architecture: str) -> Description:
    """The preprocessing as `timm.data.create_transform` has it, at the size meant for testing."""
    from timm.data import resolve_data_config

    found = resolve_data_config(pretrained_cfg=kept, use_test_size=True)
    size = Size(*map(int, found["input_size"][-2:]))
    ratio, crop = found["crop_pct"], found["crop_mode"]
    unknown = _unknown(found["interpolation"])
    if crop not in ("center", "squash", "border") or ratio > 1:
        unknown = (
            f"crop_mode={crop} with crop_pct={ratio:g}, but only center, squash and border with at most 1 are supported"
        )
    trained, names = kept.get("input_size"), kept.get("label_names") or ()
    if isinstance(names, Mapping):
        # By the output, and not of every one.
        names = [names.get(str(place), f"output {place}") for place in range(kept.get("num_classes") or len(names))]
    return Description(
        weights=f"timm:{architecture}.{kept['tag']}" if kept.get("tag") else f"timm:{architecture}",
        image_size=size,
        # Of two whole pixel counts, so that `EvalTransform`'s rounding gives timm's, which rounds down.
        crop_ratio=size.height / math.floor(size.height / ratio),
        interpolation=found["interpolation"],
        mean=rgb_triple(found["mean"]),
        std=rgb_triple(found["std"]),
        crop=crop,
        unknown=unknown,
        trained_size=Size(*map(int, trained[-2:])) if trained else None,
        classes=tuple(names) or _imagenet_classes(kept.get("num_classes")),
        label_names=tuple(names),
        architecture=architecture,
        options={
            key: value
            for key, value in (kept.get("model_args") or {}).items()
            if key not in (*INSTEAD_OF_TIMM_OPTIONS, "img_size") and value is not None
        },
    )


@cache
def _imagenet_classes(count: int | None) -> tuple[str, ...]:
    """The first of WordNet's words for each class of that set of ImageNet's which has so many, with the WordNet id
    where several classes have the word (a bird and a machine are cranes)."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset({"num_classes": count})
    if subset is None:
        return ()
    info = ImageNetInfo(subset)
    words = [each.partition(",")[0] for each in info.label_descriptions()]
    times = Counter(words)
    return tuple(
        word if times[word] == 1 else f"{word} ({wnid})" for word, wnid in zip(words, info.label_names(), strict=True)
    )


def torchvision_weights(name: str) -> tuple[str, Any]:
    """Model name and torchvision's `WeightsEnum` entry for "resnet50.IMAGENET1K_V2" or "resnet50".

    Raises:
        UserError: torchvision has no such weights.
    """
    import torchvision

    model, _, tag = name.partition(".")
    with refusing(f"weights: torchvision {torchvision.__version__} has no weights {name}", KeyError, ValueError):
        return model, torchvision.models.get_model_weights(model)[tag or "DEFAULT"]


def _of_torchvision(name: str) -> Description:
    model, weights = torchvision_weights(name)
    steps = weights.transforms()
    side = steps.crop_size[0]
    return Description(
        weights=f"torchvision:{model}.{weights.name}",
        image_size=Size.of(side),
        crop_ratio=side / steps.resize_size[0],
        interpolation=steps.interpolation.value,
        mean=rgb_triple(steps.mean),
        std=rgb_triple(steps.std),
        unknown=_unknown(steps.interpolation.value),
        trained_size=Size.of(side),
        classes=tuple(weights.meta["categories"]),
    )


def _unknown(interpolation: str) -> str:
    has_it = interpolation in ("bilinear", "bicubic")
    return "" if has_it else f"interpolation={interpolation}, but only bilinear and bicubic are supported"


def rgb_triple(values: Any) -> tuple[float, float, float]:
    """Three floats, one per RGB channel; the one of a model for gray images counts for all three."""
    first, second, third = (float(value) for value in (tuple(values) * 3 if len(values) == 1 else values))
    return first, second, third
