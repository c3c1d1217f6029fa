"""Load weights from a checkpoint, a run folder's best checkpoint, or a file or model of another project."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pycls_fast.errors import UserError
from pycls_fast.files import best_first, user_path, weights_file
from pycls_fast.models import VisionTransformer, pretrained
from pycls_fast.network import Network
from pycls_fast.optim.shards import assign, local, local_slices
from pycls_fast.parallel import ALONE, FlatShards, World
from pycls_fast.reading import SavedWeights
from pycls_fast.train import checkpoint
from pycls_fast.train.checkpoint import Spec
from pycls_fast.train.pretrained import (
    belongs_to,
    check_same_model,
    fit_weights,
    mismatch_lines,
    norm_place,
    other_class,
)

# The standard deviation of a new head's weights.
_SMALL = 0.01


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


@dataclass(frozen=True)
class Loaded(Origin):
    """Where the weights of a network came from, and what was done to make them fit."""

    fitted: pretrained.Fitted
    image_size: int | None
    """The side of the images that they are for, in pixels; None if the source does not say."""


def load_weights(
    network: Network,
    source: str | Path,
    *,
    classes: tuple[str, ...],
    allow: Sequence[str] = (),
    for_training: bool = True,
    new_head: Literal["zero", "small"] = "small",
    world: World = ALONE,
    into: FlatShards | None = None,
) -> Loaded:
    """Load weights into the network, the average (EMA) if there is one; all ranks call this.

    From our checkpoints and safetensors files that fit as they are, each rank reads only its part. Everything else is
    read completely by every rank, and adapted.

    Args:
        network: changed in place; its tensors may be sharded.
        source: a run folder, whose best checkpoint is taken (else the newest), a checkpoint or file of ours, a file of
            another project, `timm:NAME`, `torchvision:NAME` or `hf:ORG/NAME[@REVISION]`.
        classes: class names of the data, in the order of the outputs.
        allow: names of tensors that need not fit; see `pretrained.fit`.
        for_training: if the source's classes differ, the head is newly initialised; otherwise that is an error.
        new_head: how such a head begins.
        world: the ranks.
        into: the flat shards that hold the weights, if they were flattened; `network` then only gives the shapes, and
            may be on the meta device.

    Raises:
        UserError: no such source, or weights that do not fit the model or the data.
    """
    found = find_weights(source)
    # A repository's name says more than the place of its copy on this machine.
    name = str(source if str(source).startswith(pretrained.HUGGING_FACE) else found)
    state = network.state_dict() if into is None else into.state_dict()
    ours = opened(found, world)
    model = {} if ours is None or ours.config is None else ours.config.get("model", {})
    if ours is not None:
        check_same_model(network, model, name, fresh_head=not _has_head(ours, network, classes))
    if ours is not None and _fits_as_it_is(ours, state, classes):
        with torch.no_grad():
            ours.fill(state)
        kind, step = ours.origin.kind, ours.origin.step
        fitted = pretrained.Fitted(name, pretrained.OURS, kind, step, loaded=list(ours.specs))
    else:
        read = _read_whole(ours) if ours is not None and Path(found).is_dir() else pretrained.read_weights(str(found))
        read = replace(read, source=name, norm=norm_place(model) or read.norm)
        try:
            fitted = fit_weights(read, network, classes=classes, allow=allow, for_training=for_training)
        except pretrained.Mismatch as error:
            about = pretrained.described(found, for_scoring=False)
            raise UserError(*belongs_to(model, name), *mismatch_lines(error, network, about, name)) from error
        for name, tensor in fitted.tensors.items():
            assign(state[name], tensor)
        if for_training:
            _begin_head(network, state, fitted, new_head)
    if into is not None:
        # `into.state_dict()` returned copies.
        into.load_state_dict(state)
    return Loaded(found, "ema" if "ema" in fitted.part else "model", fitted.step, fitted, _image_size(found, ours))


def _begin_head(
    network: Network, state: Mapping[str, Tensor], fitted: pretrained.Fitted, how: Literal["zero", "small"]
) -> None:
    """Give a head without values small ones.

    Constructors draw for training from scratch: timm's EfficientNet has a first loss of 5 to 6 for ten classes. Our
    ViTs begin as their recipes say.
    """
    weight, bias = f"{network.head_name}.weight", f"{network.head_name}.bias"
    if weight not in fitted.fresh or (how == "small" and isinstance(network, VisionTransformer)):
        return
    drawn = torch.randn(tuple(state[weight].shape), generator=torch.Generator().manual_seed(0))
    assign(state[weight], drawn * (_SMALL if how == "small" else 0.0))
    if bias in state:
        assign(state[bias], torch.zeros(tuple(state[bias].shape)))


def _image_size(found: Path | str, ours: Weights | None) -> int | None:
    """The side of the images that weights are for, in pixels, if they say it."""
    if ours is not None and ours.config is not None:
        size: int | None = ours.config.get("data", {}).get("image_size")
        return size
    try:
        about = pretrained.described(found, for_scoring=False)
    except UserError:
        # Who asks for the preprocessing gets the error; here it would only have been a note.
        return None
    return None if about is None else about.trained_size


def find_weights(source: str | Path) -> Path | str:
    """The checkpoint or file that a source names, or the source itself if timm or torchvision has to download it.

    A file with the name of timm's or torchvision's weights in the current folder comes first.
    `hf:ORG/NAME[@REVISION]` is downloaded here. A folder is a run folder, a checkpoint or a timm model (`config.json`
    beside `model.safetensors`).

    Raises:
        UserError: there is none.
    """
    if str(source).startswith(pretrained.HUGGING_FACE):
        return pretrained.download(str(source))
    beside = pretrained.local_file(str(source))
    if beside is not None:
        return beside
    return str(source) if pretrained.is_hub(str(source)) else find_checkpoint(user_path(source))


def find_own(source: str | Path) -> Path:
    """The checkpoint or file that a source names, for callers that need the model's configuration from it.

    Unlike `find_weights`, it takes no names of timm or torchvision, whose weights have none.

    Raises:
        UserError: there are none, or they are timm's or torchvision's.
    """
    found = find_weights(source)
    if isinstance(found, str):
        raise UserError(
            f"weights: {source} names weights of another project; give a run folder, a checkpoint or a file"
        )
    return found


def find_checkpoint(path: Path) -> Path:
    """What a path names: a checkpoint, a weights file, or the best (else the newest) checkpoint of a run folder.

    Raises:
        UserError: there is none.
    """
    if path.is_file():
        return weights_file(path)
    if (path / ".metadata").is_file():
        return path.resolve()
    if (path / "config.json").is_file() and (path / "model.safetensors").is_file():
        # A model folder as saved by timm and its hub.
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
    """Open a checkpoint or a safetensors file lazily; None for a hub name or a file type that must be read whole.

    Args:
        found: from `find_weights`.
        world: the ranks, which all call this.

    Raises:
        UserError: see `open_weights`.
    """
    if isinstance(found, str) or (found.is_file() and found.suffix != ".safetensors"):
        return None
    return open_weights(found, world=world)


def _fits_as_it_is(weights: Weights, state: Mapping[str, Tensor], classes: tuple[str, ...]) -> bool:
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    saved = {name: tuple(spec.shape) for name, spec in weights.specs.items()}
    return saved == shapes and other_class(weights.classes, classes) is None


def _has_head(weights: Weights, network: Network, classes: tuple[str, ...]) -> bool:
    """Whether the weights have a head for the data's classes."""
    saved = weights.specs.get(f"{network.head_name}.weight")
    if saved is None or saved.shape[0] != network.last_layer().out_features:
        return False
    return other_class(weights.classes, classes) is None


def _read_whole(weights: Weights) -> pretrained.ReadWeights:
    tensors = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in weights.specs.items()}
    weights.fill(tensors)
    origin = weights.origin
    return pretrained.ReadWeights(
        str(origin.path),
        pretrained.OURS,
        tensors,
        part=origin.kind,
        classes=weights.classes,
        step=origin.step,
        plain=tensors,
    )


def open_weights(path: Path, *, kind: str = "auto", world: World = ALONE) -> Weights:
    """Open what `find_checkpoint` found, without reading its tensors.

    Args:
        path: a checkpoint's folder or a `.safetensors` file.
        kind: "model", "ema", or "auto": the average if there is one.
        world: the ranks, which all call this.

    Raises:
        UserError: a file that cannot be read, or without weights of this kind.
    """
    if path.suffix == ".safetensors":
        return _from_safetensors(path, kind)
    saved = checkpoint.open_checkpoint(path, world).require(SavedWeights)
    chosen = _choose(kind, path, has_ema=bool(saved.part("ema")))

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


def _choose(kind: str, path: Path, *, has_ema: bool) -> str:
    if kind == "ema" and not has_ema:
        raise UserError(f"{path}: has no average (the run had no optim.ema_decay); use the weights of the model")
    return ("ema" if has_ema else "model") if kind == "auto" else kind


def _from_safetensors(path: Path, kind: str) -> Weights:
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # not a dictionary
            kinds = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise UserError(f"weights: {path} cannot be read ({error})") from error
    specs = {name: Spec(shape, _dtype(path, kind)) for name, (shape, kind) in kinds.items()}
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


def _dtype(path: Path, name: str) -> torch.dtype:
    """The torch dtype for a safetensors name: F32, BF16, I64, BOOL, ..."""
    kinds = {"F": "float", "BF": "bfloat", "I": "int", "U": "uint", "BOOL": "bool"}
    letters = name.rstrip("0123456789")
    found = getattr(torch, kinds.get(letters, "") + name.removeprefix(letters), None)
    if not isinstance(found, torch.dtype):
        raise UserError(f"weights: {path} holds tensors of {name}; save them as F32, BF16 or F16")
    return found
