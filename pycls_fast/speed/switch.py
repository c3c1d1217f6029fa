"""What a switch is, and the names of all of them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Numerics = Literal["identical", "rounding", "training"]
Device = Literal["cpu", "cuda"]
MODEL_KINDS = ("vit", "resnet", "timm")
"""The values of `model.kind`."""


class SwitchName(enum.StrEnum):
    """The names that the `speed` group of the configuration accepts."""

    MEMORY_FORMAT = "memory_format"
    ATTENTION = "attention"
    LAYOUT = "layout"
    QKV = "qkv"
    LINEAR = "linear"
    GELU = "gelu"
    PATCHES = "patches"
    CONVOLUTION = "convolution"
    ALLOCATOR = "allocator"
    COMPILE = "compile"
    COMPILE_MODE = "compile_mode"
    OPTIMIZER = "optimizer"
    OPTIMIZER_COMPILE = "optimizer_compile"
    EMA = "ema"
    CLIP = "clip"
    DECODE = "decode"
    DECODE_SCALE = "decode_scale"
    INPUT_COPY = "input_copy"
    NORMALIZE_ON = "normalize_on"
    ERASE_ON = "erase_on"
    MIX_ON = "mix_on"
    METRICS = "metrics"
    SEQUENCE_PADDING = "sequence_padding"
    CROSS_ENTROPY = "cross_entropy"
    CUDA_GRAPHS = "cuda_graphs"
    RECOMPUTE = "recompute"
    ACTIVATION_OFFLOAD = "activation_offload"
    ACTIVATION_COMPRESSION = "activation_compression"
    PARAM_OFFLOAD = "param_offload"
    DROP_PATH_COMPUTE = "drop_path_compute"


@dataclass(frozen=True)
class Switch:
    """One optimization: `values[0]` is the reference, `fast` the value that was found best on each device.

    The texts make its card in `docs/switches.md` (`tools/switch_cards.py` writes it): full sentences that end with a
    full stop.

    Attributes:
        name, values, fast: see above.
        fast_16_bits: the best value if products are in 16 bits, for devices on which it differs from `fast`.
        numerics: how closely the other values must match the reference.
        requires: the device that a value needs.
        note: what it does.
        mathematics: what changes in the numbers, exactly.
        helps: when it is faster or smaller, with the figures measured so far and where.
        hurts: when it costs something.
        source: the paper, documentation or code that it comes from.
        ran: where it has been run, and where not.
        applies_to: kinds of model in which it changes anything, if not all.
    """

    name: SwitchName
    values: tuple[str, ...]
    fast: Mapping[Device, str]
    numerics: Numerics
    requires: Mapping[str, Device]
    note: str
    mathematics: str
    helps: str
    hurts: str
    source: str
    ran: str
    fast_16_bits: Mapping[Device, str] = field(default_factory=dict)
    applies_to: tuple[str, ...] = MODEL_KINDS

    @property
    def reference(self) -> str:
        """The plain value that every other one is compared with."""
        return self.values[0]
