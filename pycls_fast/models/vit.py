"""The vision transformer (Dosovitskiy et al., An Image Is Worth 16x16 Words, 2021, arXiv 2010.11929).

Shape letters as in `layers`: B batch, C channels, N tokens, D width, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pycls_fast.errors import UserError
from pycls_fast.models.attention import AttentionName
from pycls_fast.models.layers import (
    Attention,
    ClassToken,
    DropPath,
    DropPathCompute,
    Layout,
    LearnedPositions,
    Mlp,
    Patches,
    PatchStem,
    Qkv,
    SinCos2dPositions,
    batch_dimension,
    drop_path_rates,
)
from pycls_fast.models.products import LinearName

Classifier = Literal["token", "pooled"]
Positions = Literal["learned", "sincos2d"]


class Block(nn.Module):
    """One pre-norm encoder block: attention, then an MLP, each on a residual branch (equations 2 and 3)."""

    def __init__(
        self,
        width: int,
        heads: int,
        mlp_width: int,
        *,
        drop_path: float = 0.0,
        norm_eps: float = 1e-6,
        attention: AttentionName = "reference",
        layout: Layout = "batch_first",
        qkv: Qkv = "separate",
        keys: int | None = None,
        linear: LinearName = "torch",
        drop_path_compute: DropPathCompute = "multiply",
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=norm_eps)
        self.attention = Attention(width, heads, attention=attention, layout=layout, qkv=qkv, keys=keys, linear=linear)
        self.norm2 = nn.LayerNorm(width, eps=norm_eps)
        self.mlp = Mlp(width, mlp_width, linear=linear)
        self.drop_path = DropPath(drop_path, batch_dim=batch_dimension(layout), compute=drop_path_compute)

    def reset_parameters(self) -> None:
        self.norm1.reset_parameters()
        self.attention.reset_parameters()
        self.norm2.reset_parameters()
        self.mlp.reset_parameters()

    def forward(self, features_BND: Tensor) -> Tensor:
        features_BND = self.drop_path.residual(features_BND, lambda part: self.attention(self.norm1(part)))
        return self.drop_path.residual(features_BND, lambda part: self.mlp(self.norm2(part)))


class VisionTransformer(nn.Module):
    """A vision transformer with a linear classifier.

    Args:
        image_size: side of the square images in pixels, a multiple of patch_size.
        patch_size: side of a patch in pixels.
        width: D, a multiple of heads.
        depth: number of blocks.
        heads: attention heads.
        mlp_width: width between the MLP's two layers.
        num_classes: K.
        in_channels: C.
        classifier: what the head sees. "token": a class token, after the final norm. "pooled": no class
            token; the mean over the patch tokens, then the norm, as timm's `global_pool="avg"` does (its
            `fc_norm`; the released JAX code and pycls norm before the mean, which is another function with
            the same parameters).
        positions: "learned", or fixed "sincos2d"; see `layers`.
        drop_path: probability that the last block's branches are dropped for a sample; earlier blocks less,
            linearly.
        norm_eps: added to the variance in every LayerNorm (1e-6 in the released JAX code).
        attention: kernel that computes the attention; all of them do the same mathematics.
        layout: order of the features inside, "batch_first" (B, N, D) or "batch_second" (N, B, D); images, logits
            and parameters are the same.
        qkv: queries, keys and values by three products ("separate") or one ("fused"); the parameters are the
            same.
        sequence_padding: the blocks see a number of tokens that is a multiple of it; what was added is cut off
            behind them and attended to by no token. 1 for none.
        linear: kernel of the blocks' linear layers, a key of `products.LINEAR`; the parameters are the same.
        patches: "convolution" or "product"; see `PatchStem`.
        drop_path_compute: "multiply" computes branches for all samples and zeroes some, "skip" leaves them out;
            see `DropPath`.

    Raises:
        UserError: sizes that do not fit each other, or an unknown name.
    """

    head_name = "head"

    def __init__(
        self,
        *,
        image_size: int,
        patch_size: int,
        width: int,
        depth: int,
        heads: int,
        mlp_width: int,
        num_classes: int,
        in_channels: int = 3,
        classifier: Classifier = "token",
        positions: Positions = "learned",
        drop_path: float = 0.0,
        norm_eps: float = 1e-6,
        attention: AttentionName = "reference",
        layout: Layout = "batch_first",
        qkv: Qkv = "separate",
        sequence_padding: int = 1,
        linear: LinearName = "torch",
        patches: Patches = "convolution",
        drop_path_compute: DropPathCompute = "multiply",
    ) -> None:
        super().__init__()
        if image_size % patch_size:
            raise UserError(f"image_size: must be a multiple of the patch size {patch_size}; got {image_size}")
        if classifier not in get_args(Classifier):
            raise UserError(f"classifier: must be one of {', '.join(get_args(Classifier))}; got {classifier}")
        if positions not in get_args(Positions):
            raise UserError(f"positions: must be one of {', '.join(get_args(Positions))}; got {positions}")
        self.image_size = image_size
        self.batch_dim = batch_dimension(layout)
        has_token = classifier == "token"
        side = image_size // patch_size
        self.tokens = side * side + has_token
        self.padding = -self.tokens % sequence_padding

        # Built without memory and filled once, by `initialise`: torch's own layers would draw values first
        # that are thrown away, and a model built on the meta device would then not get the values of a direct
        # build.
        device = torch.get_default_device()
        with torch.device("meta"):
            self.stem = PatchStem(in_channels, patch_size, width, layout=layout, patches=patches)
            self.class_token = ClassToken(width, layout=layout) if has_token else None
            self.positions: LearnedPositions | SinCos2dPositions
            if positions == "learned":
                self.positions = LearnedPositions(self.tokens, width, layout=layout)
            else:
                self.positions = SinCos2dPositions(side, side, width, class_token=has_token, layout=layout)
            self.blocks = nn.ModuleList(
                Block(
                    width,
                    heads,
                    mlp_width,
                    drop_path=rate,
                    norm_eps=norm_eps,
                    attention=attention,
                    layout=layout,
                    qkv=qkv,
                    keys=self.tokens if self.padding else None,
                    linear=linear,
                    drop_path_compute=drop_path_compute,
                )
                for rate in drop_path_rates(drop_path, depth)
            )
            self.norm = nn.LayerNorm(width, eps=norm_eps)
            self.head = nn.Linear(width, num_classes)
        self.to_empty(device=device)
        self.initialise()

    def initialise(self) -> None:
        """Set every parameter and buffer as the paper's released code does.

        That is google-research/vision_transformer, `models_vit.py`: xavier-uniform matrices, with zero biases
        in attention and N(0, 1e-6) biases in MLPs; LeCun normal patches; positions N(0, 0.02); class token
        and head zero.

        Draws from the default generator of the parameters' device: the same seed gives the same values, on a
        model just built as on one that was built on the meta device and given memory with `to_empty`.
        """
        for module, fill in self.initialisers():
            fill(module)

    def initialisers(self) -> Iterator[tuple[nn.Module, Callable[[Any], None]]]:
        """`initialise` in parts: every module that owns values, in the order of the draws, and what fills it.

        A part reads and writes its own module alone, so that each can be filled, cut over ranks and dropped before the
        next one takes memory.
        """
        for module in (self.stem, self.class_token, self.positions, *self.blocks, self.norm):
            if module is not None:
                yield module, _reset
        yield self.head, _zero

    def units(self) -> list[tuple[str, nn.Module]]:
        """The repeated blocks with their qualified names, in forward order."""
        return [(f"blocks.{index}", block) for index, block in enumerate(self.blocks)]

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Images (B, C, image_size, image_size), any memory format -> logits_BK.

        Raises:
            ValueError: images of another size than the model was built for.
        """
        if images_BCHW.shape[-2:] != (self.image_size, self.image_size):
            found = " x ".join(str(size) for size in images_BCHW.shape[-2:])
            raise ValueError(f"built for images of {self.image_size} x {self.image_size} pixels; got {found}")
        features_BND = self.stem(images_BCHW)
        # Contiguous from here on, which joining the token makes them anyway: sums keep the strides of what is
        # added, so every block would have to copy otherwise.
        token = self.class_token
        features_BND = token(features_BND) if token is not None else features_BND.contiguous()
        features_BND = self.positions(features_BND)
        if self.padding:
            features_BND = self._pad(features_BND)
        for block in self.blocks:
            features_BND = block(features_BND)
        return self.head(self._pool(features_BND))

    def _pad(self, features_BND: Tensor) -> Tensor:
        # (B, N, D) -> (B, N + padding, D), or (N, B, D) -> (N + padding, B, D)
        last = (0, 0, 0, self.padding) if self.batch_dim == 0 else (0, 0, 0, 0, 0, self.padding)
        return F.pad(features_BND, last)

    def _pool(self, features_BND: Tensor) -> Tensor:
        # The norm acts on each token alone: norming only the class token is norming all and taking it.
        token_dim = 1 - self.batch_dim
        if self.class_token is not None:
            return self.norm(features_BND.select(token_dim, 0))
        features_BND = features_BND.narrow(token_dim, 0, self.tokens)
        return self.norm(features_BND.mean(dim=token_dim))


def _reset(module: Any) -> None:
    module.reset_parameters()


def _zero(head: nn.Linear) -> None:
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
