"""The attention kernels: pure functions of queries, keys and values, one per value of the `attention` switch.

Shape letters: B batch, H heads, N tokens, E width of one head. Each kernel computes
softmax(q k^T / sqrt(E)) v (Vaswani et al., Attention Is All You Need, 2017, equation 1); how the heads are
cut out of the token features, and in which memory layout, is the business of `layers.Attention`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

AttentionKernel = Callable[[Tensor, Tensor, Tensor], Tensor]
AttentionName = Literal["reference", "sdpa", "sdpa_math", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn"]


def reference_attention(queries_BHNE: Tensor, keys_BHNE: Tensor, values_BHNE: Tensor) -> Tensor:
    """The formula written out; keeps the (B, H, N, N) scores in memory. Returns (B, H, N, E)."""
    # The queries carry the scale: N x E numbers to scale instead of N x N, and float16 stays in range.
    scaled_BHNE = queries_BHNE / math.sqrt(queries_BHNE.shape[-1])
    scores_BHNN = scaled_BHNE @ keys_BHNE.transpose(-2, -1)
    return scores_BHNN.softmax(dim=-1) @ values_BHNE


def sdpa_attention(queries_BHNE: Tensor, keys_BHNE: Tensor, values_BHNE: Tensor) -> Tensor:
    """torch's fused attention, with whichever of its backends torch picks. Returns (B, H, N, E)."""
    return F.scaled_dot_product_attention(queries_BHNE, keys_BHNE, values_BHNE)


def chosen_sdpa(backend: SDPBackend, queries_BHNE: Tensor, keys_BHNE: Tensor, values_BHNE: Tensor) -> Tensor:
    """torch's fused attention with one backend and no other. Returns (B, H, N, E).

    Raises:
        RuntimeError: the backend cannot run these tensors; torch's warnings before it say why.
    """
    if queries_BHNE.is_meta:
        # Nothing is computed there, and whoever counts operations has chosen a backend that shows them.
        return sdpa_attention(queries_BHNE, keys_BHNE, values_BHNE)
    with sdpa_kernel(backend):
        return sdpa_attention(queries_BHNE, keys_BHNE, values_BHNE)


ATTENTION: dict[AttentionName, AttentionKernel] = {
    "reference": reference_attention,
    "sdpa": sdpa_attention,
    "sdpa_math": partial(chosen_sdpa, SDPBackend.MATH),
    "sdpa_flash": partial(chosen_sdpa, SDPBackend.FLASH_ATTENTION),
    "sdpa_efficient": partial(chosen_sdpa, SDPBackend.EFFICIENT_ATTENTION),
    "sdpa_cudnn": partial(chosen_sdpa, SDPBackend.CUDNN_ATTENTION),
}
assert set(ATTENTION) == set(get_args(AttentionName))
