"""Paths as users type them."""

from __future__ import annotations

import os
import time
from pathlib import Path


def user_path(text: str | Path) -> Path:
    """The path with `~` resolved; where that is nobody's home it is a name like any other, where pathlib's raises."""
    return Path(os.path.expanduser(text))  # noqa: PTH111


def timestamp() -> str:
    """This second, in local time, as a part of a path: `2026-11-21_15-23-13`."""
    return time.strftime("%Y-%m-%d_%H-%M-%S")
