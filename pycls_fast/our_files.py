"""How files of our own are recognised: checkpoints by their names, a run's configuration by its sections."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BEST = "best"
"""In the folder of checkpoints, the link to the best one."""
STATE = "state.json"
"""In a checkpoint, everything that is not a tensor."""

_NAME = re.compile(r"step_(\d{9,})$")


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    match = _NAME.match(path.name)
    assert match is not None
    return int(match.group(1))


def checkpoints(folder: Path) -> Iterator[Path]:
    """Published checkpoints, the latest step first."""
    yield from sorted((path for path in folder.glob("step_*") if _NAME.match(path.name)), key=step_of, reverse=True)


def best_first(path: Path) -> Iterator[Path]:
    """Checkpoints of a run folder or of a folder of checkpoints: `best`, which may not exist, then the latest first."""
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    yield folder / BEST
    yield from checkpoints(folder)


def our_config(values: Any) -> dict[str, Any] | None:
    """A run's configuration from the header of a safetensors file; None if another program wrote it under that key.

    Args:
        values: the decoded JSON under the key `config`.
    """
    if not isinstance(values, dict) or not all(isinstance(values.get(key), dict) for key in ("model", "data", "speed")):
        return None
    # Nothing is imported because a file of weights says so.
    return {key: value for key, value in values.items() if key != "imports"}
