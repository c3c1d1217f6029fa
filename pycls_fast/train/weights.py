"""Weights from files: a checkpoint, the best one of a run folder, an exported file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from pycls_fast.errors import UserError
from pycls_fast.optim import assign, local, local_slices
from pycls_fast.parallel import FlatShards, World
from pycls_fast.train import checkpoint
from pycls_fast.train.checkpoint import ALONE
from pycls_fast.train.checkpoint_tensors import Spec


@dataclass(frozen=True)
class Origin:
    """Where weights came from: the file, "model" or "ema", and the step they were saved at (None: the file is mute)."""

    path: Path
    kind: str
    step: int | None


@dataclass(frozen=True)
class Weights:
    """Weights in a file: what they are, and a function that fills tensors, or this rank's parts of them, by name."""

    origin: Origin
    specs: Mapping[str, Spec]
    classes: tuple[str, ...] | None
    config: Mapping[str, Any] | None
    """Of the run that they are from."""
    fill: Callable[[Mapping[str, Tensor]], None]


def load_weights(
    network: nn.Module | FlatShards, source: Path, *, classes: tuple[str, ...], world: World = ALONE
) -> Origin:
    """Load saved weights into the network, the average (EMA) where there is one; all ranks call this.

    Args:
        network: changed in place; its tensors may be sharded.
        source: see `find_checkpoint`.
        classes: class names of the data, in the order of the outputs; they have to be those of the checkpoint.
        world: the ranks.

    Raises:
        UserError: no such file, or weights that do not fit the model or the data.
    """
    weights = open_weights(find_checkpoint(source.expanduser()), world=world)
    path = weights.origin.path
    state = network.state_dict()
    own = {name: tuple(value.shape) for name, value in state.items()}
    saved = {name: spec.shape for name, spec in weights.specs.items()}
    wrong = [name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name)]
    if wrong:
        name = min(wrong)
        raise UserError(
            f"weights: {path} does not fit the model: {len(wrong)} tensors differ, the first is {name} with shape "
            f"{saved.get(name)} there and {own.get(name)} here"
        )
    if weights.classes is not None and weights.classes[: len(classes)] != classes:
        pairs = enumerate(zip(weights.classes, classes, strict=False))
        place, (before, now) = next(
            ((i, pair) for i, pair in pairs if pair[0] != pair[1]), (len(weights.classes), ("", ""))
        )
        raise UserError(
            f"weights: {path} was trained on other classes than data.root has: output {place} was {before or 'none'} "
            f"and is {now or 'one more'}"
        )
    with torch.no_grad():
        weights.fill(state)
    if isinstance(network, FlatShards):
        # What it gave were copies.
        network.load_state_dict(state)
    return weights.origin


def find_checkpoint(path: Path) -> Path:
    """What a path means: a checkpoint, a file of weights, or the best (else the newest) checkpoint of a run folder.

    Raises:
        UserError: there is none.
    """
    if path.is_file() or (path / ".metadata").is_file():
        return path.resolve()
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    candidates = [
        folder / "best",
        *checkpoint.checkpoints(folder),
        folder / "best.pt",
        *sorted(folder.glob("step_*.pt")),
    ]
    found = next((candidate for candidate in candidates if candidate.exists()), None)
    if found is None:
        raise UserError(
            f"weights: {path} is no checkpoint and no run folder with one; give a run folder, a checkpoint "
            "(RUN/checkpoints/best) or a .safetensors file"
        )
    return found.resolve()


def open_weights(path: Path, *, kind: str = "auto", world: World = ALONE) -> Weights:
    """Look into what `find_checkpoint` found.

    Args:
        path: a checkpoint's folder, a `.safetensors` file, or a `.pt` file of an earlier version.
        kind: "model", "ema", or "auto": the average where there is one.
        world: the ranks, which all call this.

    Raises:
        UserError: a file that cannot be read, or that has no weights of this kind.
    """
    if path.suffix == ".safetensors":
        return _from_safetensors(path, kind)
    if path.is_file():
        return _from_old_file(path, kind)
    opened = checkpoint.open_checkpoint(path, world)
    chosen = _choose(kind, path, has_ema=bool(opened.part("ema")))

    def fill(tensors: Mapping[str, Tensor]) -> None:
        opened.read({f"{chosen}/{name}": tensor for name, tensor in tensors.items()})

    return Weights(
        Origin(path, chosen, opened.plain["step"]),
        opened.part(chosen),
        tuple(opened.plain["classes"]),
        opened.plain["config"],
        fill,
    )


def _choose(kind: str, path: Path, *, has_ema: bool) -> str:
    if kind == "ema" and not has_ema:
        raise UserError(f"{path}: has no average (the run had no optim.ema_decay); use the weights of the model")
    return ("ema" if has_ema else "model") if kind == "auto" else kind


def _from_safetensors(path: Path, kind: str) -> Weights:
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # no dictionary
            specs = {name: Spec(tuple(part.get_shape()), _dtype(part.get_dtype())) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise UserError(f"weights: {path} cannot be read ({error})") from error
    saved = about.get("weights", "model")
    if kind not in ("auto", saved):
        raise UserError(f"{path}: holds the weights of the {saved}, not of the {kind}")

    def fill(tensors: Mapping[str, Tensor]) -> None:
        with safe_open(path, "pt") as file:
            for name, tensor in tensors.items():
                part = file.get_slice(name)[local_slices(tensor)] if tensor.ndim else file.get_tensor(name)
                local(tensor).copy_(part)

    classes = tuple(json.loads(about["classes"])) if "classes" in about else None
    config = json.loads(about["config"]) if "config" in about else None
    step = int(about["step"]) if "step" in about else None
    return Weights(Origin(path, saved, step), specs, classes, config, fill)


def _dtype(name: str) -> torch.dtype:
    """Of the names that safetensors uses: F32, BF16, I64, BOOL, ..."""
    kinds = {"F": "float", "BF": "bfloat", "I": "int", "U": "uint", "BOOL": "bool"}
    letters = name.rstrip("0123456789")
    found: torch.dtype = getattr(torch, kinds[letters] + name.removeprefix(letters))
    return found


def _from_old_file(path: Path, kind: str) -> Weights:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many kinds for a file that is not its own
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path}: not a file of weights that can be read ({first_line})") from error
    if not isinstance(state, dict) or state.get("format") != 1:
        raise UserError(f"{path}: not a checkpoint of pycls_fast")
    chosen = _choose(kind, path, has_ema=state["ema"] is not None)
    saved: Mapping[str, Tensor] = state[chosen]

    def fill(tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            assign(tensor, saved[name])

    specs = {name: Spec(tuple(value.shape), value.dtype) for name, value in saved.items()}
    return Weights(Origin(path, chosen, state["step"]), specs, tuple(state["classes"]), state["config"], fill)
