"""Saved weights: found, opened without reading their tensors, and restored as the network that they belong to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import _getdtype
from torch import Tensor

from pycls_fast import build
from pycls_fast.config import validate_saved
from pycls_fast.config.run import RunConfig
from pycls_fast.data.source import Source
from pycls_fast.errors import UserError, one_of, refusing
from pycls_fast.files import EXPORTED, best_first, user_path, weights_file
from pycls_fast.models import pretrained
from pycls_fast.models.exported import Run, open_exported
from pycls_fast.network import Network
from pycls_fast.optim.choices import Loss
from pycls_fast.optim.weights import local, local_slices
from pycls_fast.parallel.world import ALONE, World
from pycls_fast.parallel.wrap import place_model
from pycls_fast.reading import SavedWeights
from pycls_fast.speed import Speed
from pycls_fast.train import checkpoint
from pycls_fast.train.checkpoint import Spec, differing_shapes

PRECISIONS = ("fp32", "amp_bf16", "amp_fp16", "bf16", "fp16")
"""Levels that need neither process-wide settings nor special hardware."""


@dataclass(frozen=True)
class Origin:
    """Where weights came from: the file or hub name, "model" or "ema", and the step at which they were saved (None if
    the source does not say)."""

    path: Path | str
    kind: str
    step: int | None


@dataclass(frozen=True)
class Weights:
    """Weights in a file: their description, and a function that fills tensors, or this rank's shards, by name."""

    origin: Origin
    specs: Mapping[str, Spec]
    classes: tuple[str, ...] | None
    config: Mapping[str, Any] | None
    """The configuration of the run that they come from."""
    fill: Callable[[Mapping[str, Tensor]], None]
    train_names: str | None = None
    """Identifies the training images of that run (`Images.names_id`); None if the file does not say."""
    run: Run | None = None
    """What computes the logits, of a file that holds no tensors but a program."""

    def read(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """All tensors on the CPU, those with floating point in another format if one is given."""
        tensors = {
            name: torch.empty(spec.shape, dtype=dtype if dtype and spec.dtype.is_floating_point else spec.dtype)
            for name, spec in self.specs.items()
        }
        self.fill(tensors)
        return tensors


def find_weights(source: str | Path) -> Path | str:
    """The checkpoint or file that a source names, or the source itself if timm or torchvision has to download it.

    A file with the name of timm's or torchvision's weights in the current folder comes first.
    `hf:ORG/NAME[@REVISION]` is downloaded here. A folder is a run folder (its best checkpoint, else the newest), a
    checkpoint or a timm model (`config.json` beside `model.safetensors`).
    """
    if str(source).startswith(pretrained.HUGGING_FACE):
        return pretrained.download(str(source))
    beside = pretrained.local_file(str(source))
    if beside is not None:
        return beside
    if pretrained.is_hub(str(source)):
        return str(source)
    path = user_path(source)
    if path.is_file():
        return weights_file(path)
    if (path / ".metadata").is_file():
        return path.resolve()
    if (path / "config.json").is_file() and (path / "model.safetensors").is_file():
        return (path / "model.safetensors").absolute()
    found = next((candidate for candidate in best_first(path) if candidate.exists()), None)
    if found is None:
        raise UserError(
            f"weights: {path} is neither a weights file nor a run folder with a checkpoint; give a run folder, a "
            "checkpoint (RUN/checkpoints/best), a file (.safetensors, .pt, .pth, .pyth, .npz), timm:NAME, "
            "torchvision:NAME or hf:ORG/NAME"
        )
    return found.resolve()


def opened(found: Path | str, world: World = ALONE) -> Weights | None:
    """Open what `find_weights` found lazily; None for a hub name or a file type that must be read whole.

    All ranks call this.
    """
    if isinstance(found, str) or (found.is_file() and found.suffix not in (".safetensors", *EXPORTED)):
        return None
    return open_weights(found, world=world)


def open_weights(path: Path | str, *, kind: str = "auto", world: World = ALONE) -> Weights:
    """Open a checkpoint's folder or a `.safetensors` file, without reading its tensors; all ranks call this.

    Args:
        kind: "model", "ema", or "auto": the average if there is one.

    Raises:
        UserError: a file that cannot be read, or without weights of this kind; weights of another project.
    """
    if isinstance(path, str):
        raise UserError(f"weights: {path} names weights of another project; give a run folder, a checkpoint or a file")
    if path.suffix in EXPORTED:
        raise UserError(f"weights: {path} is a program, which only test runs; give the weights that it was made of")
    if path.suffix == ".safetensors":
        return _from_safetensors(path, kind)
    saved = checkpoint.open_checkpoint(path, world).require(SavedWeights)
    has_ema = bool(saved.part("ema"))
    if kind == "ema" and not has_ema:
        raise UserError(f"{path}: has no average (the run had no optim.ema_decay); use the weights of the model")
    chosen = ("ema" if has_ema else "model") if kind == "auto" else kind

    def fill(tensors: Mapping[str, Tensor]) -> None:
        saved.read({f"{chosen}/{name}": tensor for name, tensor in tensors.items()})

    return Weights(
        Origin(path, chosen, saved.plain["step"]),
        saved.part(chosen),
        tuple(saved.plain["classes"]),
        saved.plain["config"],
        fill,
        saved.plain.get("train_names"),
    )


def _from_safetensors(path: Path, kind: str) -> Weights:
    what = f"weights: {path} cannot be read"
    with refusing(what, SafetensorError, OSError, KeyError), safe_open(path, "pt") as file:
        about = file.metadata() or {}
        names = file.keys()
        slices = {name: file.get_slice(name) for name in names}
        specs = {name: Spec(tuple(p.get_shape()), _getdtype(p.get_dtype())) for name, p in slices.items()}
    saved = about.get("weights", "model")
    if kind not in ("auto", saved):
        raise UserError(f"{path}: holds the weights of the {saved}, not of the {kind}")

    def fill(tensors: Mapping[str, Tensor]) -> None:
        with safe_open(path, "pt") as file:
            for name, tensor in tensors.items():
                part = file.get_slice(name)[local_slices(tensor)] if tensor.ndim else file.get_tensor(name)
                local(tensor).copy_(part)

    own = pretrained.own_metadata(about)
    return Weights(Origin(path, saved, own.step), specs, own.classes, own.config, fill)


def open_program(path: Path) -> Weights:
    """Open an exported file (`EXPORTED`): what it says of the weights that it was made of, and `run`.

    Raises:
        UserError: it cannot be read.
    """
    run, texts = open_exported(path)
    own = pretrained.own_metadata(texts)
    origin = Origin(path, texts.get("weights", "model"), own.step)
    return Weights(origin, {}, own.classes, own.config, fill=lambda tensors: None, run=run)


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
    several: bool = False
    """Images have several labels."""


def restore(
    source: str | Path, *, which: str = "auto", device: str = "auto", precision: str = "fp32", fast: bool = True
) -> Restored:
    """Build the network that saved weights belong to, and load them.

    Args:
        source: a run folder, a checkpoint, or a file of `pycls-fast export`.
        which: "auto" (the average if there is one), "model" or "ema".
        fast: use the fast kernels, else the reference ones.

    Raises:
        UserError: no such weights, weights that do not name their model, or a device that is not available.
    """
    one_of("which", which, ("auto", "model", "ema"))
    one_of("device", device, ("auto", "cpu", "cuda"))
    one_of("precision", precision, PRECISIONS)
    weights = open_weights(find_weights(source), kind=which)
    config = _config(weights, device, precision, "fast" if fast else "reference")
    classes = weights.classes
    assert classes is not None
    with build.world(config) as world:
        switches = build.switches(config, world.device)
        # Do not advance the caller's generator; the initial values are overwritten below.
        with torch.random.fork_rng(devices=[]):
            network = build.model(config, config.model.num_classes or len(classes), switches)
        state = network.state_dict()
        saved = {name: spec.shape for name, spec in weights.specs.items()}
        wrong = differing_shapes(saved, {name: value.shape for name, value in state.items()})
        if wrong is not None:
            raise UserError(f"weights: {weights.origin.path} does not fit its own model: {wrong} in the model")
        with torch.no_grad():
            weights.fill(state)
        network = place_model(network, world, memory_format=switches.memory_format)
        build.apply_precision(config, network, world.device)
    several = bool(weights.config and weights.config["data"].get("label_separator"))
    network = network.eval().requires_grad_(False)
    return Restored(config, network, classes, weights.origin, world, switches, several)


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
    # What only training needs may be of classes that nobody has registered here.
    changes |= {"optim": {"name": "adamw", "lr": 1.0}, "schedule": {}, "distill": {}, "trackers": [], "callbacks": []}
    changes |= {"augment": saved["augment"] | {"policy": None}}
    changes |= {"data": {key: saved["data"][key] for key in Source.model_fields if key in saved["data"]}}
    changes["data"]["source"] = "auto"
    if "imports" not in saved and saved["loss"]["name"] not in Loss.choices():
        # An exported file names no modules.
        changes |= {"loss": {}}
    return validate_saved({**saved, **changes}, str(path))
