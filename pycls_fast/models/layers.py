"""The parts that vision transformers are made of, and drop-path, which residual networks use too.

Shape letters: B batch, C channels, N tokens, D width, H heads, E width of one head. Tokens are batch-first
(B, N, D). Only `Attention` (cutting heads), `DropPath` (which dimension holds the samples), `PatchStem` and
the model's pooling know that order: norms and MLPs act on the last dimension alone, and tokens and positions
are stored without a batch dimension.

Each layer with weights has `reset_parameters()`, which sets every parameter and buffer it owns, so that a
model built on the meta device can be made real with `to_empty` and initialised in place.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pycls_fast.errors import UserError
from pycls_fast.models.attention import ATTENTION, AttentionName
from pycls_fast.models.init import lecun_normal_


class DropPath(nn.Module):
    """Stochastic depth: in training, zeroes a residual branch for a random part of the samples.

    Kept samples are divided by the keep probability, so the expectation is the input (Huang et al., Deep
    Networks with Stochastic Depth, 2016; rescaled in training as in Larsson et al., FractalNet, 2017, instead
    of at test time). Draws from the default generator of the input's device. Identity in evaluation and at
    rate 0.

    Args:
        rate: probability that a sample's branch is dropped, in [0, 1).

    Raises:
        UserError: rate outside [0, 1).
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        if not 0.0 <= rate < 1.0:
            raise UserError(f"drop_path: must be at least 0 and below 1; got {rate}")
        self.rate = rate

    def forward(self, branch: Tensor) -> Tensor:
        """Any shape with the samples in dimension 0; the same shape and dtype come back."""
        if self.rate == 0.0 or not self.training:
            return branch
        keep = 1.0 - self.rate
        shape = (branch.shape[0],) + (1,) * (branch.ndim - 1)
        # Drawn in float32 whatever the branch's dtype, so that runs in two precisions drop the same samples.
        kept = torch.rand(shape, device=branch.device, dtype=torch.float32) < keep
        # Not branch * (kept / keep): 1 / keep rounded to bfloat16 would scale every kept sample wrongly.
        return branch * kept / keep

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}"


def drop_path_rates(rate: float, depth: int) -> list[float]:
    """One rate per block, rising linearly from 0 in the first to `rate` in the last.

    The linear decay rule of Huang et al. 2016 (section 3), started at 0 as in timm's models. A single block
    gets 0.
    """
    return [rate * index / max(depth - 1, 1) for index in range(depth)]


class PatchStem(nn.Module):
    """Cuts images into squares and projects each to a token (Dosovitskiy et al. 2021, equation 1).

    Args:
        in_channels: channels of the images.
        patch_size: side of a square in pixels.
        width: D.
    """

    def __init__(self, in_channels: int, patch_size: int, width: int) -> None:
        super().__init__()
        self.projection = nn.Conv2d(in_channels, width, kernel_size=patch_size, stride=patch_size)

    def reset_parameters(self) -> None:
        lecun_normal_(self.projection.weight)
        assert self.projection.bias is not None
        nn.init.zeros_(self.projection.bias)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Returns features_BND, tokens in row-major order of their squares."""
        # (B, D, rows, columns) -> (B, D, N) -> (B, N, D)
        return self.projection(images_BCHW).flatten(2).transpose(1, 2)


class ClassToken(nn.Module):
    """Puts one learned token in front of the others (Dosovitskiy et al. 2021, section 3.1; from BERT)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.empty(width))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.value)

    def forward(self, features_BND: Tensor) -> Tensor:
        """(B, N, D) -> (B, 1 + N, D)."""
        token_B1D = self.value.expand(features_BND.shape[0], 1, -1)
        return torch.cat([token_B1D, features_BND], dim=1)


class LearnedPositions(nn.Module):
    """Adds a learned vector to each token, the class token included (Dosovitskiy et al. 2021, equation 1).

    Args:
        count: tokens, the class token included.
        width: D.
    """

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.empty(count, width))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.value, std=0.02)

    def forward(self, features_BND: Tensor) -> Tensor:
        return features_BND + self.value


class SinCos2dPositions(nn.Module):
    """Adds fixed sines and cosines of each token's column and row; a class token gets zeros.

    `value` is not saved in checkpoints: it follows from the arguments, and `reset_parameters` sets it.

    Args:
        rows, columns: the grid of patches.
        width: D, a multiple of 4 and at least 8.
        class_token: whether token 0 is a class token.

    Raises:
        UserError: a width that does not fit.
    """

    value: Tensor

    def __init__(self, rows: int, columns: int, width: int, *, class_token: bool) -> None:
        super().__init__()
        if width % 4 or width < 8:
            raise UserError(f"positions=sincos2d: needs a width that is a multiple of 4 from 8 up; got {width}")
        self.rows, self.columns, self.class_token = rows, columns, class_token
        self.register_buffer("value", torch.empty(rows * columns + class_token, width), persistent=False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        grid = sincos2d(self.rows, self.columns, self.value.shape[1])
        if self.class_token:
            grid = F.pad(grid, (0, 0, 1, 0))
        self.value.copy_(grid)

    def forward(self, features_BND: Tensor) -> Tensor:
        # Not cast: under autocast the sum is float32, as with learned positions, and the residual stream
        # stays so.
        return features_BND + self.value


def sincos2d(rows: int, columns: int, width: int) -> Tensor:
    """Positions (rows * columns, width), float64 on the CPU: [sin x, cos x, sin y, cos y], a quarter each.

    Frequencies fall geometrically from 1 to 1/10000 inclusive. `posemb_sincos_2d` of big_vision (Beyer et
    al., Better plain ViT baselines for ImageNet-1k, 2022), which is MoCo v3's (Chen et al. 2021) but for that
    inclusive end.
    """

    def count(n: int) -> Tensor:
        return torch.arange(n, device="cpu", dtype=torch.float64)

    frequencies = 10_000.0 ** (-count(width // 4) / (width // 4 - 1))
    x_angles = count(columns).repeat(rows)[:, None] * frequencies
    y_angles = count(rows).repeat_interleave(columns)[:, None] * frequencies
    return torch.cat([x_angles.sin(), x_angles.cos(), y_angles.sin(), y_angles.cos()], dim=1)


class Attention(nn.Module):
    """Multi-head self-attention with biases (Vaswani et al. 2017, section 3.2.2).

    Queries, keys and values have their own matrices: this is the layout of checkpoints, and what
    initialisation and tensor parallelism want. A module that multiplies them in one go can keep that layout.

    Args:
        width: D, a multiple of heads.
        heads: H.
        attention: name of the kernel, a key of `attention.ATTENTION`.

    Raises:
        UserError: width is not a multiple of heads, or an unknown kernel.
    """

    def __init__(self, width: int, heads: int, *, attention: AttentionName = "reference") -> None:
        super().__init__()
        if width % heads:
            raise UserError(f"heads: the width {width} must be a multiple of it; got {heads}")
        if attention not in ATTENTION:
            raise UserError(f"attention: must be one of {', '.join(ATTENTION)}; got {attention}")
        self.heads = heads
        self.kernel = ATTENTION[attention]
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.projection = nn.Linear(width, width)

    def reset_parameters(self) -> None:
        # Flax's attention draws each of the four with its own fans; one draw for a joined (3D, D) matrix, as
        # torch's MultiheadAttention does it, would make queries, keys and values smaller by sqrt(2).
        for linear in (self.query, self.key, self.value, self.projection):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, features_BND: Tensor) -> Tensor:
        """(B, N, D) -> (B, N, D)."""
        queries_BHNE = self._split(self.query(features_BND))
        keys_BHNE = self._split(self.key(features_BND))
        values_BHNE = self._split(self.value(features_BND))
        return self.projection(self._merge(self.kernel(queries_BHNE, keys_BHNE, values_BHNE)))

    def _split(self, features_BND: Tensor) -> Tensor:
        # (B, N, H * E) -> (B, N, H, E) -> (B, H, N, E)
        return features_BND.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _merge(self, features_BHNE: Tensor) -> Tensor:
        # (B, H, N, E) -> (B, N, H, E) -> (B, N, H * E)
        return features_BHNE.transpose(1, 2).flatten(2)


class Mlp(nn.Module):
    """Linear, GELU by the exact error function (Hendrycks and Gimpel 2016), linear.

    Args:
        width: D.
        hidden_width: width between the two.
    """

    def __init__(self, width: int, hidden_width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden_width)
        self.fc2 = nn.Linear(hidden_width, width)

    def reset_parameters(self) -> None:
        for linear in (self.fc1, self.fc2):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.normal_(linear.bias, std=1e-6)

    def forward(self, features: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(features)))
