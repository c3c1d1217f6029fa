"""Weights in our names: recognises whose naming scheme they have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from pycls_fast.errors import UserError
from pycls_fast.files import user_path
from pycls_fast.models.pretrained import jax, pycls, timm, torchvision
from pycls_fast.models.pretrained.files import Contents, read_file
from pycls_fast.models.pretrained.hubs import from_hub, is_hub
from pycls_fast.models.pretrained.traits import Traits
from pycls_fast.models.resnet import ShortcutKind

NormPlace = Literal["every_token", "after_pool"]

# Layouts, besides those that the modules of other projects name.
_JAX = "Google's vision transformer"
OURS = "pycls_fast"
TRANSFORMERS = "transformers"
OTHER = "unknown"


@dataclass(frozen=True)
class ReadWeights:
    """The weights that a source holds.

    Attributes:
        source: as it was named.
        layout: whose naming scheme the file has, such as "timm vision transformer".
        tensors: in our names if the layout is known, else in the file's.
        unknown: tensors of the file that have no name in ours, and their shapes.
        unused: the same for parts that are known and never belong to a classifier, such as MAE's decoder.
        norm: what a vision transformer's final norm was trained on; None if the file does not say.
        shortcut: how a ResNet's shortcuts downsample; None if the file does not say.
        bgr: the first layer takes the channels as blue, green, red.
        traits: settings that the source gives and no tensor shows.
        part: which of several sets of weights in the file was used, such as "ema_state"; empty if there is only one.
        classes: names of the outputs, if the file has them.
        step: the step at which one of our runs saved it, if the file says so.
        plain: the file's own tensors under their own names.
    """

    source: str
    layout: str
    tensors: Mapping[str, Tensor]
    unknown: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    unused: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    norm: NormPlace | None = None
    shortcut: ShortcutKind | None = None
    bgr: bool = False
    traits: Traits = field(default_factory=Traits)
    part: str = ""
    classes: tuple[str, ...] | None = None
    step: int | None = None
    plain: Mapping[str, Tensor] = field(default_factory=dict)


def read_weights(source: str) -> ReadWeights:
    """Weights in our names, from a file or a hub.

    Args:
        source: `timm:NAME` or `torchvision:NAME` (`resnet50.IMAGENET1K_V2`, or without the part after the dot for the
            default weights), which are downloaded once; or a file: `.safetensors`, `.npz` (Google's ViT), `.pth`,
            `.pyth`, `.pt`, `.bin` (torch's).

    Raises:
        UserError: no such file or name, or a file that is damaged, not what its name says, or needs code to be read.
    """
    if is_hub(source):
        contents = from_hub(source)
    else:
        path = user_path(source)
        if not path.is_file():
            raise UserError(
                f"weights: {source} is not a file; give a file, a run folder, timm:NAME, torchvision:NAME or "
                "hf:ORG/NAME"
            )
        contents = read_file(path)
    return _in_our_names(source, contents)


def _in_our_names(source: str, contents: Contents) -> ReadWeights:
    state = contents.tensors
    layout, tensors, unknown = detect_layout(state)
    unused = [name for name in unknown if name == "mask_token" or name.startswith("decoder_")]
    norm: NormPlace | None = None
    if layout in (timm.VIT, torchvision.VIT, pycls.VIT, _JAX) and "norm.weight" in tensors:
        norm = "after_pool" if "fc_norm.weight" in state else "every_token"
    shortcut: ShortcutKind | None = None
    if layout in (torchvision.RESNET, pycls.RESNET):
        shortcut = torchvision.resnet_shortcut(state)
    traits = contents.traits
    if layout == _JAX:
        traits = Traits(heads=jax.heads(state), norm_eps=jax.NORM_EPS)
    elif pycls.is_pycls(state):
        traits = pycls.traits(contents.settings)
    if layout in (_JAX, pycls.VIT) and "class_token.value" in tensors:
        # Both have a class token only if the head reads it.
        traits = replace(traits, classifier="token")
    return ReadWeights(
        source=source,
        layout=layout,
        tensors=tensors,
        unknown={name: tuple(state[name].shape) if name in state else () for name in unknown if name not in unused},
        unused={name: tuple(state[name].shape) for name in unused},
        norm=norm,
        shortcut=shortcut,
        bgr=pycls.is_pycls(state) and pycls.takes_bgr(contents.settings),
        traits=traits,
        part=contents.part,
        classes=contents.classes,
        step=contents.step,
        plain=state,
    )


def detect_layout(state: Mapping[str, Tensor]) -> tuple[str, dict[str, Tensor], list[str]]:
    """The layout, the tensors in our names, and the names without one of ours (all of them for an unknown layout)."""
    pycls_resnet = "s1.b1.f.a.weight" in state and "s1.b1.f.se.f_ex.0.weight" not in state
    readers: tuple[tuple[bool, str, Callable[[Mapping[str, Tensor]], tuple[dict[str, Tensor], list[str]]]], ...] = (
        (jax.is_jax_vit(state), _JAX, jax.read_jax_vit),
        ("encoder.block_0.ln_1.weight" in state, pycls.VIT, pycls.read_pycls_vit),
        (pycls_resnet, pycls.RESNET, pycls.read_pycls_resnet),
        ("conv_proj.weight" in state, torchvision.VIT, torchvision.read_torchvision_vit),
        # Swin's patches have the same names, but not its blocks.
        ({"patch_embed.proj.weight", "blocks.0.norm1.weight"} <= state.keys(), timm.VIT, timm.read_timm_vit),
        ("bn1.weight" in state and "layer1.0.conv1.weight" in state, torchvision.RESNET, torchvision.read_resnet),
    )
    for is_it, layout, read in readers:
        if is_it:
            tensors, unknown = read(state)
            return layout, tensors, unknown
    # Other projects' names begin with `stem.`, `blocks.` and `stages.`, too.
    own_block = "stages.0.0.conv1.weight" in state or any(name.startswith("blocks.0.attention.") for name in state)
    if own_block or any(name.startswith("network.") for name in state):
        return OURS, dict(state), []
    parts = {part for name in state for part in name.split(".")}
    if "embeddings" in parts and parts & {"encoder", "layer"}:
        return TRANSFORMERS, {}, list(state)
    return OTHER, {}, list(state)
