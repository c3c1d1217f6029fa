"""Weights from files: a checkpoint, the best one of a run folder, a file or a model of another project."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from pycls_fast.errors import UserError
from pycls_fast.models import foreign
from pycls_fast.train import checkpoint
from pycls_fast.train.pretrained import load_pretrained


@dataclass(frozen=True)
class Origin:
    """Where weights came from: the file or the hub's name, "model" or "ema", the step they were saved at (None: the
    source is mute), and what was done to make them fit."""

    path: Path | str
    kind: str
    step: int | None
    fitted: foreign.Fitted


def load_weights(
    network: nn.Module,
    source: str | Path,
    *,
    classes: tuple[str, ...],
    allow: Sequence[str] = (),
    for_training: bool = True,
) -> Origin:
    """Load weights into the network, the average (EMA) where there is one.

    Args:
        network: changed in place.
        source: a run folder, whose best checkpoint is taken (else the newest), a file of ours or of another project,
            `timm:NAME` or `torchvision:NAME`.
        classes: class names of the data, in the order of the outputs.
        allow: names of tensors that need not fit; see `foreign.fit`.
        for_training: other classes than the source's get a fresh head; else they are an error.

    Raises:
        UserError: no such source, or weights that do not fit the model or the data.
    """
    found = find_weights(source)
    if isinstance(found, Path) and found.suffix == ".pt" and (reason := checkpoint.damage(found)) is not None:
        raise UserError(f"weights: {found} is damaged ({reason})")
    fitted = load_pretrained(network, str(found), classes=classes, allow=allow, for_training=for_training)
    return Origin(found, "ema" if "ema" in fitted.part else "model", fitted.step, fitted)


def find_weights(source: str | Path) -> Path | str:
    """The file that a source means, or the source itself if it is a hub's name.

    Raises:
        UserError: there is none.
    """
    if foreign.is_source(str(source)):
        return str(source) if foreign.is_hub(str(source)) else Path(source).expanduser()
    return find_checkpoint(Path(source).expanduser())


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
        raise UserError(
            f"weights: {path} is no file of weights and no run folder with a checkpoint; give a run folder, a file "
            "(.pt, .safetensors, .pth, .pyth, .npz), timm:NAME or torchvision:NAME"
        )
    return newest
