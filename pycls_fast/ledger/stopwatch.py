"""The wall time of work that several starts share."""

from __future__ import annotations

import json
import time
from pathlib import Path

from pycls_fast.train.output_file import write_json


class Stopwatch:
    """Seconds that were worked, over all starts; kept in a file, so that a kill loses what came after the last lap.

    Args:
        file: where they are kept, the one of earlier starts if it exists.

    Attributes:
        starts: when each of them began, this one last, in seconds since 1970.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        before = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        self._before = float(before.get("seconds", 0.0))
        # Of folders that older versions began no start is known; what they hold is from before this one.
        self.starts: list[float] = [*before.get("starts", []), time.time()]
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Of all starts up to now."""
        return self._before + time.monotonic() - self._started

    def lap(self) -> None:
        """Write them down."""
        write_json(self._file, {"seconds": self.seconds, "starts": self.starts})
