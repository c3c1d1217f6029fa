"""Names of torchvision's vision transformers and ResNets; timm's ResNets have the same."""

from __future__ import annotations

from torch import Tensor

from pycls_fast.models.pretrained.tables import (
    Entry,
    State,
    conv_norm,
    depth,
    joined,
    layer,
    to_theirs,
    translate,
)
from pycls_fast.models.resnet import ShortcutKind

VIT = "torchvision vision transformer"
RESNET = "torchvision resnet"


def read_torchvision_vit(state: State) -> tuple[dict[str, Tensor], list[str]]:
    """A vision transformer's tensors in our names, and the names of the rest; also for files from before 0.13."""
    renamed = {
        name.replace(".mlp.linear_1.", ".mlp.0.").replace(".mlp.linear_2.", ".mlp.3."): tensor
        for name, tensor in state.items()
    }
    return translate(renamed, _vit(depth(renamed, "encoder.layers.encoder_layer_")), VIT)


def to_torchvision_resnet(state: State) -> dict[str, Tensor]:
    """Our ResNet in torchvision's names; those for shortcuts with a mean before the convolution are timm's.

    Raises:
        ValueError: missing or unexpected tensors.
    """
    blocks = [(stage, index) for stage in range(4) for index in range(depth(state, f"stages.{stage}."))]
    shortcuts = [(s, i) for s, i in blocks if f"stages.{s}.{i}.shortcut.conv.weight" in state]
    bottleneck = "stages.0.0.conv3.weight" in state
    deep = "stem.deep.0.conv.weight" in state
    return to_theirs(state, _resnet(blocks, shortcuts, bottleneck, deep, pooled=False), "resnet")


def to_timm_resnet(state: State, *, shortcut: str) -> dict[str, Tensor]:
    """Our ResNet in timm's names, where a "pool" shortcut's first module is the mean, so the others count from 1."""
    theirs = to_torchvision_resnet(state)
    if shortcut != "pool":
        return theirs
    return {
        name.replace(".downsample.1.", ".downsample.2.").replace(".downsample.0.", ".downsample.1."): tensor
        for name, tensor in theirs.items()
    }


def read_resnet(state: State) -> tuple[dict[str, Tensor], list[str]]:
    """A ResNet's tensors in our names, and the names of the rest; torchvision's, and timm's ResNet-C and -D.

    Where batch norm's step counter is missing, as in old files, it is 0.
    """
    return translate(state, _resnet(*_structure(state)), RESNET)


def resnet_shortcut(state: State) -> ShortcutKind:
    """The way a ResNet's shortcuts downsample; timm counts the mean before the convolution, which has no tensors."""
    return "pool" if any(name.endswith(".downsample.2.weight") for name in state) else "conv"


Blocks = list[tuple[int, int]]


def _structure(state: State) -> tuple[Blocks, Blocks, bool, bool, bool]:
    blocks = [(stage, index) for stage in range(4) for index in range(depth(state, f"layer{stage + 1}."))]
    pooled = resnet_shortcut(state) == "pool"
    convs = "downsample.1.weight" if pooled else "downsample.0.weight"
    shortcuts = [(s, i) for s, i in blocks if f"layer{s + 1}.{i}.{convs}" in state]
    return blocks, shortcuts, "layer1.0.conv3.weight" in state, "conv1.0.weight" in state, pooled


def _vit(depth: int) -> list[Entry]:
    table = [Entry("class_token", ("class_token.value",), ones=(0, 1))]
    table += [Entry("encoder.pos_embedding", ("positions.value",), ones=(0,))]
    table += layer("conv_proj", "stem.projection")
    for index in range(depth):
        theirs, ours = f"encoder.layers.encoder_layer_{index}", f"blocks.{index}"
        table += layer(f"{theirs}.ln_1", f"{ours}.norm1")
        table += joined(f"{theirs}.self_attention.in_proj_", f"{ours}.attention")
        table += layer(f"{theirs}.self_attention.out_proj", f"{ours}.attention.projection")
        table += layer(f"{theirs}.ln_2", f"{ours}.norm2")
        table += layer(f"{theirs}.mlp.0", f"{ours}.mlp.fc1")
        table += layer(f"{theirs}.mlp.3", f"{ours}.mlp.fc2")
    return table + layer("encoder.ln", "norm") + layer("heads.head", "head")


def _resnet(blocks: Blocks, shortcuts: Blocks, bottleneck: bool, deep: bool, pooled: bool) -> list[Entry]:
    table: list[Entry] = []
    if deep:
        for index in (0, 1):
            theirs = 3 * index
            pair = f"stem.deep.{index}"
            table += conv_norm(f"conv1.{theirs}", f"conv1.{theirs + 1}", f"{pair}.conv", f"{pair}.norm")
    table += conv_norm("conv1.6" if deep else "conv1", "bn1", "stem.conv", "stem.norm")
    for stage, index in blocks:
        theirs_block, ours = f"layer{stage + 1}.{index}", f"stages.{stage}.{index}"
        for n in (1, 2, 3) if bottleneck else (1, 2):
            table += conv_norm(f"{theirs_block}.conv{n}", f"{theirs_block}.bn{n}", f"{ours}.conv{n}", f"{ours}.norm{n}")
        if (stage, index) in shortcuts:
            downsample, first = f"{theirs_block}.downsample", int(pooled)
            table += conv_norm(
                f"{downsample}.{first}", f"{downsample}.{first + 1}", f"{ours}.shortcut.conv", f"{ours}.shortcut.norm"
            )
    return table + layer("fc", "head")
