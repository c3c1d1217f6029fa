"""Weights from files: a checkpoint, or the best one of a run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from pycls_fast.errors import UserError
from pycls_fast.train import checkpoint


@dataclass(frozen=True)
class Origin:
    """Where weights came from: the file, "model" or "ema", and the step they were saved at."""

    path: Path
    kind: str
    step: int


def load_weights(network: nn.Module, source: Path, *, classes: tuple[str, ...]) -> Origin:
    """Load a checkpoint's weights into the network, its average (EMA) where it has one.

    Args:
        network: changed in place.
        source: a `step_N.pt` or `best.pt` file, or a run folder, whose best checkpoint is taken (else the newest).
        classes: class names of the data, in the order of the outputs; they have to be those of the checkpoint.

    Raises:
        UserError: no such file, or weights that do not fit the model or the data.
    """
    path = find_checkpoint(source.expanduser())
    state = checkpoint.load(path)
    weights: dict[str, Tensor] = state["ema"] or state["model"]
    own = network.state_dict()
    wrong = [name for name in own.keys() | weights.keys() if _shape(own, name) != _shape(weights, name)]
    if wrong:
        name = min(wrong)
        raise UserError(
            f"weights: {path} does not fit the model: {len(wrong)} tensors differ, the first is {name} with shape "
            f"{_shape(weights, name)} there and {_shape(own, name)} here"
        )
    saved_classes = tuple(state["classes"])
    if saved_classes[: len(classes)] != classes:
        pairs = enumerate(zip(saved_classes, classes, strict=False))
        place, (before, now) = next(
            ((i, pair) for i, pair in pairs if pair[0] != pair[1]), (len(saved_classes), ("", ""))
        )
        raise UserError(
            f"weights: {path} was trained on other classes than data.root has: output {place} was {before or 'none'} "
            f"and is {now or 'one more'}"
        )
    network.load_state_dict(weights)
    return Origin(path, "model" if state["ema"] is None else "ema", state["step"])


def find_checkpoint(path: Path) -> Path:
    """The checkpoint file that a path means: itself, or the best (else the newest) of a run folder.

    Raises:
        UserError: there is none.
    """
    if path.is_file():
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if (folder / "best.pt").is_file():
        return folder / "best.pt"
    newest = next(checkpoint.checkpoints(folder), None) if folder.is_dir() else None
    if newest is None:
        raise UserError(f"weights: {path} is no checkpoint and no run folder with one; give a .pt file or a run folder")
    return newest


def _shape(state: dict[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(state[name].shape) if name in state else None
