"""Reads weights from files and hubs (timm, torchvision, Hugging Face), without running code from them.

What is not there, cannot be downloaded or cannot be read is a `UserError`.
"""

from __future__ import annotations

import argparse
import pathlib
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from safetensors.torch import load_file
from torch import Tensor

from pycls_fast.errors import UserError, first_few, first_line, refusing
from pycls_fast.files import user_path, weights_at
from pycls_fast.models.pretrained.names import (
    JAX_VIT,
    OTHER,
    PYCLS_VIT,
    RESNETS,
    VITS,
    jax_heads,
    read_names,
    resnet_shortcut,
)
from pycls_fast.models.pretrained.traits import (
    Description,
    Traits,
    description_of,
    pycls_traits,
    timm_traits,
    timm_weights,
    torchvision_weights,
)
from pycls_fast.reading import check_unpacked, open_file, read_npz

Fetched = TypeVar("Fetched")

_HUBS = ("timm:", "torchvision:")
_REACH_SECONDS = 3.0
_TORCHVISION = "https://download.pytorch.org"
HUGGING_FACE = "hf:"
"""What the name of a Hugging Face repository begins with."""


def is_hub(source: str) -> bool:
    return source.startswith(_HUBS)


def local_file(source: str) -> Path | None:
    """A file in the current folder that is named like the weights: for timm:NAME, NAME.safetensors."""
    name = source.partition(":")[2]
    files = (Path(f"{name}{suffix}") for suffix in (".safetensors", ".pth", ".npz"))
    return next((file for file in files if is_hub(source) and file.is_file()), None)


def download(source: str) -> Path:
    """The `model.safetensors` of a Hugging Face repository, in its cache, beside the `config.json` if there is one.

    Args:
        source: `hf:ORG/NAME` or `hf:ORG/NAME@REVISION`: a branch (the main one if none is given), a tag or a commit.
    """
    file = _snapshot(source, "model.safetensors", "config.json") / "model.safetensors"
    if not file.is_file():
        raise UserError(f"weights: {source} has no model.safetensors; download another of its files and give its path")
    return file


def pinned(source: str) -> str:
    """`hf:ORG/NAME@COMMIT` for the commit that the revision stands for now, or stood for when it was last downloaded.

    The commit's list of files is cached, so later downloads of it do not ask the hub again. A name of timm or
    torchvision stays as it is; if it can neither be downloaded nor found here, that is reported before anything is
    built.
    """
    if is_hub(source):
        if not _reachable(source):
            _from_hub(source)
        return source
    return f"{source.partition('@')[0]}@{_snapshot(source, 'config.json').name}"


def described(source: str) -> Description | None:
    """What the `config.json` of a Hugging Face repository, which alone is downloaded, or beside a file says, or the
    file's name; see `description_of`."""
    if source.startswith(HUGGING_FACE):
        return description_of(_snapshot(source, "config.json") / "model.safetensors", for_scoring=False)
    path = weights_at(user_path(source))
    return None if path is None else description_of(path, for_scoring=False)


def _snapshot(source: str, *files: str) -> Path:
    """The folder of the cache for the commit; it holds those of `files` that the repository has."""
    from huggingface_hub import snapshot_download

    name, _, revision = source.removeprefix(HUGGING_FACE).partition("@")
    return Path(
        _downloaded(source, lambda: snapshot_download(name, revision=revision or None, allow_patterns=list(files)))
    )


def _from_hub(source: str) -> tuple[Mapping[str, Tensor], Traits]:
    """The weights of one of timm's models, or one of torchvision's sets (`resnet50.IMAGENET1K_V2`, `resnet50`)."""
    project, _, name = source.partition(":")
    if project == "timm":
        import timm

        timm_weights(name)
        model = _downloaded(source, lambda: timm.create_model(name, pretrained=True))
        return model.state_dict(), timm_traits(name.partition(".")[0], model)
    import torchvision

    architecture, weights = torchvision_weights(name)
    # The hash is only checked at the download, so a file in the cache may be anything.
    state = _downloaded(source, lambda: dict(weights.get_state_dict(check_hash=True, weights_only=True)))
    if not architecture.startswith("vit_"):
        return state, Traits()
    with torch.device("meta"):
        block = torchvision.models.get_model(architecture).encoder.layers[0]
    return state, Traits(heads=block.num_heads, norm_eps=block.ln_1.eps, classifier="token")


def _reachable(source: str) -> bool:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or "https" in getproxies():
        return not constants.HF_HUB_OFFLINE
    # A mirror (HF_ENDPOINT) may have a port of its own.
    address = urlsplit(_TORCHVISION if source.startswith("torchvision:") else constants.ENDPOINT)
    host, port = address.hostname or "", address.port or (80 if address.scheme == "http" else 443)
    answered = Event()

    def ask() -> None:
        with suppress(OSError):
            socket.create_connection((host, port), timeout=_REACH_SECONDS).close()
            answered.set()

    # In a thread: the timeout holds for each of the host's addresses, and there is none for looking them up.
    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_REACH_SECONDS)
    return answered.is_set()


def _downloaded(source: str, fetch: Callable[[], Fetched]) -> Fetched:
    from huggingface_hub import constants

    way_out = (
        f"without a network, put the file into this folder as {source.partition(':')[2]}.safetensors, or give its path"
    )
    if source.startswith(HUGGING_FACE):
        way_out = "without a network, put its model.safetensors and config.json into a folder, and give that"
    before = constants.HF_HUB_OFFLINE
    # Hubs and their libraries raise dozens of kinds of errors.
    with refusing(f"weights: {source} could not be downloaded", Exception, use=way_out):
        try:
            # Offline, Hugging Face's library uses only its cache; otherwise it would try to connect for a minute.
            constants.HF_HUB_OFFLINE = not _reachable(source)
            return fetch()
        finally:
            # The network may come back.
            constants.HF_HUB_OFFLINE = before


_NUMPY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")


@dataclass(frozen=True)
class ReadWeights:
    """The weights that a source holds.

    Attributes:
        source: as it was named.
        layout: the naming scheme of the file, such as "timm vision transformer".
        tensors: in our names if the layout is known; empty otherwise.
        unknown: the file's names of tensors for which we have no name.
        traits: settings that the source gives and the tensors do not show.
        part: which of several sets of weights in the file was used, such as "ema_state"; empty if there is only one.
        plain: the file's tensors under the file's names.
    """

    source: str
    layout: str = OTHER
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    traits: Traits = field(default_factory=Traits)
    part: str = ""
    plain: Mapping[str, Tensor] = field(default_factory=dict)


def read_weights(source: str, about: Description | None = None) -> ReadWeights:
    """Weights in our names, from a file or a hub.

    Args:
        source: `timm:NAME` or `torchvision:NAME` (`resnet50.IMAGENET1K_V2`, or without the part after the dot for the
            default weights), which are downloaded once; or a file: `.safetensors`, `.npz` (Google's ViT), `.pth`,
            `.pyth`, `.pt`, `.bin` (torch's).
        about: what is said of a file.

    Raises:
        UserError: no such file or name, or a file that is damaged, not what its name says, or needs code to be read.
    """
    if is_hub(source):
        part, (state, traits) = "", _from_hub(source)
    else:
        state, part, traits = _from_file(source)
        traits = traits if about is None else about.traits
    layout, tensors, unknown = read_names(state)
    if layout == JAX_VIT:
        # Neither of Google's projects changes flax's epsilon.
        traits = Traits(heads=jax_heads(state), norm_eps=1e-6)
    if layout in VITS and "norm.weight" in tensors:
        traits = replace(traits, classifier_norm="after_pool" if "fc_norm.weight" in state else "before_pool")
    if layout in RESNETS:
        traits = replace(traits, shortcut=resnet_shortcut(state))
    if layout in (JAX_VIT, PYCLS_VIT) and "class_token.value" in tensors:
        # Both have a class token only if the head reads it.
        traits = replace(traits, classifier="token")
    return ReadWeights(source, layout, tensors, tuple(unknown), traits, part, state)


def _from_file(source: str) -> tuple[Mapping[str, Tensor], str, Traits]:
    """The weights, the name of their part of the file, and their traits."""
    path = user_path(source)
    if not path.is_file():
        raise UserError(
            f"weights: {source} is not a file; give a file, a run folder, timm:NAME, torchvision:NAME or hf:ORG/NAME"
        )
    try:
        if path.suffix == ".safetensors":
            return _bare(load_file(path)), "", Traits()
        if path.suffix == ".npz":
            return _read_npz(path), "", Traits()
        return _one_set(_read_torch(path))
    except Exception as error:  # libraries raise many kinds for a file that is not theirs
        # torch tells what it has not loaded in the middle of its advice.
        reasons = (line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "nsupported" in line)
        raise UserError(
            f"weights: {path} is no file of only tensors and plain values, which alone are read because others could "
            f"run code ({next(reasons, first_line(error))}); give a .safetensors, .npz or .pth of weights"
        ) from error


def _read_npz(path: Path) -> dict[str, Tensor]:
    import numpy as np

    tensors = {}
    for name, array in read_npz(path).items():
        # numpy sees bfloat16 as two bytes of an unknown type.
        if array.dtype.kind == "V" and array.dtype.itemsize == 2:
            tensors[name] = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).float()
        elif array.dtype.kind in "fiu":
            tensors[name] = torch.from_numpy(array)
    return tensors


def _one_set(loaded: Any) -> tuple[dict[str, Tensor], str, Traits]:
    """The one set of weights to use from what a training script saved, its name there, and what else that says."""
    if not isinstance(loaded, Mapping):
        raise TypeError(f"it holds a {type(loaded).__name__}, not weights by name")
    part = _choose_part(loaded)
    entries = loaded[part] if part else loaded
    tensors = {str(name): value for name, value in entries.items() if isinstance(value, Tensor)}
    odd = [name for name, t in tensors.items() if t.layout != torch.strided or t.is_quantized or t.device.type != "cpu"]
    if odd or not tensors:
        what = f"{first_few(odd)}: sparse, quantized or without values" if odd else first_few(list(map(str, loaded)), 8)
        raise ValueError(f"it holds no dense weights by name, but {what}")
    state, traits = _bare(tensors), Traits()
    if "encoder.block_0.ln_1.weight" in state or "s1.b1.f.a.weight" in state:
        traits = pycls_traits(str(loaded.get("cfg", "")))
    return state, part, traits


def _read_torch(path: Path) -> Any:
    # What training scripts save beside the weights: parsed arguments, paths, numpy's numbers and arrays, such as the
    # state of its generator. All are plain data.
    import numpy as np

    harmless: list[Any] = [argparse.Namespace, pathlib.PosixPath, pathlib.PurePosixPath, np.dtype, np.ndarray]
    harmless += [type(np.dtype(kind)) for kind in ("float64", "float32", "int64", "int32", "uint32", "bool")]
    made_by = import_module("numpy._core.multiarray")
    harmless += [(getattr(made_by, f), f"{at}.{f}") for at in _NUMPY_MODULES for f in ("scalar", "_reconstruct")]
    with open_file(path, None) as opened, torch.serialization.safe_globals(harmless):
        check_unpacked(opened)
        opened.seek(0)
        return torch.load(opened, map_location="cpu", weights_only=True)


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
    keys = ("state_dict_ema", "model_ema", "ema", "state_dict", "model", "model_state_dict")
    return next((key for key in keys if isinstance(loaded.get(key), Mapping) and loaded[key]), "")
