"""Reads files of weights without running code from them."""

from __future__ import annotations

import argparse
import pathlib
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pycls_fast.errors import UserError, first_few, first_line
from pycls_fast.files import our_config
from pycls_fast.models.pretrained.traits import Traits
from pycls_fast.reading import parse_json

# The first bytes of PyTorch's files: archives, and pickles before version 1.6.
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
# Weights hardly shrink; zeros do, a thousandfold.
_MOST_UNPACKED = 200
_NUMPY_SCALARS = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")


@dataclass(frozen=True)
class Contents:
    """A file's tensors under their own names; other fields as in `read.ReadWeights`."""

    tensors: Mapping[str, Tensor]
    part: str = ""
    classes: tuple[str, ...] | None = None
    step: int | None = None
    traits: Traits = field(default_factory=Traits)
    settings: str = ""
    """The run's configuration, as pycls writes it."""


def read_file(path: Path) -> Contents:
    """Read a file of one of the known kinds, which its name's ending tells.

    Raises:
        UserError: it is damaged, not what its name says, holds no weights, or needs code to be read.
    """
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if path.suffix == ".npz":
        return Contents(_read_npz(path))
    return _unwrapped(path, _read_torch(path))


def _read_safetensors(path: Path) -> Contents:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    except (SafetensorError, OSError) as error:
        raise UserError(f"weights: {path} cannot be read ({error})") from error
    own = own_metadata(about)
    return Contents(
        _bare(state),
        part=about.get("weights", ""),
        classes=own.classes,
        step=own.step,
    )


@dataclass(frozen=True)
class OwnMetadata:
    """What `pycls-fast export` writes into a file's header; None for what is missing."""

    classes: tuple[str, ...] | None
    step: int | None
    config: Mapping[str, Any] | None
    """The run's configuration."""


def own_metadata(about: Mapping[str, str]) -> OwnMetadata:
    """Read the header of a safetensors file; other programs may use the same keys for something else, which is ignored.

    Args:
        about: the header's texts by key.
    """
    classes, step, config = (_json_or_none(about.get(key, "")) for key in ("classes", "step", "config"))
    has_names = isinstance(classes, list) and all(isinstance(name, str) for name in classes)
    return OwnMetadata(tuple(classes) if has_names else None, step if type(step) is int else None, our_config(config))


def _json_or_none(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return None


def _read_npz(path: Path) -> dict[str, Tensor]:
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as opened:
            archive: Any = opened
            size = sum(part.file_size for part in archive.zip.infolist())
            if size > _MOST_UNPACKED * path.stat().st_size:
                raise ValueError(f"it would unpack to {size:,} bytes")
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, OSError, EOFError, AttributeError, MemoryError, zipfile.BadZipFile) as error:
        raise UserError(f"weights: {path} is not an archive of plain arrays ({error})") from error
    # numpy sees bfloat16 as two bytes of an unknown type.
    narrow = {name for name, array in arrays.items() if array.dtype.kind == "V" and array.dtype.itemsize == 2}
    tensors = {}
    for name, array in arrays.items():
        if name in narrow:
            tensors[name] = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).float()
        elif array.dtype.kind in "fiu":
            tensors[name] = torch.from_numpy(array)
    return tensors


def _read_torch(path: Path) -> Any:
    # What training scripts save beside the weights: parsed arguments, paths, numpy numbers. All are plain data.
    import numpy as np

    harmless: list[Any] = [argparse.Namespace, pathlib.PosixPath, pathlib.PurePosixPath, np.dtype, np.ndarray]
    harmless += [type(np.dtype(kind)) for kind in ("float64", "float32", "int64", "int32", "bool")]
    harmless += [(np._core.multiarray.scalar, name) for name in _NUMPY_SCALARS]  # type: ignore[attr-defined]
    try:
        with path.open("rb") as file:
            start = file.read(len(_ZIP))
        if not start.startswith((_ZIP, _PICKLE)):
            raise UserError(f"weights: {path} is not a PyTorch file; give a file of weights (.safetensors, .npz, .pth)")
        with torch.serialization.safe_globals(harmless):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "GLOBAL" in line or "nsupported" in line), "")
        raise UserError(
            f"weights: {path} holds more than tensors and plain values, and is not read because that could run its "
            f"code ({reason.strip() or 'damaged'})"
        ) from error
    except UserError:
        raise
    except Exception as error:  # torch raises many kinds for a file that is not its own
        raise UserError(f"weights: {path} cannot be read as a PyTorch file ({first_line(error)})") from error


def _unwrapped(path: Path, loaded: Any) -> Contents:
    """The one set of weights to use from what a training script saved."""
    if not isinstance(loaded, Mapping):
        raise UserError(f"weights: {path} holds a {type(loaded).__name__}, not weights by name")
    part = _choose_part(loaded)
    state = loaded[part] if part else loaded
    tensors = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
    odd = [name for name, t in tensors.items() if t.layout != torch.strided or t.is_quantized or t.device.type != "cpu"]
    if odd:
        raise UserError(f"weights: {path}: {first_few(odd)}: sparse, quantized or without values; save dense tensors")
    if not tensors:
        raise UserError(f"weights: {path} holds no weights; its entries are {', '.join(map(str, list(loaded)[:8]))}")
    settings = loaded.get("cfg")
    return Contents(_bare(tensors), part=part, settings=settings if isinstance(settings, str) else "")


def _bare(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove the (possibly nested) prefixes of torch's wrappers from the names, and the wrappers' own counter."""
    found = {name: tensor for name, tensor in tensors.items() if name != "n_averaged"}
    while prefix := next((p for p in ("module.", "_orig_mod.") if found and all(n.startswith(p) for n in found)), ""):
        found = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    return found


def _choose_part(loaded: Mapping[str, Any]) -> str:
    if "model_state" in loaded:
        # pycls: the better of the weights and their average, by the errors it has measured.
        errors = {key: loaded.get(f"{key}_err", 100.0) for key in ("test", "ema")}
        return "ema_state" if "ema_state" in loaded and errors["ema"] < errors["test"] else "model_state"
    # The average if there is one, like timm's loader.
    keys = ("state_dict_ema", "model_ema", "ema", "state_dict", "model")
    return next((key for key in keys if isinstance(loaded.get(key), Mapping) and loaded[key]), "")
