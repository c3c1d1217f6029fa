"""Model settings that checkpoints' tensors do not reveal: same names and shapes, different function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pycls_fast.errors import UserError, refuse
from pycls_fast.models.pretrained.names import jax_heads
from pycls_fast.models.resnet import ResNet, ShortcutKind
from pycls_fast.models.timm_network import TimmNetwork
from pycls_fast.models.vit import Classifier, VisionTransformer

_CLASSIFIERS: dict[str, Classifier] = {"token": "token", "avg": "pooled", "map": "map"}


@dataclass(frozen=True)
class Traits:
    """Settings of the model that weights belong to; None or empty if the source does not say.

    Attributes:
        heads: attention heads of a vision transformer.
        norm_eps: epsilon of its LayerNorms.
        classifier: what its head sees.
        shortcut: how a ResNet's shortcuts make maps smaller.
        unlike: what it does and our models do not, as a phrase after "a model that".
        pools_unlike: the same for its pooling.
    """

    heads: int | None = None
    norm_eps: float | None = None
    classifier: Classifier | None = None
    shortcut: ShortcutKind | None = None
    unlike: str = ""
    pools_unlike: str = ""


def timm_traits(model: Any) -> Traits:
    """Traits of a model built by timm."""
    if any(path.endswith(".aa") and not isinstance(module, nn.Identity) for path, module in model.named_modules()):
        return Traits(unlike="smooths maps before it makes them smaller")
    block: Any = next(iter(getattr(model, "blocks", ())), None)
    if not hasattr(block, "attn"):
        return Traits()
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
    return Traits(
        heads=getattr(block.attn, "num_heads", None),
        norm_eps=getattr(getattr(block, "norm1", None), "eps", None),
        classifier=_CLASSIFIERS.get(pool),
        unlike=unlike,
        pools_unlike=pools_unlike,
    )


def torchvision_vit_traits(model: Any) -> Traits:
    """Traits of a vision transformer built by torchvision."""
    block = model.encoder.layers[0]
    return Traits(heads=block.num_heads, norm_eps=block.ln_1.eps, classifier="token")


def jax_traits(arrays: Mapping[str, Tensor]) -> Traits:
    """Traits of one of Google's vision transformers; neither project changes flax's epsilon."""
    return Traits(heads=jax_heads(arrays), norm_eps=1e-6)


def pycls_traits(settings: str) -> Traits:
    """Traits of the model in a run's configuration of pycls."""
    found = _sections(settings)
    kind = found.get("MODEL", {}).get("TYPE")
    if kind == "vit":
        heads, eps = found.get("VIT", {}).get("NUM_HEADS"), found.get("LN", {}).get("EPS")
        return Traits(heads=heads if isinstance(heads, int) else None, norm_eps=eps if isinstance(eps, float) else None)
    resnet = found.get("RESNET", {})
    if kind == "resnet" and resnet.get("STRIDE_1X1") and resnet.get("TRANS_FUN") == "bottleneck_transform":
        return Traits(unlike="makes maps smaller in its 1x1 convolutions (RESNET.STRIDE_1X1)")
    return Traits()


def pycls_takes_bgr(settings: str) -> bool:
    """Whether the first layer of a run of pycls takes channels in the order blue, green, red.

    pycls reads ImageNet's images with OpenCV and keeps its channel order (`datasets/imagenet.py`, all versions), also
    for the published weights; FFCV's images and CIFAR-10's are red, green, blue.
    """
    found = _sections(settings)
    by_ffcv = found.get("DATA_LOADER", {}).get("MODE") == "ffcv"
    return not by_ffcv and found.get("TRAIN", {}).get("DATASET") != "cifar10"


def _sections(settings: str) -> dict[str, Mapping[str, Any]]:
    """The sections of a run's configuration, which a checkpoint holds as YAML; empty if it is something else."""
    import yaml

    try:
        found = yaml.safe_load(settings)
    except yaml.YAMLError:
        return {}
    return {name: part for name, part in found.items() if isinstance(part, dict)} if isinstance(found, dict) else {}


def check_kind(network: nn.Module, traits: Traits, source: str) -> None:
    """Check that one of our models can compute what the weights were trained for.

    Raises:
        UserError: none can.
    """
    if traits.unlike and not isinstance(network, TimmNetwork):
        raise UserError(_other_model(traits.unlike, source))


def check_settings(network: nn.Module, traits: Traits, source: str, *, with_head: bool) -> None:
    """Check that a network that the weights fit computes what they were trained for.

    Raises:
        UserError: one line for each setting that differs.
    """
    found: list[tuple[str, object, object]] = []
    if isinstance(network, ResNet):
        found.append(("shortcut", traits.shortcut, network.shortcut))
    elif isinstance(network, VisionTransformer):
        if traits.pools_unlike and with_head:
            raise UserError(_other_model(traits.pools_unlike, source))
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


def _other_model(unlike: str, source: str) -> str:
    if source.startswith("timm:"):
        way_out = f"use model=timm model.name={source.removeprefix('timm:')}"
    else:
        way_out = "no model here does; choose other weights"
    return f"weights: {source} is of a model that {unlike}, and the model does not; {way_out}"
