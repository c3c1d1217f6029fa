"""Paths as users type them, and what is kept below their home."""

from __future__ import annotations

import getpass
import os
import time
from pathlib import Path


def user_path(text: str | Path) -> Path:
    """The path with `~` resolved; where that is nobody's home it is a name like any other, where pathlib's raises."""
    return Path(os.path.expanduser(text))  # noqa: PTH111


def cache_folder() -> Path:
    """Where what can be made again is kept: below `XDG_CACHE_HOME`, else `~/.cache`, without a home `.cache`."""
    general = user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    # Never a folder called `~` in the working folder, which somebody would remove with `rm -r ~`.
    return (Path(".cache") if general.parts[0] == "~" else general) / "pycls_fast"


def name_user() -> None:
    """Give a user without a name one (`LOGNAME`), as in a container that was started with a number (`--user 1000`).

    torch names its cache of compiled code after the user. 2.11 asks for it when torchvision is imported and when an
    optimizer is made, and raises where there is none, whatever is run. This one is that of later versions.
    """
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["LOGNAME"] = f"uid_{os.getuid()}"


def timestamp() -> str:
    """This second, in local time, as a part of a path: `2026-11-21_15-23-13`."""
    return time.strftime("%Y-%m-%d_%H-%M-%S")
