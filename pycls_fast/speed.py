"""The catalogue of performance switches: every optimization is one named choice beside its slow, plain twin.

`numerics` says what a fast value owes its reference:

- `identical`: the same bits, step after step;
- `rounding`: the same mathematics in another order of operations;
- `training`: it changes what is learned, so its accuracy has to be measured.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pycls_fast.errors import UserError

Numerics = Literal["identical", "rounding", "training"]
Device = Literal["cpu", "cuda"]


class SwitchName(enum.StrEnum):
    """The names that the `speed` group of the configuration accepts."""

    MEMORY_FORMAT = "memory_format"
    ATTENTION = "attention"
    OPTIMIZER = "optimizer"
    EMA = "ema"
    CLIP = "clip"
    INPUT_COPY = "input_copy"


@dataclass(frozen=True)
class Switch:
    """One optimization: `values[0]` is the reference, `fast` the value that was found best on each device."""

    name: SwitchName
    values: tuple[str, ...]
    fast: Mapping[Device, str]
    numerics: Numerics
    applies_to: tuple[str, ...]
    requires: Mapping[str, Device]
    note: str

    @property
    def reference(self) -> str:
        """The plain value that every other one is compared with."""
        return self.values[0]


CATALOGUE: tuple[Switch, ...] = (
    Switch(
        name=SwitchName.MEMORY_FORMAT,
        values=("contiguous", "channels_last"),
        fast={"cpu": "channels_last", "cuda": "channels_last"},
        numerics="rounding",
        applies_to=("vit", "resnet"),
        requires={},
        note="Convolution weights and images in NHWC order, which tensor cores and oneDNN read without transposing.",
    ),
    Switch(
        name=SwitchName.ATTENTION,
        values=("reference", "sdpa"),
        fast={"cpu": "sdpa", "cuda": "sdpa"},
        numerics="rounding",
        applies_to=("vit",),
        requires={},
        note="torch's fused scaled_dot_product_attention: the N x N scores are never written to memory.",
    ),
    Switch(
        name=SwitchName.OPTIMIZER,
        values=("loop", "foreach", "fused"),
        fast={"cpu": "fused", "cuda": "fused"},
        numerics="rounding",
        applies_to=("vit", "resnet"),
        requires={},
        note="One kernel per operation over all parameters (foreach), or one kernel for the whole update (fused).",
    ),
    Switch(
        name=SwitchName.EMA,
        values=("loop", "foreach"),
        fast={"cpu": "foreach", "cuda": "foreach"},
        numerics="rounding",
        applies_to=("vit", "resnet"),
        requires={},
        note="The moving average of the weights in one multi-tensor operation instead of one per tensor.",
    ),
    Switch(
        name=SwitchName.CLIP,
        values=("loop", "foreach"),
        fast={"cpu": "foreach", "cuda": "foreach"},
        numerics="rounding",
        applies_to=("vit", "resnet"),
        requires={},
        note="The gradient norm and the scaling by it as multi-tensor operations.",
    ),
    Switch(
        name=SwitchName.INPUT_COPY,
        values=("blocking", "prefetch"),
        fast={"cpu": "blocking", "cuda": "prefetch"},
        numerics="identical",
        applies_to=("vit", "resnet"),
        requires={"prefetch": "cuda"},
        note="Batches travel on a side stream, two in flight, while the step before them computes.",
    ),
)


def resolve(preset: str, chosen: Mapping[SwitchName, str], device: Device) -> dict[SwitchName, str]:
    """The value of every switch on this device: the one chosen by hand, else the preset's.

    Raises:
        UserError: a value was chosen that this device cannot run.
    """
    resolved: dict[SwitchName, str] = {}
    problems: list[str] = []
    for switch in CATALOGUE:
        value = chosen.get(switch.name)
        if value is None:
            value = switch.reference if preset == "reference" else switch.fast[device]
        needed = switch.requires.get(value)
        if needed is not None and needed != device:
            usable = " or ".join(v for v in switch.values if switch.requires.get(v, device) == device)
            problems.append(
                f"speed.{switch.name}: {value} needs {needed.upper()} and this run is on {device.upper()}; "
                f"use speed.{switch.name}={usable}"
            )
        resolved[switch.name] = value
    if problems:
        raise UserError(*problems)
    return resolved
