"""Checkpoints of pycls (`.pyth`): its ViT with either stem, its ResNet and ResNeXt, and its RegNets in timm's names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pycls_fast.models.pretrained.tables import Entry, State, conv_norm, depth, joined, layer, translate
from pycls_fast.models.pretrained.traits import Traits

VIT = "pycls vision transformer"
RESNET = "pycls resnet"


def is_pycls(state: State) -> bool:
    """Whether these tensors are from a ViT, ResNet or RegNet of pycls."""
    return "encoder.block_0.ln_1.weight" in state or "s1.b1.f.a.weight" in state


def parsed(settings: str) -> dict[str, Mapping[str, Any]]:
    """The sections of a run's configuration, which a checkpoint holds as YAML; empty if it is something else."""
    import yaml

    try:
        found = yaml.safe_load(settings)
    except yaml.YAMLError:
        return {}
    return {name: part for name, part in found.items() if isinstance(part, dict)} if isinstance(found, dict) else {}


def takes_bgr(settings: str) -> bool:
    """Whether a run's first layer takes channels in the order blue, green, red.

    pycls reads ImageNet's images with OpenCV and keeps its channel order (`datasets/imagenet.py`, all versions), also
    for the published weights; FFCV's images and CIFAR-10's are red, green, blue.
    """
    found = parsed(settings)
    by_ffcv = found.get("DATA_LOADER", {}).get("MODE") == "ffcv"
    return not by_ffcv and found.get("TRAIN", {}).get("DATASET") != "cifar10"


def traits(settings: str) -> Traits:
    """Traits of the model in a run's configuration, which the tensors do not show."""
    found = parsed(settings)
    kind = found.get("MODEL", {}).get("TYPE")
    if kind == "vit":
        heads, eps = found.get("VIT", {}).get("NUM_HEADS"), found.get("LN", {}).get("EPS")
        return Traits(heads=heads if isinstance(heads, int) else None, norm_eps=eps if isinstance(eps, float) else None)
    resnet = found.get("RESNET", {})
    if kind == "resnet" and resnet.get("STRIDE_1X1") and resnet.get("TRANS_FUN") == "bottleneck_transform":
        return Traits(unlike="makes maps smaller in its 1x1 convolutions (RESNET.STRIDE_1X1)")
    return Traits()


def read_pycls_vit(state: State) -> tuple[dict[str, Tensor], list[str]]:
    """`ViT` of pycls' branches main and vitconfigs: the known tensors, in our names, and the names of the rest.

    It normalises every token before the mean: classifier_norm="before_pool" for CLASSIFIER_TYPE pooled.
    """
    # main has tokens before samples, (N, 1, D), vitconfigs samples first.
    samples_first = "pos_embedding" in state and state["pos_embedding"].shape[:1] == (1,)
    table = [Entry("pos_embedding", ("positions.value",), ones=(0,) if samples_first else (1,))]
    if "class_token" in state:
        table.append(Entry("class_token", ("class_token.value",), ones=(0, 1)))
    table += layer("stem.patchify", "stem.projection") if "stem.patchify.weight" in state else _conv_stem(state)
    for index in range(depth(state, "encoder.block_")):
        theirs, ours = f"encoder.block_{index}", f"blocks.{index}"
        table += layer(f"{theirs}.ln_1", f"{ours}.norm1")
        # main has torch's attention in a `block`, vitconfigs its own; earlier versions used torch's directly.
        inner = f"{theirs}.self_attention"
        if f"{inner}.block.in_proj_weight" in state:
            inner += ".block"
        joint = "attn_proj." if f"{inner}.attn_proj.weight" in state else "in_proj_"
        table += joined(f"{inner}.{joint}", f"{ours}.attention")
        table += layer(f"{inner}.out_proj", f"{ours}.attention.projection")
        table += layer(f"{theirs}.ln_2", f"{ours}.norm2")
        table += layer(f"{theirs}.mlp_block.linear_1", f"{ours}.mlp.fc1")
        table += layer(f"{theirs}.mlp_block.linear_2", f"{ours}.mlp.fc2")
    return translate(state, [*table, *layer("encoder.ln", "norm"), *layer("head.head_fc", "head")], VIT)


def _conv_stem(state: State) -> list[Entry]:
    count = sum(bool(re.fullmatch(r"stem\.cstem\d+_conv\.weight", name)) for name in state)
    table: list[Entry] = []
    for index in range(count):
        theirs = f"stem.cstem{index}"
        table += conv_norm(f"{theirs}_conv", f"{theirs}_bn", f"stem.convs.{index}", f"stem.norms.{index}")
    return table + layer("stem.cstem_last_conv", "stem.projection")


def read_pycls_resnet(state: State) -> tuple[dict[str, Tensor], list[str]]:
    """pycls' `ResNet` for ImageNet (and `anynet` with the same blocks), in our names, and the names of the rest."""
    table = conv_norm("stem.conv", "stem.bn", "stem.conv", "stem.norm")
    names = ((f"s{stage + 1}.b", stage) for stage in range(4))
    for prefix, stage in names:
        for number in range(1, depth(state, prefix)):
            theirs, ours = f"{prefix}{number}", f"stages.{stage}.{number - 1}"
            for n, letter in enumerate("abc", start=1):
                if f"{theirs}.f.{letter}.weight" in state:
                    table += conv_norm(
                        f"{theirs}.f.{letter}", f"{theirs}.f.{letter}_bn", f"{ours}.conv{n}", f"{ours}.norm{n}"
                    )
            if f"{theirs}.proj.weight" in state:
                table += conv_norm(f"{theirs}.proj", f"{theirs}.bn", f"{ours}.shortcut.conv", f"{ours}.shortcut.norm")
    return translate(state, [*table, *layer("head.fc", "head")], RESNET)


# pycls' names of a RegNet and timm's, in the order in which they are tried.
_REGNET = (
    (r"\.f\.se\.f_ex\.0\.", ".se.fc1."),
    (r"\.f\.se\.f_ex\.2\.", ".se.fc2."),
    (r"\.f\.a\.", ".conv1.conv."),
    (r"\.f\.a_bn\.", ".conv1.bn."),
    (r"\.f\.b\.", ".conv2.conv."),
    (r"\.f\.b_bn\.", ".conv2.bn."),
    (r"\.f\.c\.", ".conv3.conv."),
    (r"\.f\.c_bn\.", ".conv3.bn."),
    (r"\.proj\.", ".downsample.conv."),
    (r"(\.b\d+)\.bn\.", r"\1.downsample.bn."),
)


def regnet_in_timm_names(state: State) -> dict[str, Tensor]:
    """A RegNet of pycls under timm's names; stages, blocks, stem and head have the same names in both."""
    renamed = {}
    for name, tensor in state.items():
        new = name
        for pattern, replacement in _REGNET:
            new = re.sub(pattern, replacement, new)
        renamed[new] = tensor
    return renamed
