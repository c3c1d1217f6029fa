"""The wall time of work that several starts share."""

from __future__ import annotations

import json
import time
from pathlib import Path

from pycls_fast.ledger.records import write_record


class Stopwatch:
    """Seconds that were worked, over all starts; kept in a file, so that a kill loses what came after the last lap.

    Args:
        file: where they are kept, the one of earlier starts if it exists.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._before = float(json.loads(file.read_text(encoding="utf-8"))["seconds"]) if file.is_file() else 0.0
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Of all starts up to now."""
        return self._before + time.monotonic() - self._started

    def lap(self) -> None:
        """Write them down."""
        write_record(self._file, {"seconds": self.seconds})
