"""Reads files of weights without running code from them, and recognises their layout."""

from __future__ import annotations

import argparse
import json
import pathlib
import pickle
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from pycls_fast.errors import UserError, first_line
from pycls_fast.models.foreign import jax, pycls, timm, torchvision
from pycls_fast.models.foreign.preprocessing import torchvision_weights
from pycls_fast.models.foreign.traits import Traits, traits_from_timm, traits_from_torchvision_vit
from pycls_fast.models.resnet import ShortcutKind
from pycls_fast.our_files import our_config
from pycls_fast.paths import user_path

NormPlace = Literal["every_token", "after_pool"]
Fetched = TypeVar("Fetched")

_HUBS = ("timm:", "torchvision:")
HUGGING_FACE = "hf:"
"""What the name of a Hugging Face repository begins with."""


@dataclass(frozen=True)
class Contents:
    """A file's tensors under their own names; other fields as in `ReadWeights`."""

    tensors: Mapping[str, Tensor]
    part: str = ""
    classes: tuple[str, ...] | None = None
    step: int | None = None
    traits: Traits = field(default_factory=Traits)
    settings: str = ""
    """The run's configuration, as pycls writes it."""


@dataclass(frozen=True)
class ReadWeights:
    """The weights that a source holds.

    Attributes:
        source: as it was named.
        layout: whose naming scheme the file has, such as "timm vision transformer".
        tensors: in our names if the layout is known, else in the file's.
        unknown: tensors of the file that have no name in ours, and their shapes.
        unused: the same for parts that are known and never belong to a classifier, such as MAE's decoder.
        norm: what a vision transformer's final norm was trained on; None if the file does not say.
        shortcut: how a ResNet's shortcuts downsample; None if the file does not say.
        bgr: the first layer takes the channels as blue, green, red.
        traits: settings that the source gives and no tensor shows.
        part: which of several sets of weights in the file was used, such as "ema_state"; empty if there is only one.
        classes: names of the outputs, if the file has them.
        step: the step at which one of our runs saved it, if the file says so.
        plain: the file's own tensors under their own names.
    """

    source: str
    layout: str
    tensors: Mapping[str, Tensor]
    unknown: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    unused: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    norm: NormPlace | None = None
    shortcut: ShortcutKind | None = None
    bgr: bool = False
    traits: Traits = field(default_factory=Traits)
    part: str = ""
    classes: tuple[str, ...] | None = None
    step: int | None = None
    plain: Mapping[str, Tensor] = field(default_factory=dict)


def is_hub(source: str) -> bool:
    """Whether a source is a name of timm or torchvision, which `read_weights` downloads."""
    return source.startswith(_HUBS)


def read_weights(source: str) -> ReadWeights:
    """Weights in our names, from a file or a hub.

    Args:
        source: `timm:NAME` or `torchvision:NAME` (`resnet50.IMAGENET1K_V2`, or without the part after the dot for the
            default weights), which are downloaded once; or a file: `.safetensors`, `.npz` (Google's ViT), `.pth`,
            `.pyth`, `.pt`, `.bin` (torch's).

    Raises:
        UserError: no such file or name, or a file that is damaged, not what its name says, or needs code to be read.
    """
    if source.startswith("timm:"):
        contents = _from_timm_hub(source.removeprefix("timm:"))
    elif source.startswith("torchvision:"):
        contents = _from_torchvision_hub(source.removeprefix("torchvision:"))
    else:
        path = user_path(source)
        if not path.is_file():
            raise UserError(
                f"weights: {source} is not a file; give a file, a run folder, timm:NAME, torchvision:NAME or "
                "hf:ORG/NAME"
            )
        contents = read_file(path)
    return _in_our_names(source, contents)


def download(source: str) -> Path:
    """The `model.safetensors` of a Hugging Face repository, in its cache, beside the `config.json` if there is one.

    Args:
        source: `hf:ORG/NAME` or `hf:ORG/NAME@REVISION`: a branch (the main one if none is given), a tag or a commit.

    Raises:
        UserError: it could not be downloaded, or the repository has no such file.
    """
    file = _snapshot(source, "model.safetensors", "config.json") / "model.safetensors"
    if not file.is_file():
        raise UserError(f"weights: {source} has no model.safetensors; download another of its files and give its path")
    return file


def pinned(source: str) -> str:
    """`hf:ORG/NAME@COMMIT` for the commit that the revision stands for now, or stood for when it was last downloaded.

    The commit's list of files is cached, so that later downloads of it do not ask the hub for that again.

    Args:
        source: as for `download`.

    Raises:
        UserError: no such repository or revision.
    """
    return f"{source.partition('@')[0]}@{_snapshot(source, 'config.json').name}"


def _snapshot(source: str, *files: str) -> Path:
    """The folder of the cache that is named by the commit; it holds those of `files` that the repository has."""
    from huggingface_hub import snapshot_download

    name, _, revision = source.removeprefix(HUGGING_FACE).partition("@")
    return Path(
        _downloaded(source, lambda: snapshot_download(name, revision=revision or None, allow_patterns=list(files)))
    )


def read_file(path: Path) -> Contents:
    """Read a file of one of the known kinds."""
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
    """What `tools/export_net.py` writes into a file's header; None for what is missing."""

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
        return json.loads(text)
    except ValueError:
        return None


def _read_npz(path: Path) -> dict[str, Tensor]:
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
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


# The first bytes of PyTorch's files: archives, and pickles before version 1.6.
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_NUMPY_SCALARS = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")


def _unwrapped(path: Path, loaded: Any) -> Contents:
    """The one set of weights to use from what a training script saved."""
    if not isinstance(loaded, Mapping):
        raise UserError(f"weights: {path} holds a {type(loaded).__name__}, not weights by name")
    part = _choose_part(loaded)
    state = loaded[part] if part else loaded
    tensors = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
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


def _from_timm_hub(name: str) -> Contents:
    import timm as library

    if not library.is_model(name):
        raise UserError(f"weights: timm {library.__version__} has no model {name}")
    model = _downloaded(f"timm:{name}", lambda: library.create_model(name, pretrained=True))
    return Contents(model.state_dict(), traits=traits_from_timm(model))


def _from_torchvision_hub(name: str) -> Contents:
    import torchvision as library

    model, weights = torchvision_weights(name)
    # The hash is only checked at the download, so what lies in the cache may be anything.
    state = _downloaded(f"torchvision:{name}", lambda: dict(weights.get_state_dict(check_hash=True, weights_only=True)))
    if not model.startswith("vit_"):
        return Contents(state)
    with torch.device("meta"):
        return Contents(state, traits=traits_from_torchvision_vit(library.models.get_model(model)))


def _downloaded(source: str, fetch: Callable[[], Fetched]) -> Fetched:
    try:
        return fetch()
    except Exception as error:  # hubs and their libraries raise dozens of kinds
        raise UserError(
            f"weights: {source} could not be downloaded ({first_line(error)}); without a network, download the file "
            "elsewhere and give its path"
        ) from error


def _in_our_names(source: str, contents: Contents) -> ReadWeights:
    state = contents.tensors
    layout, tensors, unknown = detect_layout(state)
    unused = [name for name in unknown if name == "mask_token" or name.startswith("decoder_")]
    norm: NormPlace | None = None
    if layout in (timm.VIT, torchvision.VIT, pycls.VIT, _JAX) and "norm.weight" in tensors:
        norm = "after_pool" if "fc_norm.weight" in state else "every_token"
    shortcut: ShortcutKind | None = None
    if layout in (torchvision.RESNET, pycls.RESNET):
        shortcut = torchvision.resnet_shortcut(state)
    traits = contents.traits
    if layout == _JAX:
        traits = Traits(heads=jax.heads(state), norm_eps=jax.NORM_EPS)
    elif pycls.is_pycls(state):
        traits = pycls.traits(contents.settings)
    if layout in (_JAX, pycls.VIT) and "class_token.value" in tensors:
        # Both have a class token only if the head reads it.
        traits = replace(traits, classifier="token")
    return ReadWeights(
        source=source,
        layout=layout,
        tensors=tensors,
        unknown={name: tuple(state[name].shape) if name in state else () for name in unknown if name not in unused},
        unused={name: tuple(state[name].shape) for name in unused},
        norm=norm,
        shortcut=shortcut,
        bgr=pycls.is_pycls(state) and pycls.takes_bgr(contents.settings),
        traits=traits,
        part=contents.part,
        classes=contents.classes,
        step=contents.step,
        plain=state,
    )


_JAX = "Google's vision transformer"
OURS = "pycls_fast"
TRANSFORMERS = "transformers"
OTHER = "unknown"


def detect_layout(state: Mapping[str, Tensor]) -> tuple[str, dict[str, Tensor], list[str]]:
    """The layout, the tensors in our names, and the names without one of ours (all of them for an unknown layout)."""
    pycls_resnet = "s1.b1.f.a.weight" in state and "s1.b1.f.se.f_ex.0.weight" not in state
    readers: tuple[tuple[bool, str, Callable[[Mapping[str, Tensor]], tuple[dict[str, Tensor], list[str]]]], ...] = (
        (jax.is_jax_vit(state), _JAX, jax.read_jax_vit),
        ("encoder.block_0.ln_1.weight" in state, pycls.VIT, pycls.read_pycls_vit),
        (pycls_resnet, pycls.RESNET, pycls.read_pycls_resnet),
        ("conv_proj.weight" in state, torchvision.VIT, torchvision.read_torchvision_vit),
        # Swin's patches have the same names, but not its blocks.
        ({"patch_embed.proj.weight", "blocks.0.norm1.weight"} <= state.keys(), timm.VIT, timm.read_timm_vit),
        ("bn1.weight" in state and "layer1.0.conv1.weight" in state, torchvision.RESNET, torchvision.read_resnet),
    )
    for is_it, layout, read in readers:
        if is_it:
            tensors, unknown = read(state)
            return layout, tensors, unknown
    # Other projects' names begin with `stem.`, `blocks.` and `stages.`, too.
    own_block = "stages.0.0.conv1.weight" in state or any(name.startswith("blocks.0.attention.") for name in state)
    if own_block or any(name.startswith("network.") for name in state):
        return OURS, dict(state), []
    parts = {part for name in state for part in name.split(".")}
    if "embeddings" in parts and parts & {"encoder", "layer"}:
        return TRANSFORMERS, {}, list(state)
    return OTHER, {}, list(state)
