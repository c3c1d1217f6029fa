"""Downloads weights: from timm, torchvision and Hugging Face."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import Tensor

from pycls_fast.errors import UserError, refusing
from pycls_fast.models.pretrained.preprocessing import torchvision_weights
from pycls_fast.models.pretrained.traits import Traits, timm_traits, torchvision_vit_traits

Fetched = TypeVar("Fetched")

_HUBS = ("timm:", "torchvision:")
_REACH_SECONDS = 3.0
_TORCHVISION_HOST = "download.pytorch.org"
HUGGING_FACE = "hf:"
"""What the name of a Hugging Face repository begins with."""


def is_hub(source: str) -> bool:
    """Whether a source is a name of timm or torchvision, which `read_weights` downloads."""
    return source.startswith(_HUBS)


def local_file(source: str) -> Path | None:
    """A file of the name, without its project, in the current folder: timm:NAME is taken from NAME.safetensors."""
    name = source.partition(":")[2]
    files = (Path(f"{name}{suffix}") for suffix in (".safetensors", ".pth", ".npz"))
    return next((file for file in files if is_hub(source) and file.is_file()), None)


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

    The commit's list of files is cached, so that later downloads of it do not ask the hub for that again. A name of
    timm or torchvision stays as it is; without a network and a copy one knows before anything else is built.

    Args:
        source: as for `download`, or a name of timm or torchvision.

    Raises:
        UserError: no such repository or revision, or no network and no copy of the weights.
    """
    if is_hub(source):
        if not _reachable(source):
            from_hub(source)
        return source
    return f"{source.partition('@')[0]}@{_snapshot(source, 'config.json').name}"


def _snapshot(source: str, *files: str) -> Path:
    """The folder of the cache that is named by the commit; it holds those of `files` that the repository has."""
    from huggingface_hub import snapshot_download

    name, _, revision = source.removeprefix(HUGGING_FACE).partition("@")
    return Path(
        _downloaded(source, lambda: snapshot_download(name, revision=revision or None, allow_patterns=list(files)))
    )


def from_hub(source: str) -> tuple[Mapping[str, Tensor], Traits]:
    """The weights of one of timm's models, or one of torchvision's sets (`resnet50.IMAGENET1K_V2`, `resnet50`).

    Raises:
        UserError: no such model or weights, or they could not be downloaded.
    """
    project, _, name = source.partition(":")
    if project == "timm":
        import timm

        if not timm.is_model(name):
            raise UserError(f"weights: timm {timm.__version__} has no model {name}")
        model = _downloaded(source, lambda: timm.create_model(name, pretrained=True))
        return model.state_dict(), timm_traits(model)
    import torchvision

    architecture, weights = torchvision_weights(name)
    # The hash is only checked at the download, so what lies in the cache may be anything.
    state = _downloaded(source, lambda: dict(weights.get_state_dict(check_hash=True, weights_only=True)))
    if not architecture.startswith("vit_"):
        return state, Traits()
    with torch.device("meta"):
        return state, torchvision_vit_traits(torchvision.models.get_model(architecture))


def _reachable(source: str) -> bool:
    """Whether the host that a source is downloaded from is."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or "https" in getproxies():
        return not constants.HF_HUB_OFFLINE
    host = _TORCHVISION_HOST if source.startswith("torchvision:") else urlsplit(constants.ENDPOINT).hostname or ""
    answered = Event()

    def ask() -> None:
        with suppress(OSError):
            socket.create_connection((host, 443), timeout=_REACH_SECONDS).close()
            answered.set()

    # Its timeout is for each of the host's addresses, and finding these has none.
    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_REACH_SECONDS)
    return answered.is_set()


def _downloaded(source: str, fetch: Callable[[], Fetched]) -> Fetched:
    from huggingface_hub import constants

    file = f"{source.partition(':')[2]}.safetensors"
    way_out = f"without a network, put the file into this folder as {file}, or give its path"
    before = constants.HF_HUB_OFFLINE
    # Hubs and their libraries raise dozens of kinds.
    with refusing(f"weights: {source} could not be downloaded", Exception, use=way_out):
        try:
            # Then Hugging Face's library uses only what it has: it would try for a minute.
            constants.HF_HUB_OFFLINE = not _reachable(source)
            return fetch()
        finally:
            # The network may come back.
            constants.HF_HUB_OFFLINE = before
