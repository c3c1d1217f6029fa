"""The catalogue of precision levels: which numbers a step is computed in, one named level each.

The names O0 to O3 are Apex's (NVIDIA, "apex.amp", opt_level). float16 has 5 bits of exponent: gradients under 2^-24
(6e-8) become zero, which scaling the loss repairs (Micikevicius et al., Mixed Precision Training, ICLR 2018, section
3.2). bfloat16 has float32's exponent and needs no scaling, with 8 bits of significand where float16 has 11.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Format = Literal["float32", "float16", "bfloat16"]
Name = Literal["fp32", "tf32", "amp_bf16", "amp_fp16", "fp16_master", "bf16_params", "fp16", "bf16", "fp8"]


@dataclass(frozen=True)
class Level:
    """What one level means.

    Attributes:
        apex: the same level's name in Apex, or "".
        autocast: format of products under torch's autocast; None without it.
        weights: format of the network's parameters and of the activations between layers.
        wide_norms: normalisation layers stay in float32 where `weights` is a half format.
        masters: "kept": the optimizer owns float32 copies of the weights, rounded into the network after each step.
            "none": it does not; where `weights` is a half format the update is computed in float32 from the rounded
            weight and rounded at once, so that an update under half a unit in the last place is lost.
        scaled: the loss is scaled.
        tf32: float32 products may round their factors to 10 bits of significand.
        float8: linear layers multiply in float8.
        note: one sentence.
    """

    name: Name
    note: str
    apex: str = ""
    autocast: Format | None = None
    weights: Format = "float32"
    wide_norms: bool = False
    masters: Literal["none", "kept"] = "none"
    scaled: bool = False
    tf32: bool = False
    float8: bool = False

    @property
    def compute(self) -> Format:
        """What matrix products are computed in (float8 levels: those that are not float8)."""
        return self.autocast or self.weights

    @property
    def in_16_bits(self) -> bool:
        """Whether products are in bfloat16 or float16, which other kernels are the fastest for."""
        return self.compute != "float32" and not self.float8


_LEVELS = (
    Level("fp32", "Everything in float32.", apex="O0"),
    Level("tf32", "float32 with products in TF32: its range, 10 bits of significand; CUDA from Ampere on.", tf32=True),
    Level(
        "amp_bf16", "bfloat16 autocast: weights, gradients and optimizer in float32.", apex="O1", autocast="bfloat16"
    ),
    Level("amp_fp16", "float16 autocast with loss scaling.", apex="O1", autocast="float16", scaled=True),
    Level(
        "fp16_master",
        "float16 network with norms in float32, float32 master weights in the optimizer, loss scaling.",
        apex="O2",
        weights="float16",
        wide_norms=True,
        masters="kept",
        scaled=True,
    ),
    Level(
        "bf16_params",
        "bfloat16 copies of float32 master weights, cast once a step: FSDP2's MixedPrecisionPolicy at one rank.",
        weights="bfloat16",
        masters="kept",
    ),
    Level(
        "fp16",
        "Weights, norms, activations and gradients in float16, no masters; loss scaling.",
        apex="O3",
        weights="float16",
        scaled=True,
    ),
    Level("bf16", "Weights, norms, activations and gradients in bfloat16, no masters.", apex="O3", weights="bfloat16"),
    Level(
        "fp8",
        "Products of linear layers in float8 with scales per tensor or row (torchao), the rest bfloat16 autocast.",
        autocast="bfloat16",
        float8=True,
    ),
)
LEVELS: dict[Name, Level] = {level.name: level for level in _LEVELS}

KEPT_IN_FLOAT32: tuple[str, ...] = (
    "layer_norm",
    "group_norm",
    "softmax",
    "log_softmax",
    "exp",
    "log",
    "pow",
    "cross_entropy",
    "binary_cross_entropy_with_logits",
)
"""Operations that come out in float32 under this package's autocast (level O1), whatever comes in.

CUDA's autocast does so by itself (torch's documentation, "CUDA Ops that can autocast to float32", lists more); the
CPU's knows only the losses, and `parallel/autocast.py` adds the others. Batch norm is on neither list: its output has
the input's format, its statistics and its arithmetic are float32.
"""
