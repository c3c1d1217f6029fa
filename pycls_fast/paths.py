"""Paths as users type them."""

from __future__ import annotations

import os
from pathlib import Path


def user_path(text: str | Path) -> Path:
    """The path with `~` resolved; where that is nobody's home it is a name like any other, where pathlib's raises."""
    return Path(os.path.expanduser(text))  # noqa: PTH111
