"""Which value of each switch is in force: by hand, or by a preset."""

from __future__ import annotations

import platform
from collections.abc import Mapping

from pycls_fast.errors import UserError
from pycls_fast.speed.catalogue import CATALOGUE
from pycls_fast.speed.switch import Device, Switch, SwitchName

# Some settings of the process are those of its C library.
HAS_GLIBC = platform.libc_ver()[0] == "glibc"

# What there is of each optimizer (`optim.name`), the plain one first, and what of it can be compiled.
OPTIMIZERS: Mapping[str, tuple[str, ...]] = {
    "sgd": ("loop", "foreach", "fused"),
    "adamw": ("loop", "foreach", "fused"),
    "lamb": ("loop", "foreach"),
    "lion": ("loop", "foreach"),
    "adafactor": ("loop",),
    "muon": ("loop",),
    "adamw8bit": ("loop",),
}
COMPILABLE: Mapping[str, tuple[str, ...]] = {
    "sgd": ("loop", "foreach"),
    "adamw": ("loop", "foreach"),
    "lamb": ("loop", "foreach"),
    "lion": ("loop",),
    "adafactor": ("loop",),
    "muon": ("loop",),
    # torchao compiles each update itself.
    "adamw8bit": (),
}
# What updates weights that are cut over ranks as torch's DTensors. Not there: Adafactor and Muon, which look at whole
# matrices, and torchao's 8-bit state.
SHARDABLE: Mapping[str, tuple[str, ...]] = {
    "sgd": ("loop", "foreach"),
    "adamw": ("loop", "foreach", "fused"),
    "lamb": ("loop", "foreach"),
    "lion": ("loop", "foreach"),
}


# What differs from the reference in the recipe of Meta's post of 2022 and its code (pycls): queries, keys and values
# are one product (torch's MultiheadAttention); images are mixed on the device, everything else of their preparation is
# the loader's; the host reads the loss in every step. Precision, the classifier and FairScale's sharding are other
# groups (`configs/speed/meta2022.yaml`).
META2022: Mapping[SwitchName, str] = {
    SwitchName.LAYOUT: "batch_second",
    SwitchName.QKV: "fused",
    SwitchName.OPTIMIZER: "foreach",
    SwitchName.MIX_ON: "device",
}


def preset_value(preset: str, switch: Switch, device: Device, *, in_16_bits: bool = False) -> str:
    """What a preset ("reference", "fast" or "meta2022") says of a switch, with products in 16 bits or not."""
    if preset == "fast":
        if switch.name == SwitchName.ALLOCATOR and not HAS_GLIBC:
            return switch.reference
        return switch.fast_16_bits.get(device, switch.fast[device]) if in_16_bits else switch.fast[device]
    return META2022.get(switch.name, switch.reference) if preset == "meta2022" else switch.reference


def resolve(
    preset: str,
    chosen: Mapping[SwitchName, str],
    device: Device,
    optimizer: str | None = None,
    *,
    in_16_bits: bool = False,
    sharded: bool = False,
) -> dict[SwitchName, str]:
    """The value of every switch on this device: the one chosen by hand, else the preset's.

    Args:
        preset: "reference", "fast" or "meta2022".
        chosen: the switches set by hand.
        device: where the run is.
        optimizer: `optim.name`. The preset takes the fastest implementation that there is of it on this device.
        in_16_bits: products are in bfloat16 or float16, for which other values may be the fastest.
        sharded: the optimizer's parameters are torch's DTensors.

    Raises:
        UserError: a value was chosen that this device cannot run, or an implementation that the optimizer has not.
    """
    resolved: dict[SwitchName, str] = {}
    problems: list[str] = []
    for switch in CATALOGUE:
        value = chosen.get(switch.name)
        if value is None:
            value = preset_value(preset, switch, device, in_16_bits=in_16_bits)
        needed = switch.requires.get(value)
        if needed is not None and needed != device:
            usable = " or ".join(v for v in switch.values if switch.requires.get(v, device) == device)
            problems.append(
                f"speed.{switch.name}: {value} needs {needed.upper()} and this run is on {device.upper()}; "
                f"use speed.{switch.name}={usable}"
            )
        resolved[switch.name] = value
    if resolved.get(SwitchName.ALLOCATOR) == "keep" and not HAS_GLIBC:
        problems.append("speed.allocator: keep needs glibc, which this system has not; use speed.allocator=default")
    if optimizer is not None:
        problems += _fit_optimizer(resolved, chosen, device, optimizer, sharded=sharded)
    if problems:
        raise UserError(*problems)
    return resolved


def _fit_optimizer(
    resolved: dict[SwitchName, str],
    chosen: Mapping[SwitchName, str],
    device: Device,
    optimizer: str,
    *,
    sharded: bool,
) -> list[str]:
    """Take what there is where the preset's value does not exist; what is wrong with a value chosen by hand.

    On a GPU that is foreach; on a CPU the loop, than which foreach is slower (docs/results/optimizers_cpu.md).
    """
    compiled = resolved.get(SwitchName.OPTIMIZER_COMPILE) == "on"
    there = OPTIMIZERS[optimizer]
    if compiled and not COMPILABLE[optimizer]:
        return [f"speed.optimizer_compile: optim.name={optimizer} compiles itself; use speed.optimizer_compile=off"]
    if sharded and optimizer not in SHARDABLE:
        return [
            f"optim.name: {optimizer} needs whole weights, and fsdp and hsdp cut them; use optim=adamw or parallel=ddp"
        ]
    usable = tuple(
        name for name in (COMPILABLE[optimizer] if compiled else there) if not sharded or name in SHARDABLE[optimizer]
    )
    value = resolved[SwitchName.OPTIMIZER]
    if value in usable:
        return []
    if SwitchName.OPTIMIZER not in chosen:
        resolved[SwitchName.OPTIMIZER] = usable[-1] if device == "cuda" else usable[0]
        return []
    if sharded and value in there and value not in SHARDABLE[optimizer]:
        why = f"has no {value} for weights that are cut over ranks (fsdp, hsdp)"
    else:
        compiles = f"with {value} cannot be compiled (speed.optimizer_compile=on)"
        why = f"has no {value}" if value not in there else compiles
    return [f"speed.optimizer: optim.name={optimizer} {why}; use speed.optimizer={' or '.join(usable)}"]
