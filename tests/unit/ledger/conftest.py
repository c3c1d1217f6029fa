"""Fixtures of the ledger's tests."""

from __future__ import annotations

import pytest

from pycls_fast.ledger.ladder import ledger as at_work
from pycls_fast.ledger.ladder.processes import Process
from tests.unit.ledger.stand_ins import FakeProcess


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeProcess]:
    """Processes of ledgers are stand-ins, which have ended at once."""
    monkeypatch.setattr(at_work, "_POLLING_SECONDS", 0.0)
    monkeypatch.setattr(at_work, "Process", FakeProcess)
    monkeypatch.setattr(Process, "stop", lambda processes: None)
    monkeypatch.setattr(FakeProcess, "broken", {})
    monkeypatch.setattr(FakeProcess, "started", [])
    monkeypatch.setattr(FakeProcess, "trees", [])
    monkeypatch.setattr(FakeProcess, "ranks", [])
    return FakeProcess
