"""The rounds of timings that a kill or a stop has cut short, which the next start times again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pycls_fast.train.output_file import write_json


class Rounds:
    """Notes in a file which rounds have begun and not ended.

    The machine's speed drifts between starts, so only timings of the same start are paired: the half of a round that an
    earlier start has timed is worth nothing for a speed-up.

    Args:
        file: holds the numbers of these rounds; removed when there are none.

    Attributes:
        again: whether the present round was cut short before, so that all of it is to be timed again.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._open: set[int] = set(json.loads(file.read_text(encoding="utf-8"))["begun"]) if file.is_file() else set()
        self.again = False

    @contextmanager
    def timing(self, number: int) -> Iterator[None]:
        """Count a round as cut short unless the context ends without an error."""
        self.again = number in self._open
        self._open.add(number)
        self._save()
        yield
        self.again = False
        self._open.remove(number)
        self._save()

    def _save(self) -> None:
        if self._open:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._file, {"begun": sorted(self._open)})
        else:
            self._file.unlink(missing_ok=True)
