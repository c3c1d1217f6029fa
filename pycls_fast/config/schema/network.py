"""Keys of the networks: `model`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from pycls_fast.choice import Choice
from pycls_fast.values import NonNegativeInt, PositiveFloat, PositiveInt, Rate, Text

if TYPE_CHECKING:
    from pycls_fast.network import Network


class Model(Choice, key="model", tag="kind"):
    """Keys that all networks share."""

    kind: str = ""
    """The network's family."""
    drop_path: Rate = 0.0
    """Stochastic depth: the probability that the last residual branch is dropped for a sample; earlier ones less often
    (for a ViT see drop_path_rule)."""
    num_classes: PositiveInt | None = None
    """The number of outputs; null: found from the data."""

    def build(self, classes: int, image_size: int) -> Network:
        """A network with its initial values, from torch's default generator, for square images of this many pixels."""
        raise NotImplementedError


class ViTModel(Model, name="vit"):
    """Vision Transformer (Dosovitskiy et al., 2021); sizes have names, such as model=vit_b16.

    `models.VisionTransformer` documents the network in more detail.
    """

    patch_size: PositiveInt = 16
    """The side of a patch, in pixels."""
    width: PositiveInt
    """The number of features of a token; a multiple of heads."""
    depth: PositiveInt
    """The number of blocks."""
    heads: PositiveInt
    """The number of attention heads."""
    mlp_width: PositiveInt
    """The width between the two layers of a block's MLP."""
    stem: Literal["patch", "conv"] = "patch"
    """How patches become tokens: by one linear layer, or by convolutions (Xiao et al., 2021)."""
    stem_widths: tuple[PositiveInt, ...] = ()
    """The widths of the 3x3 convolutions of stem=conv."""
    stem_strides: tuple[PositiveInt, ...] = ()
    """Their strides, whose product is the patch size."""
    class_token: bool | None = None
    """Whether there is a class token; null: only if the classifier reads it."""
    registers: NonNegativeInt = 0
    """The number of register tokens (Darcet et al., 2024), which no classifier reads."""
    classifier: Literal["token", "pooled", "map"] = "token"
    """What the head reads: the class token, the mean of the patch tokens, or their attention pooling (MAP)."""
    classifier_norm: Literal["before_pool", "after_pool"] | None = None
    """Where the final norm is: on each token, or on the pooled vector; null: before_pool for map, else after_pool."""
    pre_logits: PositiveInt | None = None
    """The width of a tanh layer before the head; null: none."""
    positions: Literal["learned", "sincos2d"] = "learned"
    """Position embeddings: learned, or fixed sines and cosines of rows and columns."""
    position_tokens: Literal["all", "patches"] = "all"
    """Which tokens get a position: all, or only patches, not class and register tokens (DeiT III, big_vision)."""
    layer_scale: PositiveFloat | None = None
    """The initial value of the factors on each residual branch (Touvron et al., 2021b); null: no factors."""
    qk_norm: bool = False
    """Normalise queries and keys, by head."""
    norm_eps: PositiveFloat = 1e-6
    """Added to the variance in each layer norm."""
    init: Literal["jax", "trunc_normal"] = "jax"
    """Initial values: those of google-research/vision_transformer, whose head begins with zeros, or of DeiT and
    timm."""
    drop_path_rule: Literal["linear", "constant"] = "linear"
    """The drop-path rate of the blocks: rising from 0 to drop_path, or drop_path in all."""


class ResNetModel(Model, name="resnet"):
    """ResNet (He et al., 2016) with the stride in the 3x3 convolution of bottleneck blocks.

    `groups` and `width_per_group` make a ResNeXt or a Wide ResNet, `stem=deep` with `shortcut=pool` a ResNet-D.
    """

    depth: Literal[18, 26, 34, 50, 101, 152, 200]
    """The number of layers; all but 18 and 34 with bottleneck blocks."""
    stem: Literal["imagenet", "deep", "small"] = "imagenet"
    """The first layers: a 7x7 convolution and a max-pool, three 3x3 ones and a max-pool, or one 3x3 without a
    stride."""
    shortcut: Literal["conv", "pool"] = "conv"
    """Shortcuts with a stride: a 1x1 convolution with the stride, or an average pool before it."""
    groups: PositiveInt = 1
    """The number of groups in 3x3 convolutions."""
    width_per_group: PositiveInt = 64
    """The channels per group in the first stage."""
    zero_init_last_gamma: bool = True
    """Begin with zeros in the last norm of each block, so that it starts as the identity (Goyal et al., 2017)."""


class TimmModel(Model, name="timm"):
    """Any timm model by its name, newly initialised; `weights=timm:NAME` loads timm's weights into it."""

    name: Text
    """timm's name of the model, such as convnext_tiny."""
    options: dict[str, bool | int | float | str | None] = Field(default={})
    """Arguments of timm's constructor, under its names."""
