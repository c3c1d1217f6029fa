"""The attention kernels: pure functions of queries, keys and values, one per value of the `attention` switch.

Shape letters: B batch, H heads, N tokens, E width of one head. Each kernel computes
softmax(q k^T / sqrt(E)) v (Vaswani et al., Attention Is All You Need, 2017, equation 1), over the first `keys` tokens
if the others are padding. Splitting the token features into heads, and their memory layout, is up to
`layers.Attention`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pycls_fast.models.cpu_kernels import products_attention

AttentionKernel = Callable[..., Tensor]
"""`(queries_BHNE, keys_BHNE, values_BHNE, *, keys=None) -> features_BHNE`."""


def reference_attention(
    queries_BHNE: Tensor, keys_BHNE: Tensor, values_BHNE: Tensor, *, keys: int | None = None
) -> Tensor:
    """The formula written out; keeps the (B, H, N, N) scores in memory. Returns (B, H, N, E)."""
    return attention_probabilities(queries_BHNE, keys_BHNE, keys=keys) @ values_BHNE


def attention_probabilities(queries_BHNE: Tensor, keys_BHNE: Tensor, *, keys: int | None = None) -> Tensor:
    """How much each query attends to each key, (B, H, N, N); rows sum to 1."""
    # The queries are scaled: N x E numbers instead of N x N, and float16 stays in range.
    scaled_BHNE = queries_BHNE / math.sqrt(queries_BHNE.shape[-1])
    scores_BHNN = scaled_BHNE @ keys_BHNE.transpose(-2, -1)
    if keys is not None:
        # Masked, not cut off: products keep the padded sizes, which is the purpose of padding.
        padding_N = torch.arange(scores_BHNN.shape[-1], device=scores_BHNN.device) >= keys
        scores_BHNN = scores_BHNN.masked_fill(padding_N, -math.inf)
    return scores_BHNN.softmax(dim=-1)


def sdpa_attention(queries_BHNE: Tensor, keys_BHNE: Tensor, values_BHNE: Tensor, *, keys: int | None = None) -> Tensor:
    """torch's fused attention, with whichever of its backends torch picks. Returns (B, H, N, E)."""
    if keys is not None:
        # Views: a mask would rule out FlashAttention, which does its own tiling.
        keys_BHNE, values_BHNE = keys_BHNE[:, :, :keys], values_BHNE[:, :, :keys]
    return F.scaled_dot_product_attention(queries_BHNE, keys_BHNE, values_BHNE)


def chosen_sdpa(
    backend: SDPBackend, queries_BHNE: Tensor, keys_BHNE: Tensor, values_BHNE: Tensor, *, keys: int | None = None
) -> Tensor:
    """torch's fused attention with one backend and no other. Returns (B, H, N, E).

    Raises:
        RuntimeError: the backend cannot run these tensors; torch's warnings before it say why.
    """
    if queries_BHNE.is_meta:
        # Nothing is computed there, and `complexity` has chosen a backend that shows all operations.
        return sdpa_attention(queries_BHNE, keys_BHNE, values_BHNE, keys=keys)
    with sdpa_kernel(backend):
        return sdpa_attention(queries_BHNE, keys_BHNE, values_BHNE, keys=keys)


ATTENTION: dict[str, AttentionKernel] = {
    "reference": reference_attention,
    "sdpa": sdpa_attention,
    "sdpa_math": partial(chosen_sdpa, SDPBackend.MATH),
    "sdpa_flash": partial(chosen_sdpa, SDPBackend.FLASH_ATTENTION),
    "sdpa_efficient": partial(chosen_sdpa, SDPBackend.EFFICIENT_ATTENTION),
    "sdpa_cudnn": partial(chosen_sdpa, SDPBackend.CUDNN_ATTENTION),
    "products": products_attention,
}
