"""Saved weights: found, and opened without reading their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import _getdtype
from torch import Tensor

from pycls_fast.errors import UserError, refusing
from pycls_fast.files import EXPORTED, best_first, user_path, weights_file
from pycls_fast.models import pretrained
from pycls_fast.models.exported import Run, open_exported
from pycls_fast.optim.weights import local, local_slices
from pycls_fast.parallel.world import ALONE, World
from pycls_fast.reading import SavedWeights
from pycls_fast.train import checkpoint
from pycls_fast.train.checkpoint import Spec


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
    """Open a checkpoint's folder or a `.safetensors` file, without reading its tensors; all ranks call this. A
    `UserError` if it has no weights of this kind ("auto": the average if there is one), or another project's."""
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
    """Open an exported file (`EXPORTED`): what it says of the weights that it was made of, and `run`."""
    run, texts = open_exported(path)
    own = pretrained.own_metadata(texts)
    origin = Origin(path, texts.get("weights", "model"), own.step)
    return Weights(origin, {}, own.classes, own.config, fill=lambda tensors: None, run=run)
