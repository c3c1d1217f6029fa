"""How far trainings are while they run, from their `metrics.jsonl`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

_EVERY_SECONDS = 60.0
# Holds a hundred records or more; the whole file of a long run may have megabytes.
_TAIL_BYTES = 1 << 16


class TrainingWatch:
    """Says about every minute where the running trainings are.

    Args:
        say: called with a line for each of them.
    """

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._due = time.monotonic() + _EVERY_SECONDS

    def look(self, running: Iterable[tuple[str, Path]]) -> None:
        """Say it if a minute has passed.

        Args:
            running: for each training its name and the file of its metrics.
        """
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + _EVERY_SECONDS
        for name, metrics in running:
            self._say(f"{name}: {reached(metrics)}")


def reached(metrics: Path) -> str:
    """The newest step in a run's metrics, with its epoch and loss; a line that a kill has cut off is skipped."""
    for line in reversed(_last_lines(metrics)):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record["kind"] == "train":
            loss = "not finite" if record["loss"] is None else f"{record['loss']:.4f}"
            return f"epoch {record['epoch']:.2f}, step {record['step']}, loss {loss}"
    return "no step logged yet"


def _last_lines(file: Path) -> list[bytes]:
    """The complete lines among the last bytes of a file; none if there is no file."""
    if not file.is_file():
        return []
    with file.open("rb") as stream:
        start = max(stream.seek(0, os.SEEK_END) - _TAIL_BYTES, 0)
        stream.seek(start)
        lines = stream.read().split(b"\n")
    return lines[1 if start else 0 : -1]
