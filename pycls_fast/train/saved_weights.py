"""Saved weights: found, opened without reading their tensors, and written into files that other programs read.

`find_weights` says where they are, `open_weights` what is known of them; in `load_weights.py`, `open_trained` completes
that for weights of other projects, and `load_weights` fits weights of any kind into a network.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import _getdtype, save_file
from torch import Tensor

from pycls_fast.config.keys import PATHS
from pycls_fast.errors import UserError, one_of, refusing
from pycls_fast.files import EXPORTED, PROGRAMS, flush, user_path, weights_at
from pycls_fast.models import pretrained
from pycls_fast.models.export_formats import SUFFIXES, Predict, open_exported
from pycls_fast.optim.owned_weights import local, local_slices
from pycls_fast.parallel.world import ALONE, World
from pycls_fast.reading import SavedWeights, our_config, parse_json
from pycls_fast.train import checkpoint
from pycls_fast.train.checkpoint import Spec
from pycls_fast.train.environment import versions


@dataclass(frozen=True)
class Weights:
    """What a source says of its weights, and a function that fills tensors, or this rank's shards, by name.

    Of a hub's weights, and of files that have to be read whole, only `path` (the file or the hub's name) is known.
    """

    path: Path | str
    kind: str = "model"
    """"model" or "ema"."""
    step: int | None = None
    """At which they were saved."""
    specs: Mapping[str, Spec] = field(default_factory=dict)
    classes: tuple[str, ...] | None = None
    config: Mapping[str, Any] | None = None
    """The configuration of the run that they come from."""
    fill: Callable[[Mapping[str, Tensor]], None] = lambda tensors: None
    train_names: str | None = None
    """Identifies the training images of that run (`Images.names_id`); None if the file does not say."""
    run: Predict | None = None
    """What computes the logits, of a file that holds no tensors but a program."""
    hub: str = ""
    """The name of timm's or torchvision's weights, for which a file may stand."""

    def __str__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        return f"{self.path} ({self.kind} weights{step})"

    def trained_on(self, root: str | None) -> bool:
        """Whether the images of the run that they come from are those of this `data.root`."""
        own = None if self.config is None else self.config["data"].get("root")
        return own is not None and root is not None and user_path(own) == user_path(root)

    def description(self, *, model: str | None = None, for_scoring: bool = True) -> pretrained.Description | None:
        """What their publisher says of them; see `description_of`. A run's say it themselves, whatever their name."""
        if self.config is not None and not self.hub:
            return None
        return pretrained.description_of(self.hub or self.path, model=model, for_scoring=for_scoring)

    def said(self) -> pretrained.Description | None:
        """The same, but None for one that is damaged, which only matters to those who need it."""
        try:
            return self.description(for_scoring=False)
        except UserError:
            return None

    def require_model(self) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        """Their configuration and class names; a `UserError` if the file lacks one of them."""
        if self.config is None or self.classes is None:
            raise UserError(
                f"weights: {self.path} does not say which model and classes it belongs to; give a run folder, a "
                "checkpoint or a file of pycls-fast export, or, to predict or export, timm:NAME or torchvision:NAME of "
                "weights with a head"
            )
        return self.config, self.classes

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
    `hf:ORG/NAME[@REVISION]` is downloaded here. What a path stands for: `weights_at`.
    """
    if str(source).startswith(pretrained.HUGGING_FACE):
        return pretrained.download(str(source))
    beside = pretrained.local_file(str(source))
    if beside is not None:
        return beside
    if pretrained.is_hub(str(source)):
        return str(source)
    path = user_path(source)
    found = weights_at(path)
    if found is None:
        raise UserError(
            f"weights: {path} is neither a weights file nor a run folder with a checkpoint; give a run folder, a "
            "checkpoint (RUN/checkpoints/best), a file (.safetensors, .pt, .pth, .pyth, .npz), timm:NAME, "
            "torchvision:NAME or hf:ORG/NAME"
        )
    return found


def open_weights(source: str | Path, world: World = ALONE, *, kind: str = "auto", programs: bool = False) -> Weights:
    """What a source (see `find_weights`) says of its weights, without reading the tensors; all ranks call this.

    Args:
        kind: "model", "ema" or "auto" (the average if there is one), where the source has several.
        programs: it may be a file of `EXPORTED`, of which `run` is known.

    Raises:
        UserError: there are no such weights, or none of this kind.
    """
    path, hub = find_weights(source), str(source) if pretrained.is_hub(str(source)) else ""
    if isinstance(path, Path) and path.suffix in PROGRAMS:
        if programs and path.suffix in EXPORTED:
            run, texts = open_exported(path)
            opened = _of_header(path, texts, run=run)
            opened.require_model()
            return opened
        what = "only test runs" if path.suffix in EXPORTED else "may run code"
        raise UserError(f"weights: {path} is a program, which {what}; give the weights that it was made of")
    if isinstance(path, str) or path.is_file():
        is_safe = isinstance(path, Path) and path.suffix == ".safetensors"
        opened = replace(_from_safetensors(Path(path), kind) if is_safe else Weights(path), hub=hub)
        if opened.classes is None and (about := opened.said()) is not None and about.label_names:
            opened = replace(opened, classes=about.label_names)
        return opened
    saved = checkpoint.open_checkpoint(path, world).require(SavedWeights)
    kinds = ("ema", "model") if saved.part("ema") else ("model",)
    one_of("which", kind, ("auto", *kinds), more=f" for {path}")
    chosen = kinds[0] if kind == "auto" else kind

    def fill(tensors: Mapping[str, Tensor]) -> None:
        saved.read({f"{chosen}/{name}": tensor for name, tensor in tensors.items()})

    return Weights(
        path,
        chosen,
        saved.plain["step"],
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

    def fill(tensors: Mapping[str, Tensor]) -> None:
        with safe_open(path, "pt") as file:
            for name, tensor in tensors.items():
                part = file.get_slice(name)[local_slices(tensor)] if tensor.ndim else file.get_tensor(name)
                local(tensor).copy_(part)

    weights = _of_header(path, about, specs=specs, fill=fill)
    one_of("which", kind, ("auto", weights.kind), more=f" for {path}")
    return weights


def _of_header(path: Path, texts: Mapping[str, str], **known: Any) -> Weights:
    """What a file's metadata say (`about_weights`); other programs' values under the same keys are ignored."""
    classes, step = (_json_or_none(texts.get(key, "")) for key in ("classes", "step"))
    has_names = isinstance(classes, list) and all(isinstance(name, str) for name in classes)
    return Weights(
        path,
        texts.get("weights", "model"),
        step if type(step) is int else None,
        classes=tuple(classes) if has_names else None,
        config=our_config(texts),
        train_names=texts.get("train_names"),
        **known,
    )


def _json_or_none(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return None


SEVERAL_SPLITS = "several"
"""`Weights.train_names` of weights that are made of others, which were trained on different images."""
NOT_PUBLISHED = (*PATHS, "imports", "resume", "trackers", "callbacks", "distill")
"""Left out of a file of weights, which is for other machines and people, and imports nothing."""


def write_weights(file: Path, weights: Weights, tensors: dict[str, Tensor]) -> None:
    with replacing(file) as temporary:
        save_file(tensors, temporary, metadata=about_weights(weights))


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path inside the context for a file (and others beside it, whose names differ in the suffix) or a folder, which
    is flushed and takes the place of `path` at the end."""
    # Inside an existing folder: its parent may be on another file system or read-only.
    beside = path if path.is_dir() else path.parent
    what = f"output: {path} could not be written"
    with refusing(what, OSError, SafetensorError), TemporaryDirectory(dir=beside, prefix=".export") as temporary:
        made = Path(temporary) / f"made{path.suffix}"
        yield made
        files = written_files(made)
        # safetensors makes files readable by their owner only.
        mask = os.umask(0)
        os.umask(mask)
        for file in files:
            file.chmod(0o666 & ~mask)
            with file.open("rb") as stream:
                flush(stream)
        if made.is_dir():
            # Its other files stay: a model card, `.git`.
            path.mkdir(exist_ok=True)
        for file in files:
            file.replace(path / file.name if made.is_dir() else beside / file.name.replace("made", path.stem, 1))


def written_files(made: Path) -> list[Path]:
    """The files that were written to a path of `replacing`."""
    return list((made if made.is_dir() else made.parent).iterdir())


def check_output(path: Path, kind: str, *, overwrite: bool) -> None:
    """Refuse a path to which a file of this kind (a key of `SUFFIXES`) cannot be written; its folder is made."""
    suffix, problem = SUFFIXES[kind], None
    try:
        if path.suffix != suffix and (suffix or path.suffix in SUFFIXES.values()):
            problem = f"format={kind} writes {f'a file {path.stem}{suffix}' if suffix else f'a folder {path.stem}'}"
        elif path.exists() and not overwrite:
            problem = f"{path} exists (overwrite=true replaces it)"
        elif kind == "openvino" and (bytes_ := path.with_suffix(".bin")).exists() and not overwrite:
            problem = f"{bytes_} exists (overwrite=true replaces it)"
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


def about_weights(weights: Weights) -> dict[str, str]:
    """The file's metadata: strings as they are, all other values as JSON."""
    about: dict[str, Any] = {
        "weights": weights.kind,
        "step": weights.step,
        "classes": weights.classes,
        "train_names": weights.train_names,
        "versions": versions(),
        "format": "pt",
    }
    config = weights.config
    if config is not None:
        kept = {key: value for key, value in config.items() if key not in NOT_PUBLISHED}
        data = {key: value for key, value in config["data"].items() if f"data.{key}" not in NOT_PUBLISHED}
        about |= {"config": kept | {"data": data}, "model": config["model"], "preprocessing": preprocessing(config)}
    return {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in about.items() if value is not None
    }


def preprocessing(config: Mapping[str, Any]) -> dict[str, Any]:
    """The preprocessing of a run's configuration, under the names that files have for it."""
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
