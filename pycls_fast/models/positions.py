"""Positions added to a vision transformer's tokens: learned, or fixed sines and cosines.

Shape letters and layouts as in `layers`; `reset_parameters` sets what a module owns.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pycls_fast.errors import UserError
from pycls_fast.models.layers import Layout, batch_dimension


class LearnedPositions(nn.Module):
    """Adds a learned vector to each token, the class token included (Dosovitskiy et al. 2021, equation 1).

    Args:
        count: tokens, the class token included.
        width: D.
        layout: layout of the features.
    """

    def __init__(self, count: int, width: int, *, layout: Layout = "batch_first") -> None:
        super().__init__()
        self.batch_dim = batch_dimension(layout)
        self.value = nn.Parameter(torch.empty(count, width))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.value, std=0.02)

    def forward(self, features_BND: Tensor) -> Tensor:
        return features_BND + self.value.unsqueeze(self.batch_dim)


class SinCos2dPositions(nn.Module):
    """Adds fixed sines and cosines of each patch's column and row; other tokens get zeros.

    `value` is not saved in checkpoints: it follows from the arguments, and `reset_parameters` sets it.

    Args:
        rows, columns: the grid of patches.
        width: D, a multiple of 4 and at least 8.
        extra_tokens: tokens in front of the patches (class token, registers), which get zeros.
        layout: layout of the features.

    Raises:
        UserError: a width that does not fit.
    """

    value: Tensor

    def __init__(
        self,
        rows: int,
        columns: int,
        width: int,
        *,
        extra_tokens: int = 0,
        layout: Layout = "batch_first",
    ) -> None:
        super().__init__()
        self.batch_dim = batch_dimension(layout)
        if width % 4 or width < 8:
            raise UserError(f"positions=sincos2d: needs a width that is a multiple of 4 from 8 up; got {width}")
        self.rows, self.columns = rows, columns
        self.extra_tokens = extra_tokens
        self.register_buffer("value", torch.empty(rows * columns + extra_tokens, width), persistent=False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        grid = sincos2d(self.rows, self.columns, self.value.shape[1])
        self.value.copy_(F.pad(grid, (0, 0, self.extra_tokens, 0)))

    def forward(self, features_BND: Tensor) -> Tensor:
        # Not cast: under autocast the sum, and with it the residual stream, is float32, as with learned positions.
        return features_BND + self.value.unsqueeze(self.batch_dim)


def sincos2d(rows: int, columns: int, width: int) -> Tensor:
    """Positions (rows * columns, width), float64 on the CPU: [sin x, cos x, sin y, cos y], a quarter each.

    Frequencies fall geometrically from 1 to 1/10000 inclusive. Same as `posemb_sincos_2d` of big_vision (Beyer et al.,
    Better plain ViT baselines for ImageNet-1k, 2022), which is MoCo v3's (Chen et al. 2021) except for the inclusive
    end.
    """

    def count(n: int) -> Tensor:
        return torch.arange(n, device="cpu", dtype=torch.float64)

    frequencies = 10_000.0 ** (-count(width // 4) / (width // 4 - 1))
    x_angles = count(columns).repeat(rows)[:, None] * frequencies
    y_angles = count(rows).repeat_interleave(columns)[:, None] * frequencies
    return torch.cat([x_angles.sin(), x_angles.cos(), y_angles.sin(), y_angles.cos()], dim=1)
