"""The wall time of work that spans several starts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from pycls_fast.train.output_file import write_json


class Stopwatch:
    """Seconds worked over all starts, saved in a file at each lap; a kill -9 loses the time since the last one.

    Args:
        file: holds the seconds and the starts; continued if it exists.

    Attributes:
        starts: when each start began, this one last, in seconds since 1970.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        before: dict[str, Any] = {"seconds": 0.0, "starts": []}
        if file.is_file():
            before = json.loads(file.read_text(encoding="utf-8"))
        self._before: float = before["seconds"]
        self.starts: list[float] = [*before["starts"], time.time()]
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds worked in all starts up to now."""
        return self._before + time.monotonic() - self._started

    def lap(self) -> None:
        """Save the seconds and the starts."""
        write_json(self._file, {"seconds": self.seconds, "starts": self.starts})
