"""Paths as users type them, the cache folder, and the user's name."""

from __future__ import annotations

import getpass
import os
import time
from pathlib import Path


def user_path(text: str | Path) -> Path:
    """The path with `~` expanded; unlike pathlib, a `~NAME` without a home folder is kept as an ordinary name."""
    return Path(os.path.expanduser(text))  # noqa: PTH111


def weights_file(path: Path) -> Path:
    """A file of weights under the name whose suffix, and `config.json` in the same folder, describe it.

    A link's target, unless that has no suffix (as in the Hugging Face cache) or the link's own folder has a
    `config.json`.
    """
    target = path.resolve()
    has_own = path.parent.resolve() != target.parent and (path.parent / "config.json").is_file()
    return path.absolute() if path.suffix and (has_own or not target.suffix) else target


def cache_folder() -> Path:
    """The folder for reproducible files: below `XDG_CACHE_HOME`, else `~/.cache`, or `.cache` without a home."""
    general = user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    # Never make a folder called `~` in the working directory: somebody would remove it with `rm -r ~`.
    return (Path(".cache") if general.parts[0] == "~" else general) / "pycls_fast"


def name_user() -> None:
    """Set `LOGNAME` for a user without a name, as in a container that was started with a number (`--user 1000`).

    torch names its cache of compiled code after the user. torch 2.11 looks the name up when torchvision is imported
    and when an optimizer is made, and raises if there is none. The name set here is the fallback of later versions.
    """
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["LOGNAME"] = f"uid_{os.getuid()}"


def timestamp() -> str:
    """The current local time as part of a path: `2026-11-21_15-23-13`."""
    return time.strftime("%Y-%m-%d_%H-%M-%S")
