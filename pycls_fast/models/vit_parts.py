"""Parts of vision transformers beyond the plain one: convolutional stem, register tokens, layer scale, MAP pooling;
and the schemes of initial values.

Shape letters as in `layers`; every module sets its own parameters in `reset_parameters`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pycls_fast.models.layers import (
    Attention,
    ClassToken,
    LearnedPositions,
    Mlp,
    lecun_normal_,
)
from pycls_fast.models.moe import ExpertLinear


class TokenConvStem(nn.Module):
    """3x3 convolutions, each with BatchNorm and ReLU, then a 1x1 convolution to the tokens' width.

    Xiao et al., Early Convolutions Help Transformers See Better, 2021, arXiv 2106.14881, section 4 (ViT_C). The product
    of the strides is the side of the square that a token stands for.
    """

    def __init__(self, widths: Sequence[int], strides: Sequence[int], width: int) -> None:
        super().__init__()
        inputs = (3, *widths[:-1])
        self.convs = nn.ModuleList(
            nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
            for before, after, stride in zip(inputs, widths, strides, strict=True)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(after) for after in widths)
        self.projection = nn.Conv2d(widths[-1], width, 1)

    def reset_parameters(self) -> None:
        """Normal with variance 2 / output channels, the last 1 / output channels: pycls' `init_weights_vit`, main."""
        conv: Any
        norm: Any
        for conv, norm in zip(self.convs, self.norms, strict=True):
            nn.init.normal_(conv.weight, std=math.sqrt(2.0 / conv.out_channels))
            norm.reset_parameters()
        nn.init.normal_(self.projection.weight, std=math.sqrt(1.0 / self.projection.out_channels))
        assert self.projection.bias is not None
        nn.init.zeros_(self.projection.bias)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Returns features_BND, tokens in row-major order; a view, contiguous or not."""
        maps_BCHW = images_BCHW
        for conv, norm in zip(self.convs, self.norms, strict=True):
            maps_BCHW = F.relu(norm(conv(maps_BCHW)), inplace=True)
        # (B, D, rows, columns) -> (B, D, N) -> (B, N, D)
        return self.projection(maps_BCHW).flatten(2).transpose(1, 2)


class RegisterTokens(nn.Module):
    """Puts learned tokens, from which no output is read, in front of the others.

    Darcet et al., Vision Transformers Need Registers, 2023, arXiv 2309.16588.
    """

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.empty(count, width))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.value, std=1e-6)

    def forward(self, features_BND: Tensor) -> Tensor:
        """(B, N, D) -> (B, R + N, D), contiguous."""
        return torch.cat([self.value.expand(features_BND.shape[0], -1, -1), features_BND], dim=1)


class LayerScale(nn.Module):
    """Multiplies a residual branch by a learned number for each channel.

    Touvron et al., Going Deeper with Image Transformers, 2021, arXiv 2103.17239, section 2.1.
    """

    def __init__(self, width: int, start: float) -> None:
        super().__init__()
        self.start = start
        self.value = nn.Parameter(torch.empty(width))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.value, self.start)

    def forward(self, branch: Tensor) -> Tensor:
        return branch * self.value


class MapPooling(nn.Module):
    """Multi-head attention pooling: one learned query attends to all tokens, followed by an MLP on a residual branch.

    The head of Zhai et al., Scaling Vision Transformers, 2022, arXiv 2106.04560, section 3.2 (`MAPHead` of
    big_vision), from Lee et al., Set Transformer, 2019.
    """

    def __init__(self, width: int, heads: int, mlp_width: int, *, norm_eps: float) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.empty(width))
        # By the reference kernel: one query has few scores, and cuDNN's fused attention, torch's choice on Hopper, may
        # give NaN as the gradients of its keys (9.25 and 9.26, github.com/NVIDIA/cudnn-frontend/issues/1072).
        self.attention = Attention(width, heads)
        self.norm = nn.LayerNorm(width, eps=norm_eps)
        self.mlp = Mlp(width, mlp_width)

    def reset_probe(self) -> None:
        # Flax's xavier_uniform of a (1, 1, D) array: fans 1 and D.
        bound = math.sqrt(6.0 / (1 + self.probe.numel()))
        nn.init.uniform_(self.probe, -bound, bound)

    def reset_parameters(self) -> None:
        self.reset_probe()
        self.attention.reset_parameters()
        self.norm.reset_parameters()
        self.mlp.reset_parameters()

    def forward(self, features_BND: Tensor) -> Tensor:
        """(B, N, D) -> (B, D)."""
        pooled_BD = self.attention.attend(self.probe, features_BND)
        return pooled_BD + self.mlp(self.norm(pooled_BD))


def _reset(module: Any) -> None:
    module.reset_parameters()


def _lecun_normal(linear: nn.Linear) -> None:
    lecun_normal_(linear.weight)
    nn.init.zeros_(linear.bias)


def _zero(head: nn.Linear) -> None:
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)


def _trunc_normal(module: nn.Module) -> None:
    part: Any
    for part in module.modules():
        if isinstance(part, nn.Linear | ExpertLinear):
            nn.init.normal_(part.weight, std=0.02)
            nn.init.zeros_(part.bias)
        elif isinstance(part, ClassToken | LearnedPositions):
            nn.init.normal_(part.value, std=0.02)
        elif isinstance(part, MapPooling):
            part.reset_probe()
        elif hasattr(part, "reset_parameters") and not list(part.children()):
            # A parent's would draw its children's values.
            part.reset_parameters()


FILLS: dict[str, tuple[Callable[[Any], None], Callable[[Any], None], Callable[[Any], None]]] = {
    "jax": (_reset, _lecun_normal, _zero),
    "trunc_normal": (_trunc_normal, _trunc_normal, _trunc_normal),
}
"""The initialisers of a vision transformer's body, `pre_logits` and head, for each value of `init`."""
