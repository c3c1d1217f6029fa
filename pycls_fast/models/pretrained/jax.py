"""Google's vision transformers as NumPy `.npz` files: the original ones, AugReg's, and big_vision's.

Flax stores kernels of dense layers as (in, out), of attention as (in, heads, width of one head) and (heads, width,
out), of convolutions as (height, width, in, out). big_vision stacks the blocks if it scans over them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

Arrays = Mapping[str, Tensor]

NORM_EPS = 1e-6
"""Epsilon of LayerNorms: flax's default, which neither project changes."""
_PREFIXES = ("opt/target/", "params/img/", "params/", "")
_OUTSIDE = {
    "cls": "class_token.value",
    "pos_embedding": "positions.value",
    "Transformer/posembed_input/pos_embedding": "positions.value",
    "embedding/kernel": "stem.projection.weight",
    "embedding/bias": "stem.projection.bias",
    "Transformer/encoder_norm/scale": "norm.weight",
    "Transformer/encoder_norm/bias": "norm.bias",
    "pre_logits/kernel": "pre_logits.weight",
    "pre_logits/bias": "pre_logits.bias",
    "head/kernel": "head.weight",
    "head/bias": "head.bias",
}
_ATTENTION = {"query": "query", "key": "key", "value": "value", "out": "projection"}


def is_jax_vit(arrays: Arrays) -> bool:
    """Whether an archive holds one of Google's vision transformers."""
    return any(f"{prefix}embedding/kernel" in arrays for prefix in _PREFIXES)


def read_jax_vit(arrays: Arrays) -> tuple[dict[str, Tensor], list[str]]:
    """A vision transformer's tensors from an archive, in our names, and the rest's names (without optimizer state).

    Every token is normalised before pooling: classifier_norm="before_pool" for a model without a class token.
    """
    prefix = next(prefix for prefix in _PREFIXES if f"{prefix}embedding/kernel" in arrays)
    own = {name[len(prefix) :]: tensor for name, tensor in arrays.items() if name.startswith(prefix)}
    ours: dict[str, Tensor] = {}
    unknown = []
    for name, tensor in own.items():
        found = list(_ours(name, tensor))
        ours |= found
        if not found and not name.startswith(("opt/", "opt_state/")):
            unknown.append(name)
    return ours, unknown


def heads(arrays: Arrays) -> int | None:
    """The number of attention heads, from the shape (in, heads, width of one head) of the queries' kernels."""
    name = next((n for n in arrays if re.search(r"encoderblock.*Attention_\d/query/kernel$", n)), None)
    return None if name is None or arrays[name].ndim < 3 else arrays[name].shape[-2]


def _ours(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Our names and tensors of one array: several if blocks are stacked, none if it is not known."""
    if name in _OUTSIDE:
        squeezed = tensor.reshape(tensor.shape[-1:]) if name == "cls" else tensor
        if name.endswith("pos_embedding"):
            squeezed = tensor.reshape(-1, tensor.shape[-1])
        yield _OUTSIDE[name], _weight(squeezed) if name.endswith("kernel") else squeezed
        return
    if name == "MAPHead_0/probe":
        yield "pooling.probe", tensor.reshape(-1)
        return
    if match := re.fullmatch(r"MAPHead_0/(.+)", name):
        yield from ((f"pooling.{inner}", value) for inner, value in _part(match[1], tensor, norms={"0": "norm"}))
        return
    match = re.fullmatch(r"Transformer/encoderblock(_\d+)?/(.+)", name)
    if match is None:
        return
    number, inner = match[1], match[2]
    # The second norm has number 2 if attention and MLP are counted with the norms.
    norms = {"0": "norm1", "1": "norm2", "2": "norm2"}
    if number is not None:
        yield from ((f"blocks.{number[1:]}.{key}", value) for key, value in _part(inner, tensor, norms=norms))
        return
    for index, row in enumerate(tensor):
        yield from ((f"blocks.{index}.{key}", value) for key, value in _part(inner, row, norms=norms))


def _part(name: str, tensor: Tensor, *, norms: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of one array of a block or of the MAP head."""
    if match := re.fullmatch(r"LayerNorm_(\d)/(scale|bias)", name):
        if match[1] in norms:
            yield f"{norms[match[1]]}.{'weight' if match[2] == 'scale' else 'bias'}", tensor
    elif match := re.fullmatch(r"MultiHeadDotProductAttention_\d/(query|key|value|out)/(kernel|bias)", name):
        linear = f"attention.{_ATTENTION[match[1]]}"
        if match[2] == "bias":
            yield f"{linear}.bias", tensor.reshape(-1)
        else:
            # (D, H, E) -> (D, H * E), or (H, E, D) -> (H * E, D)
            matrix = tensor.flatten(0, 1) if match[1] == "out" else tensor.flatten(1)
            yield f"{linear}.weight", _weight(matrix)
    elif match := re.fullmatch(r"MlpBlock_\d/Dense_([01])/(kernel|bias)", name):
        linear = f"mlp.fc{int(match[1]) + 1}"
        yield (f"{linear}.weight", _weight(tensor)) if match[2] == "kernel" else (f"{linear}.bias", tensor)


def _weight(kernel: Tensor) -> Tensor:
    """Flax's kernel as torch's weight: (in, out) -> (out, in), or (height, width, in, out) -> (out, in, ...)."""
    order = (1, 0) if kernel.ndim == 2 else (3, 2, 0, 1)
    return torch.permute(kernel, order).contiguous()
