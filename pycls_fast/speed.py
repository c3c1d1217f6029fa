"""The performance switches: each is a field of `Speed`, whose first value is the plain twin of all others.

A field holds all that is known of its switch: what `--help`, the ladder of all switches and the table in
`docs/speed.md` say comes from here. `numerics` says how closely a fast value must match the first one:

- `identical`: the same bits, step after step;
- `rounding`: the same mathematics in a different order of operations;
- `training`: it changes what is learned, so its accuracy must be measured.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from pycls_fast.choice import Section
from pycls_fast.errors import UserError, refuse
from pycls_fast.models.choices import Model
from pycls_fast.optim.choices import Optimizer
from pycls_fast.values import Off, OffOn

Numerics = Literal["identical", "rounding", "training"]
Device = Literal["cpu", "cuda"]
Fast = Literal["cpu", "cuda", "cpu16", "cuda16"]


@dataclass(frozen=True)
class Switch:
    """What is known of one optimization.

    Attributes:
        numerics: how closely the other values must match the first.
        fast: the best value, or by device (`cpu`), or by device if products are in 16 bits (`cpu16`); the first value
            where nothing is said.
        device: the device that a value needs.
        needs: the other settings that a value cannot be without.
        note: what to know of a value when it is measured.
        name, values: of its field; filled in.
        models: the kinds of our models that it is for, whose `build` takes it (`Model.switches`); empty for one that is
            not within the network; filled in.
    """

    numerics: Numerics
    fast: str | Mapping[Fast, str] = ""
    device: Mapping[str, Device] = field(default_factory=dict)
    needs: Mapping[str, str] = field(default_factory=dict)
    note: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    values: tuple[str, ...] = ()
    models: tuple[str, ...] = ()

    @property
    def reference(self) -> str:
        """The plain value that every other one is compared with."""
        return self.values[0]

    def best(self, device: Device, *, in_16_bits: bool = False) -> str:
        """The value that was found best on a device, with products in 16 bits or not."""
        if isinstance(self.fast, str):
            return self.fast or self.reference
        wide = self.fast.get(device, self.reference)
        return self.fast.get("cpu16" if device == "cpu" else "cuda16", wide) if in_16_bits else wide

    def concerns(self, model: Model | type[Model]) -> bool:
        """Whether it has an effect on this model."""
        return not self.models or self.name in model.switches


_COMPILE_MODES = ("reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune")
_PARTS_ARE_TIMED = "moved into the step; the workers' saving is not timed here: time mode=both"
_LOADER_IS_TIMED = "only JPEGs; its time is the loader's: time mode=loader"


class Speed(Section):
    """Performance switches; one that is not set takes the preset's value for the device (docs/speed.md)."""

    preset: Literal["reference", "fast", "meta2022"] = "reference"
    """The values of the switches that are not set."""

    # How the network is laid out, computed and compiled.
    memory_format: Annotated[Literal["contiguous", "channels_last"], Switch("rounding", fast="channels_last")] = (
        "contiguous"
    )
    """Convolution weights and images in NHWC order, which tensor cores and oneDNN read without transposing."""
    attention: Annotated[
        Literal["reference", "sdpa", "sdpa_math", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "products"],
        Switch(
            "rounding",
            fast={"cpu": "sdpa", "cuda": "sdpa", "cpu16": "products"},
            device={"sdpa_efficient": "cuda", "sdpa_cudnn": "cuda"},
            note={"sdpa_flash": "on CUDA only in 16 bits", "sdpa_cudnn": "only in 16 bits"},
        ),
    ] = "reference"
    """torch's fused scaled_dot_product_attention, whose N x N scores are never written: sdpa lets torch pick the
    kernel, the others name it, and fail if it cannot run. products: written out, with its own backward pass."""
    layout: Annotated[Literal["batch_first", "batch_second"], Switch("rounding")] = "batch_first"
    """Features inside are (B, N, D) or (N, B, D). Parameters, checkpoints, images and logits are the same."""
    qkv: Annotated[Literal["separate", "fused"], Switch("rounding", fast={"cpu16": "fused", "cuda16": "fused"})] = (
        "separate"
    )
    """Queries, keys and values by three products, or by one with the three matrices joined when they are used."""
    linear: Annotated[Literal["torch", "products"], Switch("rounding", fast={"cpu16": "products"})] = "torch"
    """The blocks' linear layers by torch, or by products that suit a CPU."""
    gelu: Annotated[
        Literal["torch", "polynomial"],
        Switch(
            "rounding",
            fast={"cpu16": "polynomial"},
            needs={"polynomial": "speed.compile=model"},
            note={"polynomial": "only in 16 bits; in float32 it is torch's"},
        ),
    ] = "torch"
    """GELU by torch's error function, or by polynomials in compiled code and 16 bits."""
    patches: Annotated[Literal["convolution", "product"], Switch("rounding", fast="product")] = "convolution"
    """Patches are projected by a convolution whose stride is its size, or cut out and projected by one product."""
    convolution: Annotated[
        Literal["torch", "products"],
        Switch(
            "rounding",
            fast={"cpu16": "products"},
            needs={"products": "speed.memory_format=channels_last"},
        ),
    ] = "torch"
    """Convolutions by torch, or parts of them by matrix products over channels-last pixels."""
    allocator: Annotated[
        Literal["default", "keep"], Switch("identical", fast={"cpu": "keep"}, device={"keep": "cpu"})
    ] = "default"
    """Tells glibc's malloc to keep freed memory for the process: a step's activations reuse the previous step's."""
    compile: Annotated[
        Literal["off", "blocks", "model"], Off, Switch("rounding", fast={"cuda": "blocks", "cpu16": "model"})
    ] = "off"
    """torch.compile in place: of each repeated block, or of the whole model. Evaluation runs uncompiled."""
    compile_mode: Annotated[
        Literal["default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"],
        Switch(
            "rounding",
            device={"reduce-overhead": "cuda", "max-autotune": "cuda"},
            needs=dict.fromkeys(_COMPILE_MODES, "speed.compile=model"),
        ),
    ] = "default"
    """torch.compile's mode. reduce-overhead replays the compiled parts as CUDA graphs; max-autotune-no-cudagraphs
    times several kernels for each product; max-autotune does both."""

    # Everything between the backward pass and the next step.
    optimizer: Annotated[Literal["loop", "foreach", "fused"], Switch("rounding", fast="fused")] = "loop"
    """One kernel per operation over all parameters (foreach), or one kernel for the whole update (fused)."""
    optimizer_compile: Annotated[Literal["off", "on"], OffOn, Switch("rounding")] = "off"
    """torch.compile of the optimizer's step."""
    ema: Annotated[
        Literal["loop", "foreach"], Switch("rounding", fast="foreach", note={"foreach": "only with optim.ema_decay"})
    ] = "loop"
    """The moving average of the weights in one multi-tensor operation instead of one per tensor."""
    clip: Annotated[Literal["loop", "foreach"], Switch("rounding", fast="foreach")] = "loop"
    """The gradient norm and the scaling by it as multi-tensor operations."""

    # From encoded images to batches on the device.
    decode: Annotated[
        Literal["pillow", "simplejpeg", "region"],
        Switch("rounding", fast="region", note={"simplejpeg": _LOADER_IS_TIMED, "region": _LOADER_IS_TIMED}),
    ] = "pillow"
    """How JPEGs become crops: the whole image by Pillow, or by simplejpeg with torch's resize, or only the rows and
    blocks that the crop needs (region: C)."""
    decode_scale: Annotated[
        Literal["full", "dct"], Switch("training", needs={"dct": "speed.decode=region"}, note={"dct": _LOADER_IS_TIMED})
    ] = "full"
    """Decode JPEGs whose crop is 2, 4 or 8 times as large as the training image at a fraction of their size."""
    input_copy: Annotated[
        Literal["blocking", "prefetch"],
        Switch(
            "identical",
            fast={"cuda": "prefetch"},
            device={"prefetch": "cuda"},
            note={"prefetch": "its time is the copy's: time mode=both"},
        ),
    ] = "blocking"
    """Batches travel on a side stream, two in flight, while the step before them computes."""
    # The device takes over from the last stage on, so that the ladder has these three in reverse order.
    mix_on: Annotated[
        Literal["cpu", "device"], Switch("rounding", fast="device", note={"device": _PARTS_ARE_TIMED})
    ] = "cpu"
    """Where mixup and CutMix mix a microbatch: in the loader's workers or on the device."""
    erase_on: Annotated[
        Literal["cpu", "device"],
        Switch("rounding", fast="device", needs={"device": "speed.mix_on=device"}, note={"device": _PARTS_ARE_TIMED}),
    ] = "cpu"
    """Where the boxes of random erasing are filled; the workers draw them in any case."""
    normalize_on: Annotated[
        Literal["cpu", "device"],
        Switch(
            "rounding",
            fast="device",
            needs={"device": "speed.erase_on=device speed.mix_on=device"},
            note={"device": _PARTS_ARE_TIMED},
        ),
    ] = "cpu"
    """Where uint8 images become normalised floating-point ones: in the loader's workers, or on the device."""

    # The step around the network.
    metrics: Annotated[Literal["step", "interval"], Switch("identical", fast="interval")] = "step"
    """When the host reads loss and gradient norm: in every step, or once per runtime.log_every_steps."""
    sequence_padding: Annotated[Literal["none", "8", "64"], Switch("rounding")] = "none"
    """Tokens are padded to a multiple of 8 or 64 before the blocks; no token attends to the padding."""
    cross_entropy: Annotated[Literal["plain", "fused"], Switch("rounding")] = "plain"
    """The loss and its gradient compiled into few kernels that read the logits once."""
    cuda_graphs: Annotated[
        Literal["off", "on"],
        OffOn,
        Switch(
            "rounding",
            device={"on": "cuda"},
            needs={"on": "speed.optimizer=fused speed.metrics=interval"},
        ),
    ] = "off"
    """After three steps the whole step is recorded as one CUDA graph and replayed."""

    # Less memory for more time, and branches that are skipped.
    recompute: Annotated[
        Literal["off", "full", "selective", "budget"],
        Off,
        Switch("rounding", needs={"budget": "speed.compile=blocks"}),
    ] = "off"
    """Blocks keep their input (full) or also the results of products with weights (selective) and run again in the
    backward pass; budget: compiled code chooses what to keep within parallel.recompute_budget."""
    activation_offload: Annotated[
        Literal["none", "cpu"], Switch("identical", note={"cpu": "on a CPU it only copies"})
    ] = "none"
    """Tensors saved for the backward pass are kept in the host's pinned memory."""
    activation_compression: Annotated[Literal["none", "8bit"], Switch("training")] = "none"
    """Tensors saved for the backward pass are kept in 8 bits per number, the sign of a ReLU in 1 bit."""
    param_offload: Annotated[Literal["none", "cpu"], Switch("rounding", device={"cpu": "cuda"})] = "none"
    """The optimizer's state and its float32 copy of the weights are in the host's memory, and the host updates them."""
    drop_path_compute: Annotated[
        Literal["multiply", "skip"], Switch("rounding", note={"skip": "only with model.drop_path"})
    ] = "multiply"
    """Drop-path computes a branch for the kept samples only (skip) instead of multiplying the dropped ones by zero."""

    @field_validator("sequence_padding", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        # 8 is a number on the command line and in YAML, but a switch's values are names.
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        """null is the same as not set."""
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None or name not in SWITCHES}

    @model_serializer(mode="wrap")
    def _not_set_as_null(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        unset = SWITCHES.keys() - self.model_fields_set
        return {name: None if name in unset else value for name, value in serialize(self).items()}

    @property
    def by_hand(self) -> dict[str, str]:
        """The switches that are set. The fields of the others have the first value, whatever the preset."""
        return {name: value for name, value in self.values().items() if name in self.model_fields_set}

    def values(self) -> dict[str, str]:
        return {name: getattr(self, name) for name in SWITCHES}

    def replace(self, **values: str) -> Speed:
        """A copy with other values, which are not checked."""
        return self.model_copy(update=values)


def _switches() -> Iterator[tuple[str, Switch]]:
    for name, info in Speed.model_fields.items():
        for about in info.metadata:
            if isinstance(about, Switch):
                models = tuple(kind for kind, model in Model.choices().items() if name in model.switches)
                values = typing.get_args(info.annotation)
                yield name, dataclasses.replace(about, name=name, values=values, models=models)


SWITCHES: Mapping[str, Switch] = dict(_switches())
"""What is known of every switch, by name, in the order of the fields."""

# How the recipe of Meta's post of 2022 and its code (pycls) differ from the reference: queries, keys and values are one
# product (torch's MultiheadAttention); images are mixed on the device and otherwise prepared by the loader; the host
# reads the loss in every step. Precision, the classifier and FairScale's sharding are set in other groups
# (`configs/speed/meta2022.yaml`).
META2022: Mapping[str, str] = {
    "layout": "batch_second",
    "qkv": "fused",
    "optimizer": "foreach",
    "mix_on": "device",
}


def resolve(asked: Speed, device: Device, optimizer: Optimizer | None = None, *, in_16_bits: bool = False) -> Speed:
    """The value of every switch on this device: the one set by hand, else the preset's.

    The preset takes the fastest implementation that the optimizer has; with products `in_16_bits` (bfloat16 or float16)
    other values may be the fastest. A `UserError` if a chosen value cannot run on this device, or the optimizer lacks a
    chosen implementation.
    """
    values: dict[str, str] = {}
    problems: list[str] = []
    by_hand = asked.by_hand
    for name, switch in SWITCHES.items():
        value = by_hand.get(name) or _preset_value(asked.preset, switch, device, in_16_bits=in_16_bits)
        needed = switch.device.get(value)
        if needed is not None and needed != device:
            usable = " or ".join(v for v in switch.values if switch.device.get(v, device) == device)
            problems.append(
                f"speed.{name}: {value} needs {needed.upper()} and this run is on {device.upper()}; "
                f"use speed.{name}={usable}"
            )
        values[name] = value
    resolved = asked.replace(**values)
    if optimizer is not None and not problems:
        resolved = _fit_optimizer(resolved, device, optimizer, by_hand="optimizer" in by_hand)
    refuse(problems)
    return resolved


def _preset_value(preset: str, switch: Switch, device: Device, *, in_16_bits: bool) -> str:
    if preset == "fast":
        return switch.best(device, in_16_bits=in_16_bits)
    return META2022.get(switch.name, switch.reference) if preset == "meta2022" else switch.reference


def _fit_optimizer(resolved: Speed, device: Device, optimizer: Optimizer, *, by_hand: bool) -> Speed:
    """Replace an implementation that the preset chose and that does not exist.

    The replacement is foreach on a GPU and the loop on a CPU, where foreach is slower (docs/results/optimizers_cpu.md).
    A `UserError` if it was chosen by hand.
    """
    # An optimizer that cannot be compiled at all is refused by `config/conflicts.py`.
    compiled = optimizer.compilable if resolved.optimizer_compile == "on" else ()
    usable = compiled or optimizer.implementations
    value = resolved.optimizer
    if value in usable:
        return resolved
    if not by_hand:
        return resolved.replace(optimizer=usable[-1] if device == "cuda" else usable[0])
    what = f"{value} that compiles (speed.optimizer_compile=on)" if value in optimizer.implementations else value
    raise UserError(
        f"speed.optimizer: optim.name={optimizer.name} has no {what}; use speed.optimizer={' or '.join(usable)}"
    )
