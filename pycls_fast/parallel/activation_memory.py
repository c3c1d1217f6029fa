"""Activation memory: recompute saved activations, keep them in 8 bits, or offload them to the host."""

from __future__ import annotations

from typing import Literal

from torch import nn

from pycls_fast.network import Units
from pycls_fast.parallel.recompute import RecomputeName, recompute_units
from pycls_fast.parallel.saved_tensors import SavedTensors

OffloadName = Literal["none", "cpu"]
CompressionName = Literal["none", "8bit"]


def save_activation_memory(
    model: nn.Module,
    units: Units,
    *,
    recompute: RecomputeName = "off",
    recompute_every: int = 1,
    activation_offload: OffloadName = "none",
    activation_compression: CompressionName = "none",
) -> None:
    """Apply the three switches to a model in place, after its memory format is set, before compilation and sharding.

    With full recomputation, only the units' inputs are offloaded. Names, types, checkpoints and evaluation are
    unchanged.

    Args:
        model: the whole network.
        units: its repeated blocks in forward order (`model.units()`).
        recompute, recompute_every: see `recompute_units`.
        activation_offload: "cpu" moves saved tensors to the host.
        activation_compression: "8bit" keeps saved tensors in 8 bits per number.

    Raises:
        ValueError: recomputation with compression (every unit would run again from a rounded input: the gradient's
            error was 10% instead of 1% on a small ViT), or selective recomputation with offloading (torch's selective
            checkpointing bypasses saved-tensor hooks).
    """
    in_8_bits, on_host = activation_compression == "8bit", activation_offload == "cpu"
    if recompute != "off" and in_8_bits:
        raise ValueError("units cannot be recomputed from inputs in 8 bits; use one of the two")
    if recompute == "selective" and on_host:
        raise ValueError("recompute=selective bypasses saved-tensor hooks; use recompute=full")
    recompute_units(units, recompute=recompute, every=recompute_every)
    if in_8_bits or on_host:
        model.forward = SavedTensors(model, in_8_bits=in_8_bits, on_host=on_host)
