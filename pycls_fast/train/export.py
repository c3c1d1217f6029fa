"""Weights out of a checkpoint into one file that other programs read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from pycls_fast.config.command_line import DONE
from pycls_fast.errors import UserError
from pycls_fast.train.display import human
from pycls_fast.train.run_folder import versions
from pycls_fast.train.weights import Weights, find_checkpoint, open_weights


def export(source: str, output: str, *, which: str, dtype: str | None, overwrite: bool) -> int:
    """Write the weights of a checkpoint as a safetensors file and print what is in it.

    In memory are the exported tensors, and one more as it was saved.

    Args:
        source: what `weights=` takes.
        output: the file.
        which: "auto", "model" or "ema".
        dtype: of floating-point tensors; None: as saved.
        overwrite: an existing file may be replaced.

    Raises:
        UserError: a source that cannot be read, or a file that cannot be written.
    """
    path = Path(output).expanduser()
    if path.suffix != ".safetensors":
        raise UserError(f"output: the file is in the safetensors format; call it {path.stem}.safetensors")
    if path.exists() and not overwrite:
        raise UserError(f"output: {path} exists; give another name, or overwrite=true")
    if not path.parent.is_dir():
        raise UserError(f"output: {path.parent} is no folder; make it, or give another")
    weights = open_weights(find_checkpoint(Path(source).expanduser()), kind=which)
    tensors = _read(weights, None if dtype is None else getattr(torch, dtype))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(tensors, temporary, metadata=_about(weights))
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"output: {path} could not be written ({error})") from error
    origin = weights.origin
    count = sum(tensor.numel() for tensor in tensors.values())
    print(f"{origin.path} ({origin.kind} weights, step {origin.step})")
    print(f"{path}: {len(tensors)} tensors, {human(count)} numbers, {human(path.stat().st_size, 'B')}")
    return DONE


def _read(weights: Weights, dtype: torch.dtype | None) -> dict[str, Tensor]:
    tensors = {
        name: torch.empty(spec.shape, dtype=dtype if dtype is not None and spec.dtype.is_floating_point else spec.dtype)
        for name, spec in weights.specs.items()
    }
    weights.fill(tensors)
    return tensors


def _about(weights: Weights) -> dict[str, str]:
    """The file's metadata, whose values are texts: JSON, but for what was a text before."""
    about: dict[str, Any] = {
        "weights": weights.origin.kind,
        "step": weights.origin.step,
        "classes": weights.classes,
        "versions": versions(),
        "format": "pt",
    }
    config = weights.config
    if config is not None:
        about |= {
            "config": _without_paths(config),
            "model": config["model"],
            "preprocessing": {
                "image_size": config["data"]["image_size"],
                "crop_ratio": config["augment"]["eval_crop_ratio"],
                "interpolation": config["augment"]["interpolation"],
                "mean": config["data"]["mean"],
                "std": config["data"]["std"],
            },
        }
    return {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in about.items() if value is not None
    }


def _without_paths(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration for other machines and people."""
    kept = {key: value for key, value in config.items() if key not in ("run_dir", "resume", "weights")}
    return kept | {"data": {key: value for key, value in config["data"].items() if key != "root"}}
