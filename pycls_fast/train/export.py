"""Weights in one file that other programs read; how exports get to their place."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from pycls_fast.config.keys import PATHS
from pycls_fast.errors import UserError, refusing
from pycls_fast.files import flush
from pycls_fast.models.export import SUFFIXES
from pycls_fast.train.environment import versions
from pycls_fast.train.weights import Weights

NOT_TOLD = (*PATHS, "imports", "resume", "trackers", "callbacks", "distill")
"""Left out of a file of weights, which is for other machines and people, and imports nothing."""


def write_weights(file: Path, weights: Weights, tensors: dict[str, Tensor]) -> None:
    """Write tensors into one file, with the description of some weights."""
    publish(file, lambda temporary: save_file(tensors, temporary, metadata=about_weights(weights)))


def publish(path: Path, write: Callable[[Path], None]) -> int:
    """Write a file (and others beside it, named as it with another end) or a folder, flush it, and put it into its
    place; returns its size in bytes."""
    # Inside an existing folder: its parent may be on another file system or read-only.
    beside = path if path.is_dir() else path.parent
    what = f"output: {path} could not be written"
    with refusing(what, OSError, SafetensorError), TemporaryDirectory(dir=beside, prefix=".export") as temporary:
        made = Path(temporary) / f"made{path.suffix}"
        write(made)
        files = list((made if made.is_dir() else made.parent).iterdir())
        # safetensors makes files readable by their owner only.
        mask = os.umask(0)
        os.umask(mask)
        for file in files:
            file.chmod(0o666 & ~mask)
            with file.open("rb") as stream:
                flush(stream)
        size = sum(file.stat().st_size for file in files)
        if made.is_dir():
            # Its other files stay: a model card, `.git`.
            path.mkdir(exist_ok=True)
        for file in files:
            file.replace(path / file.name if made.is_dir() else beside / file.name.replace("made", path.stem, 1))
    return size


def checked(path: Path, format: str, dtype: str | None, *, overwrite: bool) -> Path:  # noqa: A002
    """The path, if this format can be written there; its folder is made."""
    if dtype == "int8" and format != "onnx":
        raise UserError("dtype: int8 is for format=onnx")
    if dtype not in (None, "int8") and format in ("onnx", "openvino", "program"):
        raise UserError(f"dtype: format={format} computes in float32; leave it out")
    suffix, problem = SUFFIXES[format], None
    try:
        if path.suffix != suffix and (suffix or path.suffix in SUFFIXES.values()):
            problem = f"format={format} writes {f'a file {path.stem}{suffix}' if suffix else f'a folder {path.stem}'}"
        elif path.exists() and not overwrite:
            problem = f"{path} exists; use overwrite=true"
        elif format == "openvino" and (bytes_ := path.with_suffix(".bin")).exists() and not overwrite:
            problem = f"{bytes_} exists; use overwrite=true"
        elif path.exists() and path.is_dir() == bool(suffix):
            problem = f"{path} is {'a folder' if path.is_dir() else 'a file'}"
        elif path.is_dir() and any(path.iterdir()) and not (path / "model.safetensors").is_file():
            # A typing mistake must not write into a user's folder.
            problem = f"{path} holds something other than a timm model"
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"{path} cannot be written ({error.strerror})"
    if problem is not None:
        raise UserError(f"output: {problem}; give another path")
    return path


def about_weights(weights: Weights) -> dict[str, str]:
    """The file's metadata: strings as they are, all other values as JSON."""
    about: dict[str, Any] = {
        "weights": weights.origin.kind,
        "step": weights.origin.step,
        "classes": weights.classes,
        "versions": versions(),
        "format": "pt",
    }
    config = weights.config
    if config is not None:
        kept = {key: value for key, value in config.items() if key not in NOT_TOLD}
        data = {key: value for key, value in config["data"].items() if f"data.{key}" not in NOT_TOLD}
        about |= {"config": kept | {"data": data}, "model": config["model"], "preprocessing": preprocessing(config)}
    return {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in about.items() if value is not None
    }


def preprocessing(config: Mapping[str, Any]) -> dict[str, Any]:
    """The preprocessing of a run's configuration, under the names of `About`."""
    data, augment = config["data"], config["augment"]
    return {
        "image_size": data["image_size"],
        "mean": data["mean"],
        "std": data["std"],
        "crop_ratio": augment["eval_crop_ratio"],
        "crop": augment["eval_crop"],
        "interpolation": augment["interpolation"],
        "exif_orientation": data["exif_orientation"],
        "transparent": data["transparent"],
    }
