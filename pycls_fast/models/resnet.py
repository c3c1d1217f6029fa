"""Residual networks (He et al., Deep Residual Learning for Image Recognition, 2016, arXiv 1512.03385).

Shape letters: B batch, C channels, H height, W width of the maps, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pycls_fast.errors import UserError
from pycls_fast.models.layers import DropPath, drop_path_rates

Stem = Literal["imagenet", "small"]
Depth = Literal[18, 34, 50, 101, 152]


def _conv(in_channels: int, out_channels: int, kernel_size: int, stride: int = 1) -> nn.Conv2d:
    """A convolution that keeps the map's size at stride 1; without bias, for a norm follows it."""
    padding = kernel_size // 2
    return nn.Conv2d(in_channels, out_channels, kernel_size, stride=stride, padding=padding, bias=False)


class Shortcut(nn.Module):
    """Brings a block's input to the shape of its output: 1x1 convolution and norm (option B of the paper)."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv = _conv(in_channels, out_channels, 1, stride)
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, maps_BCHW: Tensor) -> Tensor:
        return self.norm(self.conv(maps_BCHW))


class ResidualBlock(nn.Module):
    """relu(shortcut(maps) + drop_path(branch(maps))); the kinds of block differ in the branch.

    Args:
        in_channels: C of the input.
        channels: C of the branch's inner maps.
        stride: factor by which the block makes maps smaller.
        drop_path: probability that the branch is dropped for a sample in training.
    """

    expansion: int
    """Channels of the output for each inner channel."""

    def __init__(self, in_channels: int, channels: int, stride: int, drop_path: float) -> None:
        super().__init__()
        out_channels = channels * self.expansion
        self._build_branch(in_channels, channels, stride)
        same_shape = stride == 1 and in_channels == out_channels
        self.shortcut = None if same_shape else Shortcut(in_channels, out_channels, stride)
        self.drop_path = DropPath(drop_path)

    def _build_branch(self, in_channels: int, channels: int, stride: int) -> None:
        raise NotImplementedError

    def branch(self, maps_BCHW: Tensor) -> Tensor:
        raise NotImplementedError

    def last_norm(self) -> nn.BatchNorm2d:
        """The norm that ends the branch."""
        raise NotImplementedError

    def forward(self, maps_BCHW: Tensor) -> Tensor:
        straight_BCHW = maps_BCHW if self.shortcut is None else self.shortcut(maps_BCHW)
        return F.relu(straight_BCHW + self.drop_path(self.branch(maps_BCHW)), inplace=True)


class BasicBlock(ResidualBlock):
    """Two 3x3 convolutions (figure 5 of the paper, left)."""

    expansion = 1

    def _build_branch(self, in_channels: int, channels: int, stride: int) -> None:
        self.conv1 = _conv(in_channels, channels, 3, stride)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = _conv(channels, channels, 3)
        self.norm2 = nn.BatchNorm2d(channels)

    def branch(self, maps_BCHW: Tensor) -> Tensor:
        maps_BCHW = F.relu(self.norm1(self.conv1(maps_BCHW)), inplace=True)
        return self.norm2(self.conv2(maps_BCHW))

    def last_norm(self) -> nn.BatchNorm2d:
        return self.norm2


class Bottleneck(ResidualBlock):
    """1x1, 3x3, 1x1 (figure 5 of the paper, right), the stride in the 3x3 instead of the first 1x1.

    That is "v1.5" (Goyal et al., Accurate, Large Minibatch SGD, 2017, section 5.1, after Gross and Wilber,
    Training and investigating residual nets, 2016): a stride in a 1x1 throws three quarters of its input
    away.
    """

    expansion = 4

    def _build_branch(self, in_channels: int, channels: int, stride: int) -> None:
        self.conv1 = _conv(in_channels, channels, 1)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = _conv(channels, channels, 3, stride)
        self.norm2 = nn.BatchNorm2d(channels)
        self.conv3 = _conv(channels, channels * self.expansion, 1)
        self.norm3 = nn.BatchNorm2d(channels * self.expansion)

    def branch(self, maps_BCHW: Tensor) -> Tensor:
        maps_BCHW = F.relu(self.norm1(self.conv1(maps_BCHW)), inplace=True)
        maps_BCHW = F.relu(self.norm2(self.conv2(maps_BCHW)), inplace=True)
        return self.norm3(self.conv3(maps_BCHW))

    def last_norm(self) -> nn.BatchNorm2d:
        return self.norm3


# Table 1 of the paper: kind of block, and blocks in each of the four stages.
LAYOUTS: dict[int, tuple[type[ResidualBlock], tuple[int, int, int, int]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
    152: (Bottleneck, (3, 8, 36, 3)),
}


class ConvStem(nn.Module):
    """The layers before the first stage, 64 channels out.

    Args:
        in_channels: C of the images.
        kind: "imagenet": 7x7 of stride 2, then a 3x3 max-pool of stride 2 (a quarter of the side is left).
            "small", for images up to 64 pixels: 3x3 of stride 1 and no pool (the paper's CIFAR stem, section
            4.2, 64 wide).

    Raises:
        UserError: an unknown kind.
    """

    def __init__(self, in_channels: int, kind: Stem) -> None:
        super().__init__()
        if kind not in ("imagenet", "small"):
            raise UserError(f"stem: must be one of imagenet, small; got {kind}")
        self.conv = _conv(in_channels, 64, 7, 2) if kind == "imagenet" else _conv(in_channels, 64, 3)
        self.norm = nn.BatchNorm2d(64)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1) if kind == "imagenet" else None

    def forward(self, images_BCHW: Tensor) -> Tensor:
        maps_BCHW = F.relu(self.norm(self.conv(images_BCHW)), inplace=True)
        return maps_BCHW if self.pool is None else self.pool(maps_BCHW)


class ResNet(nn.Module):
    """A residual network with batch norm, mean pooling and a linear classifier.

    Args:
        depth: layers with weights: 18, 34, 50, 101 or 152.
        num_classes: K.
        in_channels: C of the images.
        stem: "imagenet", or "small" for images up to 64 pixels; see `ConvStem`.
        zero_init_last_gamma: start the last norm of each branch at scale 0, so that each block starts as its
            shortcut (Goyal et al. 2017, section 5.1).
        drop_path: probability that the last block's branch is dropped for a sample; earlier blocks less,
            linearly.

    Raises:
        UserError: a depth or stem that does not exist.
    """

    head_name = "head"

    def __init__(
        self,
        *,
        depth: Depth,
        num_classes: int,
        in_channels: int = 3,
        stem: Stem = "imagenet",
        zero_init_last_gamma: bool = True,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        if depth not in LAYOUTS:
            raise UserError(f"depth: must be one of {', '.join(map(str, LAYOUTS))}; got {depth}")
        self.zero_init_last_gamma = zero_init_last_gamma
        block_type, block_counts = LAYOUTS[depth]
        rates = iter(drop_path_rates(drop_path, sum(block_counts)))

        # Built without memory and filled once, by `initialise`; see `vit.VisionTransformer`.
        device = torch.get_default_device()
        with torch.device("meta"):
            self.stem = ConvStem(in_channels, stem)
            self.stages = nn.ModuleList()
            width = 64
            for stage, count in enumerate(block_counts):
                channels = 64 * 2**stage
                blocks = nn.Sequential()
                for index in range(count):
                    stride = 2 if stage > 0 and index == 0 else 1
                    blocks.append(block_type(width, channels, stride, next(rates)))
                    width = channels * block_type.expansion
                self.stages.append(blocks)
            self.head = nn.Linear(width, num_classes)
        self.to_empty(device=device)
        self.initialise()

    def initialise(self) -> None:
        """Set every parameter and buffer: convolutions normal with variance 2 / fan_out (He et al., Delving
        Deep into Rectifiers, 2015, section 2.2, backward case), norms at identity, head N(0, 0.01) (Goyal et
        al. 2017).

        Draws from the default generator of the parameters' device, as `VisionTransformer.initialise` does.
        """
        for module, fill in self.initialisers():
            fill(module)

    def initialisers(self) -> Iterator[tuple[nn.Module, Callable[[Any], None]]]:
        """`initialise` in parts; see `vit.VisionTransformer.initialisers`."""
        zeroed: set[nn.Module] = set()
        if self.zero_init_last_gamma:
            zeroed = {block.last_norm() for _, block in self.units() if isinstance(block, ResidualBlock)}
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                yield module, _he_normal
            elif isinstance(module, nn.modules.batchnorm._BatchNorm):
                yield module, _zero_scale if module in zeroed else _identity
        yield self.head, _small_normal

    def units(self) -> list[tuple[str, nn.Module]]:
        """The residual blocks with their qualified names, in forward order."""
        return [
            (f"stages.{stage}.{index}", block)
            for stage, blocks in enumerate(self.stages)
            for index, block in enumerate(blocks.children())
        ]

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Images (B, C, H, W), any size that leaves a pixel after the strides, any memory format ->
        logits_BK."""
        maps_BCHW = self.stem(images_BCHW)
        for stage in self.stages:
            maps_BCHW = stage(maps_BCHW)
        return self.head(maps_BCHW.mean(dim=(2, 3)))


def _he_normal(conv: nn.Conv2d) -> None:
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")


def _identity(norm: nn.BatchNorm2d) -> None:
    norm.reset_parameters()


def _zero_scale(norm: nn.BatchNorm2d) -> None:
    norm.reset_parameters()
    nn.init.zeros_(norm.weight)


def _small_normal(head: nn.Linear) -> None:
    nn.init.normal_(head.weight, std=0.01)
    nn.init.zeros_(head.bias)
