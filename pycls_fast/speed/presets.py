"""The resolved value of each switch: chosen by hand, or by a preset."""

from __future__ import annotations

import platform
from collections.abc import Mapping

from pycls_fast.errors import UserError
from pycls_fast.optim.choices import Optimizer
from pycls_fast.speed.catalogue import CATALOGUE
from pycls_fast.speed.switch import Device, Switch, SwitchName

# Some process settings exist only in glibc.
HAS_GLIBC = platform.libc_ver()[0] == "glibc"

# How the recipe of Meta's post of 2022 and its code (pycls) differ from the reference: queries, keys and values are one
# product (torch's MultiheadAttention); images are mixed on the device and otherwise prepared by the loader; the host
# reads the loss in every step. Precision, the classifier and FairScale's sharding are set in other groups
# (`configs/speed/meta2022.yaml`).
META2022: Mapping[SwitchName, str] = {
    SwitchName.LAYOUT: "batch_second",
    SwitchName.QKV: "fused",
    SwitchName.OPTIMIZER: "foreach",
    SwitchName.MIX_ON: "device",
}


def preset_value(preset: str, switch: Switch, device: Device, *, in_16_bits: bool = False) -> str:
    """A switch's value in a preset ("reference", "fast" or "meta2022"), with products in 16 bits or not."""
    if preset == "fast":
        if switch.name == SwitchName.ALLOCATOR and not HAS_GLIBC:
            return switch.reference
        return switch.fast_16_bits.get(device, switch.fast[device]) if in_16_bits else switch.fast[device]
    return META2022.get(switch.name, switch.reference) if preset == "meta2022" else switch.reference


def resolve(
    preset: str,
    chosen: Mapping[SwitchName, str],
    device: Device,
    optimizer: Optimizer | None = None,
    *,
    in_16_bits: bool = False,
    sharded: bool = False,
) -> dict[SwitchName, str]:
    """The value of every switch on this device: the one chosen by hand, else the preset's.

    Args:
        preset: "reference", "fast" or "meta2022".
        chosen: the switches set by hand.
        device: the run's device.
        optimizer: the chosen one. The preset takes its fastest implementation on this device.
        in_16_bits: products are in bfloat16 or float16, for which other values may be the fastest.
        sharded: the optimizer's parameters are torch's DTensors.

    Raises:
        UserError: a chosen value cannot run on this device, or the optimizer lacks a chosen implementation.
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
        problems.append(
            "speed.allocator: keep needs glibc, which this system does not have; use speed.allocator=default"
        )
    if optimizer is not None:
        problems += _fit_optimizer(resolved, chosen, device, optimizer, sharded=sharded)
    if problems:
        raise UserError(*problems)
    return resolved


def _fit_optimizer(
    resolved: dict[SwitchName, str],
    chosen: Mapping[SwitchName, str],
    device: Device,
    optimizer: Optimizer,
    *,
    sharded: bool,
) -> list[str]:
    """Replace an implementation that the preset chose and that does not exist; return errors for one chosen by hand.

    The replacement is foreach on a GPU and the loop on a CPU, where foreach is slower (docs/results/optimizers_cpu.md).
    """
    compiled = resolved.get(SwitchName.OPTIMIZER_COMPILE) == "on"
    if compiled and optimizer.compiles_itself:
        return [
            f"speed.optimizer_compile: optim.name={optimizer.name} compiles itself; use speed.optimizer_compile=off"
        ]
    if sharded and not optimizer.shardable:
        return [
            f"optim.name: {optimizer.name} needs whole weights, but fsdp and hsdp shard them; use optim=adamw or "
            "parallel=ddp"
        ]
    there = optimizer.compilable if compiled else optimizer.implementations
    usable = tuple(name for name in there if not sharded or name in optimizer.shardable)
    value = resolved[SwitchName.OPTIMIZER]
    if value in usable:
        return []
    if SwitchName.OPTIMIZER not in chosen:
        resolved[SwitchName.OPTIMIZER] = usable[-1] if device == "cuda" else usable[0]
        return []
    if sharded and value in optimizer.implementations and value not in optimizer.shardable:
        why = f"has no {value} for weights that are sharded over ranks (fsdp, hsdp)"
    else:
        compiles = f"with {value} cannot be compiled (speed.optimizer_compile=on)"
        why = f"has no {value}" if value not in optimizer.implementations else compiles
    return [f"speed.optimizer: optim.name={optimizer.name} {why}; use speed.optimizer={' or '.join(usable)}"]
