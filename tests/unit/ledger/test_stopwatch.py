"""The wall time of work that several starts share."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from pycls_fast.ledger import stopwatch
from pycls_fast.ledger.folder import LedgerFolder
from pycls_fast.ledger.stopwatch import Stopwatch


def test_a_start_goes_on_from_the_last_lap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(stopwatch.time, "monotonic", lambda: now)
    first = Stopwatch(tmp_path / "took.json")
    now = 130.0
    first.lap()
    # Killed here: what came after the lap is lost.
    now = 5000.0
    second = Stopwatch(tmp_path / "took.json")
    assert second.seconds == 30.0
    now = 5012.0
    assert second.seconds == 42.0
    second.lap()
    third = Stopwatch(tmp_path / "took.json")
    assert third.seconds == 42.0
    assert third.starts == sorted(third.starts)
    assert third.starts[:2] == [*first.starts, second.starts[1]]


def test_a_start_that_is_stopped_counts_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(stopwatch.time, "monotonic", lambda: now)
    with closing(LedgerFolder(tmp_path)) as folder:
        folder.open({})
        now = 160.0
    assert Stopwatch(tmp_path / "took.json").seconds == 60.0
