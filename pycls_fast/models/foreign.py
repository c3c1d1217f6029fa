"""Checkpoints of timm and torchvision in our names, and ours in theirs.

A conversion is a table of entries (their name, our names, how the tensor differs), made for the depth found
in the state and read from left to right or back, so that each pair of functions are inverses by construction.
Tensors are renamed, reshaped, cut or joined, never computed with; they may share memory with the input.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pycls_fast.errors import UserError

State = Mapping[str, Tensor]


@dataclass(frozen=True)
class _Entry:
    """One tensor of theirs and what it is in ours."""

    theirs: str
    ours: tuple[str, ...]
    """One name, or several whose tensors, joined in dimension 0, are theirs."""
    leading: int = 0
    """Dimensions of size 1 that theirs has in front of ours."""
    counter: bool = False
    """A batch norm's step counter, which old files lack; then it is 0."""


def from_timm_vit(state: State) -> dict[str, Tensor]:
    """timm's `VisionTransformer` (1.0) with a class token and `global_pool="token"`, or without and `"avg"`.

    Raises:
        UserError: missing or unexpected keys, each named: no head, layer scale, registers, or a pooled model
            that norms before the mean (`fc_norm=False`).
    """
    table = _timm_vit(_depth(state, "blocks."), class_token="fc_norm.weight" not in state)
    return _to_ours(state, table, "timm vision transformer")


def to_timm_vit(state: State) -> dict[str, Tensor]:
    """The inverse of `from_timm_vit`; a model with fixed positions has none to give, which is an error."""
    table = _timm_vit(_depth(state, "blocks."), class_token="class_token.value" in state)
    return _to_theirs(state, table, "vision transformer with learned positions")


def from_torchvision_vit(state: State) -> dict[str, Tensor]:
    """torchvision's `VisionTransformer` (vit_b_16 and its sisters), as a model has it from 0.13 on.

    Raises:
        UserError: missing or unexpected keys, each named.
    """
    table = _torchvision_vit(_depth(state, "encoder.layers.encoder_layer_"))
    return _to_ours(state, table, "torchvision vision transformer")


def to_torchvision_vit(state: State) -> dict[str, Tensor]:
    """The inverse of `from_torchvision_vit`; torchvision has class-token models only."""
    table = _torchvision_vit(_depth(state, "blocks."))
    return _to_theirs(state, table, "vision transformer with a class token and learned positions")


def from_torchvision_resnet(state: State) -> dict[str, Tensor]:
    """torchvision's resnet18 to resnet152; timm's models of these names have the same keys.

    Files older than the batch norm's step counter are read too: the counter is then 0.

    Raises:
        UserError: missing or unexpected keys, each named.
    """
    blocks = [(stage, index) for stage in range(4) for index in range(_depth(state, f"layer{stage + 1}."))]
    downsampled = [(s, i) for s, i in blocks if f"layer{s + 1}.{i}.downsample.0.weight" in state]
    bottleneck = "layer1.0.conv3.weight" in state
    return _to_ours(state, _torchvision_resnet(blocks, downsampled, bottleneck), "torchvision resnet")


def to_torchvision_resnet(state: State) -> dict[str, Tensor]:
    """The inverse of `from_torchvision_resnet`."""
    blocks = [(stage, index) for stage in range(4) for index in range(_depth(state, f"stages.{stage}."))]
    downsampled = [(s, i) for s, i in blocks if f"stages.{s}.{i}.shortcut.conv.weight" in state]
    bottleneck = "stages.0.0.conv3.weight" in state
    return _to_theirs(state, _torchvision_resnet(blocks, downsampled, bottleneck), "resnet")


def _depth(state: State, prefix: str) -> int:
    """One more than the highest number that follows the prefix; 0 when no key has it."""
    tails = (name[len(prefix) :].split(".")[0] for name in state if name.startswith(prefix))
    return max((int(tail) + 1 for tail in tails if tail.isdigit()), default=0)


def _layer(theirs: str, ours: str) -> list[_Entry]:
    """A layer with a weight and a bias."""
    return [_Entry(f"{theirs}.{kind}", (f"{ours}.{kind}",)) for kind in ("weight", "bias")]


def _joined_qkv(theirs_prefix: str, attention: str) -> list[_Entry]:
    parts = ("query", "key", "value")
    return [
        _Entry(f"{theirs_prefix}{kind}", tuple(f"{attention}.{part}.{kind}" for part in parts))
        for kind in ("weight", "bias")
    ]


def _timm_vit(depth: int, *, class_token: bool) -> list[_Entry]:
    table = [_Entry("cls_token", ("class_token.value",), leading=2)] if class_token else []
    table += [_Entry("pos_embed", ("positions.value",), leading=1)]
    table += _layer("patch_embed.proj", "stem.projection")
    for block in (f"blocks.{index}" for index in range(depth)):
        table += _layer(f"{block}.norm1", f"{block}.norm1")
        table += _joined_qkv(f"{block}.attn.qkv.", f"{block}.attention")
        table += _layer(f"{block}.attn.proj", f"{block}.attention.projection")
        table += _layer(f"{block}.norm2", f"{block}.norm2")
        table += _layer(f"{block}.mlp.fc1", f"{block}.mlp.fc1")
        table += _layer(f"{block}.mlp.fc2", f"{block}.mlp.fc2")
    return table + _layer("norm" if class_token else "fc_norm", "norm") + _layer("head", "head")


def _torchvision_vit(depth: int) -> list[_Entry]:
    table = [_Entry("class_token", ("class_token.value",), leading=2)]
    table += [_Entry("encoder.pos_embedding", ("positions.value",), leading=1)]
    table += _layer("conv_proj", "stem.projection")
    for index in range(depth):
        theirs, ours = f"encoder.layers.encoder_layer_{index}", f"blocks.{index}"
        table += _layer(f"{theirs}.ln_1", f"{ours}.norm1")
        table += _joined_qkv(f"{theirs}.self_attention.in_proj_", f"{ours}.attention")
        table += _layer(f"{theirs}.self_attention.out_proj", f"{ours}.attention.projection")
        table += _layer(f"{theirs}.ln_2", f"{ours}.norm2")
        table += _layer(f"{theirs}.mlp.0", f"{ours}.mlp.fc1")
        table += _layer(f"{theirs}.mlp.3", f"{ours}.mlp.fc2")
    return table + _layer("encoder.ln", "norm") + _layer("heads.head", "head")


def _conv_norm(theirs_conv: str, theirs_norm: str, ours_conv: str, ours_norm: str) -> list[_Entry]:
    kinds = ("weight", "bias", "running_mean", "running_var")
    return [
        _Entry(f"{theirs_conv}.weight", (f"{ours_conv}.weight",)),
        *(_Entry(f"{theirs_norm}.{kind}", (f"{ours_norm}.{kind}",)) for kind in kinds),
        _Entry(f"{theirs_norm}.num_batches_tracked", (f"{ours_norm}.num_batches_tracked",), counter=True),
    ]


def _torchvision_resnet(
    blocks: list[tuple[int, int]], downsampled: list[tuple[int, int]], bottleneck: bool
) -> list[_Entry]:
    table = _conv_norm("conv1", "bn1", "stem.conv", "stem.norm")
    for stage, index in blocks:
        theirs, ours = f"layer{stage + 1}.{index}", f"stages.{stage}.{index}"
        for n in (1, 2, 3) if bottleneck else (1, 2):
            table += _conv_norm(f"{theirs}.conv{n}", f"{theirs}.bn{n}", f"{ours}.conv{n}", f"{ours}.norm{n}")
        if (stage, index) in downsampled:
            downsample, shortcut = f"{theirs}.downsample", f"{ours}.shortcut"
            table += _conv_norm(f"{downsample}.0", f"{downsample}.1", f"{shortcut}.conv", f"{shortcut}.norm")
    return table + _layer("fc", "head")


def _to_ours(state: State, table: list[_Entry], what: str) -> dict[str, Tensor]:
    counters = {entry.theirs for entry in table if entry.counter}
    _check(state, (entry.theirs for entry in table), what, optional=counters)
    ours: dict[str, Tensor] = {}
    for entry in table:
        if entry.theirs not in state:
            ours[entry.ours[0]] = torch.tensor(0)
            continue
        tensor = state[entry.theirs]
        wrong_front = any(size != 1 for size in tensor.shape[: entry.leading])
        if wrong_front or tensor.shape[:1].numel() % len(entry.ours):
            raise UserError(f"weights: {entry.theirs} of shape {tuple(tensor.shape)} is not from a {what}")
        parts = tensor.chunk(len(entry.ours)) if len(entry.ours) > 1 else (tensor,)
        for name, part in zip(entry.ours, parts, strict=True):
            ours[name] = part.reshape(part.shape[entry.leading :])
    return ours


def _to_theirs(state: State, table: list[_Entry], what: str) -> dict[str, Tensor]:
    _check(state, (name for entry in table for name in entry.ours), what)
    theirs: dict[str, Tensor] = {}
    for entry in table:
        parts = [state[name] for name in entry.ours]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        theirs[entry.theirs] = tensor.reshape((1,) * entry.leading + tuple(tensor.shape))
    return theirs


def _check(state: State, expected: Iterable[str], what: str, optional: Iterable[str] = ()) -> None:
    names = set(expected)
    lines = []
    if missing := sorted(names - set(state) - set(optional)):
        lines.append(f"weights: missing for a {what}: {', '.join(missing)}")
    if unexpected := sorted(set(state) - names):
        lines.append(f"weights: unexpected in a {what}: {', '.join(unexpected)}")
    if lines:
        raise UserError(*lines)
