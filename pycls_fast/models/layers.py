"""The layers of vision transformers and the kernels of attention; layers that few of them have are in `vit_parts`.

Shape letters: B batch, C channels, N tokens, D width, H heads, E width of one head. Features are batch-first (B, N, D);
between the blocks they may be batch-second (N, B, D), but tensors have the names of the first order. Only `Attention`
(which splits heads) and `DropPath` (which drops samples) know the order: norms and MLPs act on the last dimension, and
parameters have no batch dimension, so checkpoints are the same.

Each layer with weights has `reset_parameters()`, which sets every parameter and buffer that it owns: a model built on
the meta device gets memory from `to_empty` and is initialised in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pycls_fast.models.cpu_kernels import GELU, LINEAR, linear_layer, products_attention

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


@dataclass(frozen=True)
class Compute:
    """How a transformer is computed: switches of `speed.Speed`, which describes them. Function, parameters and outer
    shapes are the same whatever their values."""

    attention: str = "reference"
    layout: str = "batch_first"
    qkv: str = "separate"
    """With "fused", one product reads the features once, and the backward pass need not add three gradients of the
    features. Joining the matrices reads and writes 3 D^2 numbers, 1 / (B N) of the product's operations."""
    sequence_padding: int = 1
    """The blocks see a multiple of this many tokens."""
    linear: str = "torch"
    gelu: str = "torch"
    patches: str = "convolution"
    drop_path_compute: str = "multiply"

    @property
    def batch_dim(self) -> int:
        """The dimension of the samples in the blocks' features."""
        return 1 if self.layout == "batch_second" else 0


PLAIN = Compute()

# Standard deviation of a unit normal truncated at +-2; dividing by it gives the variance that was asked for.
_CUT_NORMAL_STD = 0.87962566103423978


@torch.no_grad()
def lecun_normal_(weight: Tensor) -> Tensor:
    """Fill in place from a normal, truncated at two of its standard deviations, with variance 1 / fan_in.

    The default of Flax's Dense and Conv layers (`jax.nn.initializers.lecun_normal`). LeCun et al., Efficient BackProp,
    1998, section 4.6, gives the variance; the truncation is JAX's. The weight is (out, in, ...).
    """
    fan_in = weight[0].numel()
    # Inverse transform sampling, in place: torch.nn.init.trunc_normal_ uses rejection in newer versions, which makes
    # the values depend on the torch version and the host wait for the device.
    mass, std = math.erf(2.0 / math.sqrt(2.0)), _CUT_NORMAL_STD * math.sqrt(fan_in)
    weight.uniform_(-mass, mass).erfinv_()
    weight.mul_(math.sqrt(2.0) / std)
    bound = 2.0 / std
    return weight.clamp_(-bound, bound)


class PatchStem(nn.Module):
    """Cuts images into squares and projects each to a token (Dosovitskiy et al. 2021, equation 1).

    `patches`: by a "convolution" whose stride is its kernel size, or cut out and multiplied in one "product"; the
    weights are the convolution's either way.
    """

    def __init__(self, patch_size: int, width: int, *, patches: str = "convolution") -> None:
        super().__init__()
        self.patch_size = patch_size
        self.cut = patches == "product"
        self.projection = nn.Conv2d(3, width, kernel_size=patch_size, stride=patch_size)

    def reset_parameters(self) -> None:
        lecun_normal_(self.projection.weight)
        assert self.projection.bias is not None
        nn.init.zeros_(self.projection.bias)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Returns features_BND, tokens in row-major order of their squares; a view, contiguous or not."""
        # (B, D, rows, columns) -> (B, D, N) -> (B, N, D)
        return self._product(images_BCHW) if self.cut else self.projection(images_BCHW).flatten(2).transpose(1, 2)

    def _product(self, images_BCHW: Tensor) -> Tensor:
        size = self.patch_size
        # (B, H, W, C), a copy unless channels_last -> (B, rows, size, columns, size * C): runs stay contiguous
        images_BHWC = images_BCHW.permute(0, 2, 3, 1)
        runs = images_BHWC.flatten(2).unflatten(1, (-1, size)).unflatten(3, (-1, size * images_BHWC.shape[3]))
        # -> (B, rows, columns, size, size * C) -> (B, N, size * size * C)
        patches = runs.transpose(2, 3).flatten(3).flatten(1, 2)
        # (D, C, size, size) -> (D, size * size * C)
        weight = self.projection.weight.permute(0, 2, 3, 1).flatten(1)
        return F.linear(patches, weight, self.projection.bias)


class ClassToken(nn.Module):
    """Puts one learned token in front of the others (Dosovitskiy et al. 2021, section 3.1; from BERT)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.empty(width))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.value)

    def forward(self, features_BND: Tensor) -> Tensor:
        """(B, N, D) -> (B, 1 + N, D), contiguous."""
        return torch.cat([self.value.expand_as(features_BND[:, :1]), features_BND], dim=1)


class Attention(nn.Module):
    """Multi-head self-attention with biases (Vaswani et al. 2017, section 3.2.2).

    Queries, keys and values have their own matrices: the layout of checkpoints, and the one that suits initialisation,
    the optimizer and tensor parallelism.

    Args:
        width: D, a multiple of heads.
        keys: the number of tokens that are attended to; later tokens are padding. None for all.
        qk_norm: normalise the queries and the keys of each head before their product (Dehghani et al., Scaling Vision
            Transformers to 22 Billion Parameters, 2023, section 2.1; with scale and shift, as in timm).
        norm_eps: epsilon of these two norms.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        compute: Compute = PLAIN,
        *,
        keys: int | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.heads = heads
        # Heads are cut by their width: under tensor parallelism a rank has only some of them.
        self.head_width = width // heads
        self.fused = compute.qkv == "fused"
        self.batch_dim = compute.batch_dim
        self.kernel, self.keys = ATTENTION[compute.attention], keys
        self.linear = LINEAR[compute.linear]
        self.query, self.key, self.value = (linear_layer(width, width, compute.linear) for _ in range(3))
        self.query_norm = nn.LayerNorm(width // heads, eps=norm_eps) if qk_norm else None
        self.key_norm = nn.LayerNorm(width // heads, eps=norm_eps) if qk_norm else None
        self.projection = linear_layer(width, width, compute.linear)

    def reset_parameters(self) -> None:
        # Flax draws each of the four matrices with its own fans; one draw of a joined (3D, D) matrix, as in torch's
        # MultiheadAttention, would make queries, keys and values smaller by sqrt(2).
        for linear in (self.query, self.key, self.value, self.projection):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
        for norm in (self.query_norm, self.key_norm):
            if norm is not None:
                norm.reset_parameters()

    def forward(self, features_BND: Tensor) -> Tensor:
        """(B, N, D) -> (B, N, D), or (N, B, D) -> (N, B, D)."""
        if self.fused:
            queries_BHNE, keys_BHNE, values_BHNE = self._joined(features_BND)
        else:
            queries_BHNE = self._split(self.query(features_BND))
            keys_BHNE = self._split(self.key(features_BND))
            values_BHNE = self._split(self.value(features_BND))
        queries_BHNE, keys_BHNE = self._normed(queries_BHNE, keys_BHNE)
        return self.projection(self._merge(self.kernel(queries_BHNE, keys_BHNE, values_BHNE, keys=self.keys)))

    def attend(self, query_D: Tensor, features_BND: Tensor) -> Tensor:
        """One query, the same for all samples, attends to the features: (D,), (B, N, D) -> (B, D)."""
        keys_BHNE, values_BHNE = self._split(self.key(features_BND)), self._split(self.value(features_BND))
        # (D,) -> (H, 1, E) -> (B, H, 1, E)
        queries_BH1E = self.query(query_D).view(-1, 1, self.head_width).expand(keys_BHNE.shape[0], -1, -1, -1)
        queries_BH1E, keys_BHNE = self._normed(queries_BH1E, keys_BHNE)
        # (B, H, 1, E) -> (B, H * E)
        return self.projection(self.kernel(queries_BH1E, keys_BHNE, values_BHNE).flatten(1))

    def _normed(self, queries_BHNE: Tensor, keys_BHNE: Tensor) -> tuple[Tensor, Tensor]:
        if self.query_norm is None or self.key_norm is None:
            return queries_BHNE, keys_BHNE
        # Under autocast a norm returns float32; the kernels need one dtype for all three.
        queries, keys = self.query_norm(queries_BHNE), self.key_norm(keys_BHNE)
        return queries.to(queries_BHNE.dtype), keys.to(keys_BHNE.dtype)

    def _joined(self, features_BND: Tensor) -> list[Tensor]:
        """Queries, keys and values (B, H, N, E) from one product."""
        linears = (self.query, self.key, self.value)
        # Joined along the rows, so that each matrix's gradient is a contiguous part of the joined one's: no copies.
        weight = torch.cat([linear.weight for linear in linears])
        bias = torch.cat([linear.bias for linear in linears])
        # (B, N, 3 * H * E) -> (B, N, 3, H, E) -> three of (B, N, H, E) -> (B, H, N, E)
        joined = self.linear(features_BND, weight, bias).unflatten(-1, (3, -1, self.head_width))
        return [self._heads_second(part) for part in joined.unbind(-3)]

    def _split(self, features_BND: Tensor) -> Tensor:
        # (B, N, H * E) -> (B, N, H, E) -> (B, H, N, E)
        return self._heads_second(features_BND.unflatten(-1, (-1, self.head_width)))

    def _heads_second(self, features_BNHE: Tensor) -> Tensor:
        # (B, N, H, E) or (N, B, H, E) -> (B, H, N, E)
        return features_BNHE.permute(1, 2, 0, 3) if self.batch_dim == 1 else features_BNHE.transpose(1, 2)

    def _merge(self, features_BHNE: Tensor) -> Tensor:
        # (B, H, N, E) -> (B, N, H, E) or (N, B, H, E) -> (B, N, H * E) or (N, B, H * E)
        order = (2, 0, 1, 3) if self.batch_dim == 1 else (0, 2, 1, 3)
        return features_BHNE.permute(order).flatten(2)


class Mlp(nn.Module):
    """Linear layer, GELU with the exact error function (Hendrycks and Gimpel 2016), linear layer."""

    def __init__(self, width: int, hidden_width: int, compute: Compute = PLAIN) -> None:
        super().__init__()
        self.gelu = GELU[compute.gelu]
        self.fc1 = linear_layer(width, hidden_width, compute.linear)
        self.fc2 = linear_layer(hidden_width, width, compute.linear)

    def reset_parameters(self) -> None:
        for linear in (self.fc1, self.fc2):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.normal_(linear.bias, std=1e-6)

    def forward(self, features: Tensor) -> Tensor:
        return self.fc2(self.gelu(self.fc1(features)))


class LearnedPositions(nn.Module):
    """Adds a learned vector to each token, the class token included (Dosovitskiy et al. 2021, equation 1)."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.empty(count, width))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.value, std=0.02)

    def forward(self, features_BND: Tensor) -> Tensor:
        return features_BND + self.value


class SinCos2dPositions(nn.Module):
    """Adds fixed sines and cosines of each patch's column and row; other tokens get zeros.

    `value` is not saved in checkpoints: it follows from the arguments, and `reset_parameters` sets it. The width is a
    multiple of 4; `extra_tokens` (class token, registers) are in front of the patches.
    """

    value: Tensor

    def __init__(self, rows: int, columns: int, width: int, *, extra_tokens: int = 0) -> None:
        super().__init__()
        self.rows, self.columns = rows, columns
        self.extra_tokens = extra_tokens
        self.register_buffer("value", torch.empty(rows * columns + extra_tokens, width), persistent=False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.value.copy_(self.computed())

    def computed(self) -> Tensor:
        """What `value` is, float64 on the CPU."""
        grid = sincos2d(self.rows, self.columns, self.value.shape[1])
        return F.pad(grid, (0, 0, self.extra_tokens, 0))

    def forward(self, features_BND: Tensor) -> Tensor:
        # Not cast: under autocast the sum, and with it the residual stream, is float32, as with learned positions.
        return features_BND + self.value


def sincos2d(rows: int, columns: int, width: int) -> Tensor:
    """Positions (rows * columns, width), float64 on the CPU: [sin x, cos x, sin y, cos y], a quarter each.

    Frequencies fall geometrically from 1 to 1/10000 inclusive. Same as `posemb_sincos_2d` of big_vision (Beyer et al.,
    Better plain ViT baselines for ImageNet-1k, 2022), which is MoCo v3's (Chen et al. 2021) except for the inclusive
    end.
    """

    def count(n: int) -> Tensor:
        return torch.arange(n, device="cpu", dtype=torch.float64)

    frequencies = 10_000.0 ** (-count(width // 4) / max(width // 4 - 1, 1))
    x_angles = count(columns).repeat(rows)[:, None] * frequencies
    y_angles = count(rows).repeat_interleave(columns)[:, None] * frequencies
    return torch.cat([x_angles.sin(), x_angles.cos(), y_angles.sin(), y_angles.cos()], dim=1)
