"""Residual networks (He et al., Deep Residual Learning for Image Recognition, 2016, arXiv 1512.03385).

Shape letters: B batch, C channels, H height, W width of the maps, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pycls_fast.models.cpu_kernels import CONVOLUTION
from pycls_fast.models.drop_path import DropPath, drop_path_rates
from pycls_fast.network import Network, Units


def _conv(in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """A convolution that keeps the map's size at stride 1; without bias, because a norm follows."""
    padding = kernel_size // 2
    return nn.Conv2d(in_channels, out_channels, kernel_size, stride=stride, padding=padding, groups=groups, bias=False)


class Shortcut(nn.Module):
    """Brings a block's input to the shape of its output: 1x1 convolution and norm (option B of the paper).

    `kind` is how it downsamples: by the stride of the convolution, "conv", or by a 2x2 mean before it, "pool", which
    skips no pixel (He et al., Bag of Tricks, 2019, figure 2, ResNet-D).
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, kind: str) -> None:
        super().__init__()
        pooled = kind == "pool" and stride > 1
        # Odd sides are rounded up, as in the branch's strided convolutions.
        self.pool = nn.AvgPool2d(stride, stride, ceil_mode=True, count_include_pad=False) if pooled else None
        self.conv = _conv(in_channels, out_channels, 1, 1 if pooled else stride)
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, maps_BCHW: Tensor) -> Tensor:
        if self.pool is not None:
            maps_BCHW = self.pool(maps_BCHW)
        return self.norm(self.conv(maps_BCHW))


class ResidualBlock(nn.Module):
    """A block relu(shortcut(maps) + drop_path(branch(maps))); subclasses define the branch.

    `channels` is 64 in the first stage; the output has `expansion` times as many.
    """

    expansion: int
    """Output channels as a multiple of `channels`."""

    def __init__(
        self,
        in_channels: int,
        channels: int,
        stride: int,
        drop_path: float,
        *,
        groups: int = 1,
        width_per_group: int = 64,
        shortcut: str = "conv",
    ) -> None:
        super().__init__()
        out_channels = channels * self.expansion
        self._build_branch(in_channels, channels, stride, groups, width_per_group)
        same_shape = stride == 1 and in_channels == out_channels
        self.shortcut = None if same_shape else Shortcut(in_channels, out_channels, stride, shortcut)
        self.drop_path = DropPath(drop_path)

    def _build_branch(self, in_channels: int, channels: int, stride: int, groups: int, width_per_group: int) -> None:
        raise NotImplementedError

    def branch(self, maps_BCHW: Tensor) -> Tensor:
        raise NotImplementedError

    def last_norm(self) -> nn.Module:
        *_, last = (layer for layer in self.children() if isinstance(layer, nn.modules.batchnorm._BatchNorm))
        return last

    def forward(self, maps_BCHW: Tensor) -> Tensor:
        straight_BCHW = maps_BCHW if self.shortcut is None else self.shortcut(maps_BCHW)
        return F.relu(straight_BCHW + self.drop_path(self.branch(maps_BCHW)), inplace=True)


class BasicBlock(ResidualBlock):
    """Two 3x3 convolutions (figure 5 of the paper, left)."""

    expansion = 1

    def _build_branch(self, in_channels: int, channels: int, stride: int, groups: int, width_per_group: int) -> None:
        self.conv1 = _conv(in_channels, channels, 3, stride)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = _conv(channels, channels, 3)
        self.norm2 = nn.BatchNorm2d(channels)

    def branch(self, maps_BCHW: Tensor) -> Tensor:
        maps_BCHW = F.relu(self.norm1(self.conv1(maps_BCHW)), inplace=True)
        return self.norm2(self.conv2(maps_BCHW))


class Bottleneck(ResidualBlock):
    """Convolutions 1x1, 3x3, 1x1 (figure 5 of the paper, right), with the stride in the 3x3 instead of the first 1x1.

    This is "v1.5" (Goyal et al., Accurate, Large Minibatch SGD, 2017, section 5.1, after Gross and Wilber, Training and
    investigating residual nets, 2016): a stride in a 1x1 discards three quarters of its input.
    """

    expansion = 4

    def _build_branch(self, in_channels: int, channels: int, stride: int, groups: int, width_per_group: int) -> None:
        inner = channels * width_per_group // 64 * groups
        self.conv1 = _conv(in_channels, inner, 1)
        self.norm1 = nn.BatchNorm2d(inner)
        self.conv2 = _conv(inner, inner, 3, stride, groups)
        self.norm2 = nn.BatchNorm2d(inner)
        self.conv3 = _conv(inner, channels * self.expansion, 1)
        self.norm3 = nn.BatchNorm2d(channels * self.expansion)

    def branch(self, maps_BCHW: Tensor) -> Tensor:
        maps_BCHW = F.relu(self.norm1(self.conv1(maps_BCHW)), inplace=True)
        maps_BCHW = F.relu(self.norm2(self.conv2(maps_BCHW)), inplace=True)
        return self.norm3(self.conv3(maps_BCHW))


# Table 1 of the paper: kind of block, and blocks in each of the four stages. 200: He et al., Identity Mappings, 2016,
# and pycls; 26: timm.
LAYOUTS: dict[int, tuple[type[ResidualBlock], tuple[int, int, int, int]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    26: (Bottleneck, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
    152: (Bottleneck, (3, 8, 36, 3)),
    200: (Bottleneck, (3, 24, 36, 3)),
}


class ConvNorm(nn.Module):
    """3x3 convolution, norm, ReLU."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv = _conv(in_channels, out_channels, 3, stride)
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, maps_BCHW: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(maps_BCHW)), inplace=True)


class ConvStem(nn.Module):
    """The layers before the first stage, with 64 output channels.

    Args:
        kind: "imagenet": 7x7 of stride 2, then a 3x3 max-pool of stride 2 (a quarter of the side remains). "deep":
            three 3x3 with 32, 32 and 64 channels instead of the 7x7 (He et al., Bag of Tricks, 2019, figure 2,
            ResNet-C). "small", for images up to 64 pixels: 3x3 of stride 1 and no pool (the paper's CIFAR stem, section
            4.2, 64 wide).
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.deep = nn.ModuleList()
        """The deep stem's layers before the last convolution; empty for the other stems."""
        if kind == "deep":
            self.deep.extend([ConvNorm(3, 32, 2), ConvNorm(32, 32, 1)])
        inputs, kernel_size, stride = {"imagenet": (3, 7, 2), "deep": (32, 3, 1), "small": (3, 3, 1)}[kind]
        self.conv = _conv(inputs, 64, kernel_size, stride)
        self.norm = nn.BatchNorm2d(64)
        self.pool = None if kind == "small" else nn.MaxPool2d(3, stride=2, padding=1)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        maps_BCHW = images_BCHW
        for layer in self.deep:
            maps_BCHW = layer(maps_BCHW)
        maps_BCHW = F.relu(self.norm(self.conv(maps_BCHW)), inplace=True)
        return maps_BCHW if self.pool is None else self.pool(maps_BCHW)


class ResNet(Network):
    """A residual network with batch norm, mean pooling and a linear classifier.

    The arguments are the keys of `choices.ResNetModel`, which describes them, and these:

    Args:
        num_classes: K.
        convolution: kernel of the convolutions, a key of `cpu_kernels.CONVOLUTION`.
    """

    head_name = "head"

    def __init__(
        self,
        *,
        depth: int,
        num_classes: int,
        stem: str = "imagenet",
        shortcut: str = "conv",
        groups: int = 1,
        width_per_group: int = 64,
        zero_init_last_gamma: bool = True,
        drop_path: float = 0.0,
        convolution: str = "torch",
    ) -> None:
        super().__init__()
        self.zero_init_last_gamma = zero_init_last_gamma
        self.shortcut = shortcut
        block_type, block_counts = LAYOUTS[depth]
        rates = iter(drop_path_rates(drop_path, sum(block_counts)))

        # Built on the meta device and filled once, by `initialise`; see `vit.VisionTransformer`.
        device = torch.get_default_device()
        with torch.device("meta"):
            self.stem = ConvStem(stem)
            self.stages = nn.ModuleList()
            width = 64
            for stage, count in enumerate(block_counts):
                channels = 64 * 2**stage
                blocks = nn.Sequential()
                for index in range(count):
                    block = block_type(
                        width,
                        channels,
                        stride=2 if stage > 0 and index == 0 else 1,
                        drop_path=next(rates),
                        groups=groups,
                        width_per_group=width_per_group,
                        shortcut=shortcut,
                    )
                    blocks.append(block)
                    width = channels * block_type.expansion
                self.stages.append(blocks)
            self.head = nn.Linear(width, num_classes)
            for module in self.modules():
                if isinstance(module, nn.Conv2d):
                    # The same parameters, computed otherwise.
                    module.__class__ = CONVOLUTION[convolution]
        self.to_empty(device=device)
        self.initialise()

    def initialisers(self) -> Iterator[tuple[nn.Module, Callable[[Any], None]]]:
        """Convolutions normal with variance 2 / fan_out, norms at identity, head N(0, 0.01).

        He et al., Delving Deep into Rectifiers, 2015, section 2.2, backward case; the head: Goyal et al. 2017.
        """
        zeroed: set[nn.Module] = set()
        if self.zero_init_last_gamma:
            zeroed = {block.last_norm() for _, block in self.units() if isinstance(block, ResidualBlock)}
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                yield module, _he_normal
            elif isinstance(module, nn.modules.batchnorm._BatchNorm):
                yield module, _zero_scale if module in zeroed else nn.BatchNorm2d.reset_parameters
        yield self.head, _small_normal

    @property
    def first_conv_name(self) -> str:
        return "stem.deep.0.conv" if len(self.stem.deep) else "stem.conv"

    def units(self) -> Units:
        return [
            (f"stages.{stage}.{index}", block)
            for stage, blocks in enumerate(self.stages)
            for index, block in enumerate(blocks.children())
        ]

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Images (B, C, H, W) -> logits_BK; any memory format, and any size that leaves a pixel after all strides."""
        maps_BCHW = self.stem(images_BCHW)
        for stage in self.stages:
            maps_BCHW = stage(maps_BCHW)
        return self.head(maps_BCHW.mean(dim=(2, 3)))


def _he_normal(conv: nn.Conv2d) -> None:
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")


def _zero_scale(norm: nn.BatchNorm2d) -> None:
    norm.reset_parameters()
    nn.init.zeros_(norm.weight)


def _small_normal(head: nn.Linear) -> None:
    nn.init.normal_(head.weight, std=0.01)
    nn.init.zeros_(head.bias)
