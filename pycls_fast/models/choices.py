"""The networks that `model` names, and the sizes of each that have a name. torch is imported where one is built."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from pycls_fast.choice import Choice, given
from pycls_fast.values import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Rate, Size, Text

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

    switches: ClassVar[tuple[str, ...]] = ()
    """The switches (keys of `speed`) that the network has, whose values `build` takes as keyword arguments."""
    function_keys: ClassVar[tuple[str, ...]] = ()
    """Keys that change what is computed, but neither names nor shapes of tensors: weights of a run with other values
    are another model's."""

    @property
    def called(self) -> str:
        """What people call it: the name of its preset, else of its family."""
        free = {"num_classes", "drop_path"}
        mine = self.model_dump(exclude=free)
        ours = {name: preset for name, preset in PRESETS.items() if preset["kind"] == self.kind}
        named = (name for name in ours if Model._choose(ours[name]).model_dump(exclude=free) == mine)
        return next(named, self.kind)

    def build(self, classes: int, image_size: Size) -> Network:
        """A network with its initial values, from torch's default generator, for images of this size."""
        raise NotImplementedError


class ViTModel(Model, name="vit"):
    """Vision Transformer (Dosovitskiy et al., 2021); sizes have names, such as model=vit_b16."""

    patch_size: PositiveInt = 16
    """The side of a patch, in pixels."""
    width: PositiveInt
    """The number of features of a token; a multiple of heads."""
    depth: Annotated[int, Field(gt=0, le=1000)]
    """The number of blocks."""
    heads: PositiveInt
    """The number of attention heads."""
    mlp_width: PositiveInt
    """The width between the two layers of a block's MLP."""
    experts: NonNegativeInt = 0
    """The number of experts in place of every second block's MLP (V-MoE; Riquelme et al., 2021); 0: none."""
    experts_per_token: Literal[1, 2] = 2
    """The experts of a token: one (Switch Transformers) or two (GShard)."""
    expert_capacity: PositiveFloat = 1.25
    """The capacity of an expert in training, in even shares of the tokens; the rest pass by the residual path."""
    expert_priority: bool = True
    """Serve tokens with the highest probability first (batch prioritised routing)."""
    balance_loss: NonNegativeFloat = 0.01
    """The factor of the loss for uneven loads (Switch Transformers, equation 4)."""
    router_z_loss: NonNegativeFloat = 0.001
    """The factor of the loss for large logits of the router (ST-MoE, equation 5)."""
    stem: Literal["patch", "conv"] = "patch"
    """How patches become tokens: by one linear layer, or by convolutions (Xiao et al., 2021)."""
    stem_widths: tuple[PositiveInt, ...] = ()
    """The widths of the 3x3 convolutions of stem=conv."""
    stem_strides: tuple[PositiveInt, ...] = ()
    """Their strides, whose product is the patch size."""
    class_token: bool | None = None
    """Whether there is a class token; null: only if the classifier reads it. MAE's fine-tuning keeps it."""
    distillation_token: bool = False
    """A second token that the head reads: of both outputs, whose mean counts, `distill.teacher` teaches its own (DeiT,
    Touvron et al., 2021)."""
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
    """Which tokens get a position: all, or only patches, not class and register tokens (DeiT III, big_vision; timm's
    no_embed_class)."""
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

    function_keys = ("heads", "norm_eps", "stem_strides", "experts_per_token")
    switches = ("attention", "layout", "qkv", "sequence_padding", "linear", "gelu", "patches", "drop_path_compute")

    def build(self, classes: int, image_size: Size, *, token_parts: int = 1, **switches: Any) -> Network:
        """`token_parts`: into how many equal parts the blocks' tokens are divided; they are padded for it."""
        from pycls_fast.models.moe import Experts
        from pycls_fast.models.vit import VisionTransformer

        padding = {"none": 1, "8": 8, "64": 64}
        switches["sequence_padding"] = math.lcm(padding[switches.get("sequence_padding", "none")], token_parts)
        sizes = self.own()
        names = ("experts", "experts_per_token", "expert_capacity", "expert_priority", "balance_loss", "router_z_loss")
        experts = Experts(*(sizes.pop(name) for name in names))
        return VisionTransformer(
            image_size=image_size,
            num_classes=classes,
            drop_path=self.drop_path,
            experts=experts if experts.count else None,
            **sizes,
            **switches,
        )


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
    """The channels per group in the first stage, doubled in each later one."""
    zero_init_last_gamma: bool = True
    """Begin with zeros in the last norm of each block, so that it starts as the identity (Goyal et al., 2017)."""

    function_keys = ("shortcut",)
    switches = ("convolution",)

    def build(self, classes: int, image_size: Size, **switches: Any) -> Network:
        from pycls_fast.models.resnet import ResNet

        return ResNet(num_classes=classes, drop_path=self.drop_path, **self.own(), **switches)


# Options of timm's models that our settings replace; no option may name a file or an address.
INSTEAD_OF_TIMM_OPTIONS = {
    "num_classes": "the classes of the data, or model.num_classes, decide it",
    "in_chans": "images are read as RGB, so it is 3",
    "drop_path_rate": "model.drop_path sets it",
    "features_only": "models here end in a classification head",
    **dict.fromkeys(("pretrained", "pretrained_cfg", "checkpoint_path"), "weights=timm:NAME brings weights"),
}


class TimmModel(Model, name="timm"):
    """Any timm model by its name, newly initialised; `weights=timm:NAME` loads timm's weights into it."""

    name: Text
    """timm's name of the model, such as convnext_tiny."""
    options: dict[str, Any] = Field(default={})
    """Arguments of timm's constructor, under its names."""

    @field_validator("options")
    @classmethod
    def _are_of_the_model(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value.keys() & INSTEAD_OF_TIMM_OPTIONS.keys():
            raise ValueError(f"{name}: {INSTEAD_OF_TIMM_OPTIONS[name]}; leave it out (~model.options.{name})")
        # As timm's own code gives them.
        return {name: tuple(each) if isinstance(each, list) else each for name, each in value.items()}

    switches = ("attention",)

    @property
    def called(self) -> str:
        return f"{self.name} (timm)"

    def build(self, classes: int, image_size: Size, *, attention: str = "reference") -> Network:
        from pycls_fast.models.external import TimmNetwork

        return TimmNetwork(
            name=self.name,
            num_classes=classes,
            image_size=image_size,
            drop_path=self.drop_path,
            options=self.options,
            attention="reference" if attention == "reference" else "sdpa",
        )


class GivenModel(Model, name="given"):
    """A torch module of a Python program: `pycls_fast.train(model=module)`."""

    module: Text
    """The name of its class."""

    @property
    def called(self) -> str:
        return self.module

    def build(self, classes: int, image_size: Size) -> Network:
        from pycls_fast.models.external import GivenNetwork

        way_out = "open the run as pycls_fast.load(RUN, model=MODULE)"
        return GivenNetwork(given("model.module", self.module, way_out), classes, image_size)


# Depth, width, heads and the MLP's width. Ti, S and B: DeiT (Touvron et al. 2021, Table 1); L and H: Dosovitskiy et al.
# 2021, Table 1; g: Zhai et al., Scaling Vision Transformers, 2022, Table 2; GF: Xiao et al., Early Convolutions Help
# Transformers See Better, 2021, Table 2 and pycls' branch vitconfigs.
_SIZES = {
    "ti": (12, 192, 3, 768),
    "s": (12, 384, 6, 1536),
    "b": (12, 768, 12, 3072),
    "l": (24, 1024, 16, 4096),
    "h": (32, 1280, 16, 5120),
    "g": (40, 1408, 16, 6144),
    "1gf": (12, 192, 3, 576),
    "4gf": (12, 384, 6, 1152),
    "18gf": (12, 768, 12, 3072),
    "36gf": (14, 1024, 16, 4096),
    "digits": (4, 64, 4, 128),
    "cifar": (6, 192, 3, 384),
}


def _vit(size: str, patch_size: int = 16, **more: Any) -> dict[str, Any]:
    depth, width, heads, mlp_width = _SIZES[size]
    sizes = {"width": width, "depth": depth, "heads": heads, "mlp_width": mlp_width}
    return {"kind": "vit", "patch_size": patch_size, **sizes, **more}


def _conv(widths: list[int], strides: list[int]) -> dict[str, Any]:
    return {"stem": "conv", "stem_widths": widths, "stem_strides": strides}


def _vit_c(size: str, widths: list[int], strides: list[int]) -> dict[str, Any]:
    """Convolutions for the patches and one block."""
    return _vit(size) | {"depth": _SIZES[size][0] - 1} | _conv(widths, strides)


def _resnet(depth: int, **more: Any) -> dict[str, Any]:
    return {"kind": "resnet", "depth": depth, **more}


def _timm(name: str) -> dict[str, Any]:
    return {"kind": "timm", "name": name}


# The repository of DeiT begins with the values of timm.
_DEIT: dict[str, Any] = {"init": "trunc_normal"}
# DeiT III (Touvron et al. 2022): layer scale, no position for the class token, one drop-path rate.
_DEIT3: dict[str, Any] = {**_DEIT, "position_tokens": "patches", "layer_scale": 1.0e-4, "drop_path_rule": "constant"}
# ResNet-D: He et al., Bag of Tricks, 2019, Table 5; timm's names.
_D = {"stem": "deep", "shortcut": "pool"}
_WIDE_STEM = ([64, 128, 128, 256, 256, 512], [2, 2, 1, 2, 1, 2])

PRESETS: dict[str, dict[str, Any]] = {
    "vit_ti16": _vit("ti"),
    "vit_s16": _vit("s"),
    "vit_b16": _vit("b"),
    "vit_l16": _vit("l"),
    "vit_h16": _vit("h"),
    "vit_h14": _vit("h", 14),
    # With its attention pooling: Zhai et al. 2022, section 3.2.
    "vit_g14": _vit("g", 14, classifier="map"),
    # Beyer et al., Better plain ViT baselines for ImageNet-1k, 2022 (big_vision, vit_s16_i1k.py).
    "vit_s16_gap": _vit("s", classifier="pooled", classifier_norm="before_pool", pre_logits=384, positions="sincos2d"),
    "deit_ti16": _vit("ti", **_DEIT),
    "deit_s16": _vit("s", **_DEIT),
    "deit_b16": _vit("b", **_DEIT),
    "deit3_s16": _vit("s", **_DEIT3),
    "deit3_b16": _vit("b", **_DEIT3),
    "deit3_l16": _vit("l", **_DEIT3),
    "deit3_h14": _vit("h", 14, **_DEIT3),
    "vit_p_1gf": _vit("1gf"),
    "vit_p_4gf": _vit("4gf"),
    "vit_p_18gf": _vit("18gf"),
    "vit_p_36gf": _vit("36gf"),
    "vit_c_1gf": _vit_c("1gf", [24, 48, 96, 192], [2, 2, 2, 2]),
    "vit_c_4gf": _vit_c("4gf", [48, 96, 192, 384], [2, 2, 2, 2]),
    "vit_c_18gf": _vit_c("18gf", *_WIDE_STEM),
    "vit_c_36gf": _vit_c("36gf", *_WIDE_STEM),
    # For images of 16 x 16: 16 patches of 4 x 4.
    "vit_digits": _vit("digits", 4, classifier="pooled"),
    # V-MoE (Riquelme et al. 2021): experts in every second block; 8 of them, where the paper has 32 for JFT-300M.
    "vit_moe_s16": _vit("s", experts=8),
    "vit_moe_b16": _vit("b", experts=8),
    # As vit_digits, with 4 experts in two of its four blocks.
    "vit_moe_digits": _vit("digits", 4, classifier="pooled", experts=4),
    # For images of 32 x 32: 64 patches of 4 x 4 made by convolutions (Xiao et al. 2021), half of its operations.
    "vit_cifar": _vit("cifar", 4, classifier="pooled", **_conv([64, 128, 128, 256, 256], [1, 2, 1, 2, 1])),
    # He et al. 2016, Table 1, with the stride in the 3x3 convolution; the depth of ResNet-200: He et al., Identity
    # Mappings, 2016, here with post-activation blocks, as in pycls.
    "resnet18": _resnet(18),
    "resnet34": _resnet(34),
    "resnet50": _resnet(50),
    "resnet101": _resnet(101),
    "resnet152": _resnet(152),
    "resnet200": _resnet(200),
    "resnet50d": _resnet(50, **_D),
    "resnet101d": _resnet(101, **_D),
    "resnet152d": _resnet(152, **_D),
    # Xie et al. 2017, Table 1; torchvision's names. 101_32x4d is pycls' X-101.
    "resnext50_32x4d": _resnet(50, groups=32, width_per_group=4),
    "resnext101_32x4d": _resnet(101, groups=32, width_per_group=4),
    "resnext101_32x8d": _resnet(101, groups=32, width_per_group=8),
    "resnext101_64x4d": _resnet(101, groups=64, width_per_group=4),
    # Zagoruyko and Komodakis 2016, Table 8; torchvision's names.
    "wide_resnet50_2": _resnet(50, width_per_group=128),
    "wide_resnet101_2": _resnet(101, width_per_group=128),
    # Without the early strides, for which 8 x 8 images are too small.
    "resnet_digits": _resnet(18, stem="small"),
    # Radosavovic et al., Designing Network Design Spaces, 2020; Tan and Le 2019.
    "regnetx_4gf": _timm("regnetx_040"),
    "regnety_4gf": _timm("regnety_040"),
    "efficientnet_b0": _timm("efficientnet_b0"),
    # Any model of timm: model=timm model.name=convnext_tiny, or model=convnext_tiny.
    "timm": {"kind": "timm"},
    # The model that `weights` names (timm:NAME, torchvision:NAME, a run or its files); for files that do not say it:
    "of_weights": _vit("b"),
}
"""The options of `model=NAME`: the values of their keys."""
