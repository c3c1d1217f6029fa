"""The one place where a model meets layouts and ranks, in the one order that works."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pycls_fast.parallel.compiled import CompileMode, CompileName, compile_model
from pycls_fast.parallel.world import World


def prepare_model(model: nn.Module, world: World, *, memory_format: str) -> nn.Module:
    """Put the model on the device in the memory format, in place. The optimizer and the average come after this."""
    formats = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
    model.to(world.device)
    return model.to(memory_format=formats[memory_format])


# BatchNorm's statistics stay local during training and are averaged before they are read (World.average_buffers).
# torch 2.13 renamed the flag.
_LOCAL_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers": False
}


def wrap_model(
    model: nn.Module, world: World, *, compiled: CompileName = "off", compile_mode: CompileMode = "default"
) -> nn.Module:
    """The module whose forward pass the training step calls; its parameters are the same objects as the model's."""
    if compiled != "off":
        compile_model(model, model.units(), what=compiled, mode=compile_mode)  # type: ignore[operator]  # every model has
    if world.size == 1:
        return model
    return DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        **_LOCAL_BUFFERS,
        gradient_as_bucket_view=True,
    )
