"""Rebuild a network for inference from saved weights and their metadata: no dataset, no configuration file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pycls_fast import build
from pycls_fast.config import validate_saved
from pycls_fast.config.run import RunConfig
from pycls_fast.data.source import Source
from pycls_fast.errors import UserError, one_of
from pycls_fast.network import Network
from pycls_fast.optim.choices import Loss
from pycls_fast.parallel import World, place_model
from pycls_fast.speed import Speed
from pycls_fast.train.state import differing_shapes
from pycls_fast.train.weights import Origin, Weights, find_own, open_weights

PRECISIONS = ("fp32", "amp_bf16", "amp_fp16", "bf16", "fp16")
"""Levels that need neither process-wide settings nor special hardware."""


@dataclass(frozen=True)
class Restored:
    """A network in evaluation mode on its device, and what it was trained with.

    Attributes:
        config: the run's, but with the requested device, precision and switches.
        classes: names of the outputs, in order.
        world: this process only, on the device.
    """

    config: RunConfig
    network: Network
    classes: tuple[str, ...]
    origin: Origin
    world: World
    switches: Speed


def restore(
    source: str | Path, *, which: str = "auto", device: str = "auto", precision: str = "fp32", fast: bool = True
) -> Restored:
    """Build the network that saved weights belong to, and load them.

    Args:
        source: a run folder, a checkpoint, or a file of `pycls-fast export`.
        which: "auto" (the average if there is one), "model" or "ema".
        device: "auto", "cpu" or "cuda".
        precision: one of `PRECISIONS`.
        fast: use the fast kernels, else the reference ones.

    Raises:
        UserError: no such weights, weights that do not name their model, or a device that is not available.
    """
    one_of("which", which, ("auto", "model", "ema"))
    one_of("device", device, ("auto", "cpu", "cuda"))
    one_of("precision", precision, PRECISIONS)
    weights = open_weights(find_own(source), kind=which)
    config = _config(weights, device, precision, "fast" if fast else "reference")
    classes = weights.classes
    assert classes is not None
    with build.world(config) as world:
        switches = build.switches(config, world.device)
        # Do not advance the caller's generator; the initial values are overwritten below.
        with torch.random.fork_rng(devices=[]):
            network = build.model(config, config.model.num_classes or len(classes), switches)
        _fill(network, weights)
        network = place_model(network, world, memory_format=switches.memory_format)
        build.apply_precision(config, network, world.device)
    return Restored(config, network.eval().requires_grad_(False), classes, weights.origin, world, switches)


def _config(weights: Weights, device: str, precision: str, preset: str) -> RunConfig:
    path = weights.origin.path
    if weights.config is None or weights.classes is None:
        raise UserError(
            f"weights: {path} does not say which model and classes it belongs to; give a run folder, a checkpoint, or "
            "a file that pycls-fast export has written"
        )
    saved = weights.config
    # Decode as the run did: the pixels of different libraries differ a little.
    decode = saved["speed"].get("decode") or (None if saved["speed"]["preset"] == "fast" else "pillow")
    if decode is not None and not build.has_decoder(decode):
        decode = None
    changes: dict[str, Any] = {
        "run_dir": None,
        "weights": None,
        "precision": {"name": precision},
        "parallel": {"name": "single"},
        # Maps and features need whole batches without padding.
        "speed": {"preset": preset, "decode": decode, "normalize_on": "device", "sequence_padding": "none",
                  "erase_on": "device", "mix_on": "device", "compile": "off", "cuda_graphs": "off"},
        "runtime": {"device": device},
    }  # fmt: skip
    if "imports" not in saved:
        # An exported file names no modules: what only training needs may be of classes that nobody has registered here.
        changes |= {"optim": {"name": "adamw", "lr": 1.0}, "schedule": {}}
        changes |= {"augment": saved["augment"] | {"policy": None}}
        changes |= {"data": {key: saved["data"][key] for key in Source.model_fields if key in saved["data"]}}
        changes["data"]["source"] = "auto"
        if saved["loss"]["name"] not in Loss.choices():
            changes |= {"loss": {}}
    return validate_saved({**saved, **changes}, str(path))


def _fill(network: nn.Module, weights: Weights) -> None:
    state = network.state_dict()
    saved = {name: spec.shape for name, spec in weights.specs.items()}
    wrong = differing_shapes(saved, {name: value.shape for name, value in state.items()})
    if wrong is not None:
        raise UserError(f"weights: {weights.origin.path} does not fit the model that it names: {wrong} in the model")
    with torch.no_grad():
        weights.fill(state)
