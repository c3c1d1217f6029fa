"""The precision levels: each names the number formats that a step is computed in; docs/speed.md has what was measured.

float16 has 5 bits of exponent: gradients under 2^-24 (6e-8) become zero, which scaling the loss repairs (Micikevicius
et al., Mixed Precision Training, ICLR 2018, section 3.2). bfloat16 has float32's exponent and needs no scaling, with 8
bits of significand where float16 has 11.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Format = Literal["float32", "float16", "bfloat16"]
Name = Literal["auto", "fp32", "tf32", "amp_bf16", "amp_fp16", "fp16_master", "bf16_params", "fp16", "bf16", "fp8"]


@dataclass(frozen=True)
class Level:
    """What one level means.

    Attributes:
        autocast: format of products under torch's autocast; None without it.
        weights: format of the network's parameters and of the activations between layers.
        wide_norms: normalisation layers stay in float32 if `weights` is a half format.
        masters: "kept": the optimizer owns float32 copies of the weights, rounded into the network after each step.
            "none": it does not; if `weights` is a half format the update is computed in float32 from the rounded
            weight and rounded at once, so that an update under half a unit in the last place is lost.
        scaled: the loss is scaled.
        tf32: float32 products may round their factors to 10 bits of significand.
        float8: linear layers multiply in float8.
    """

    name: Name
    autocast: Format | None = None
    weights: Format = "float32"
    wide_norms: bool = False
    masters: Literal["none", "kept"] = "none"
    scaled: bool = False
    tf32: bool = False
    float8: bool = False

    @property
    def compute(self) -> Format:
        """The format of matrix products (at float8 levels: of those that are not in float8)."""
        return self.autocast or self.weights

    @property
    def in_16_bits(self) -> bool:
        """Whether products are in bfloat16 or float16, for which different kernels are the fastest."""
        return self.compute != "float32" and not self.float8


_LEVELS = (
    Level("auto"),
    Level("fp32"),
    Level("tf32", tf32=True),
    Level("amp_bf16", autocast="bfloat16"),
    Level("amp_fp16", autocast="float16", scaled=True),
    Level("fp16_master", weights="float16", wide_norms=True, masters="kept", scaled=True),
    Level("bf16_params", weights="bfloat16", masters="kept"),
    Level("fp16", weights="float16", scaled=True),
    Level("bf16", weights="bfloat16"),
    Level("fp8", autocast="bfloat16", float8=True),
)
LEVELS: dict[Name, Level] = {level.name: level for level in _LEVELS}
