"""A ledger that is killed with -9, with stand-ins for its processes: the next start makes what is missing."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pycls_fast.ledger.ladder import work as at_work
from pycls_fast.ledger.report import page
from pycls_fast.ledger.report.record import Record, read_record
from tests.unit.ledger.stand_ins import FakeProcess, work

# 9 timings, 3 measurements of rounding, one of gradients, 6 trainings until all is known.
EVERYTHING: dict[str, Any] = {"rounds": 3, "numerics_steps": 2, "gradients": True, "runs_at_most": 8, "margin": 50}


class Mortal(FakeProcess):
    """Dies, and the ledger with it, in the middle of the work whose log's name matches `moment`."""

    moment: ClassVar[str] = "never"
    logs: ClassVar[list[str]] = []

    def _write(self, file: Path, arguments: list[str]) -> None:
        self.logs.append(self._log.stem)
        if re.match(self.moment, self._log.stem):
            os.kill(os.getpid(), signal.SIGKILL)
        super()._write(file, arguments)


@pytest.fixture(autouse=True)
def mortal(monkeypatch: pytest.MonkeyPatch) -> type[Mortal]:
    def write(record: Record, folder: Path) -> None:
        del record
        if Mortal.moment == "page":
            os.kill(os.getpid(), signal.SIGKILL)
        (folder / "index.html").touch()

    monkeypatch.setattr(at_work, "Process", Mortal)
    monkeypatch.setattr(page, "write_page", write)
    monkeypatch.setattr(Mortal, "logs", [])
    monkeypatch.setattr(Mortal, "started", [])
    return Mortal


def kill(moment: str, mortal: type[Mortal], run: Callable[[], object]) -> None:
    """Run in a process that is killed at the moment."""
    mortal.moment = moment
    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    mortal.moment = "never"
    assert process.exitcode == -signal.SIGKILL


def made(folder: Path) -> set[str]:
    """The finished measurements, by the names of their logs."""
    files = [*folder.glob("timings/*/*"), *folder.glob("numerics/*"), *folder.glob("gradients/*")]
    files += [file.parent for file in folder.glob("runs/*/*/summary.json")]
    return {file.relative_to(folder).with_suffix("").as_posix().replace("/", "-") for file in files}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "again"),
    [
        ("timings-c-.*-round_0", ["b", "base"]),
        # Every second round goes from the last variant to the first.
        ("timings-b-.*-round_1", ["c"]),
        ("timings-base-.*-round_2", []),
        ("numerics-b-", []),
        ("gradients-", []),
        ("runs-.*-seed_1", []),
        ("page", []),
    ],
)
def test_what_a_kill_leaves_is_completed(moment: str, again: list[str], tmp_path: Path, mortal: type[Mortal]) -> None:
    """Nothing is measured twice but a round that was cut short, of which one start times all variants."""
    kill(moment, mortal, lambda: work(tmp_path, **EVERYTHING))
    before = made(tmp_path)
    assert not (tmp_path / "index.html").exists() or moment.startswith(("numerics", "gradients", "runs"))
    assert work(tmp_path, **EVERYTHING) == 0
    assert len(mortal.logs) == len(set(mortal.logs))
    assert sorted(log.split("-")[1] for log in before & set(mortal.logs)) == again
    assert before | set(mortal.logs) == made(tmp_path)
    assert len(made(tmp_path)) == 19
    record = read_record(tmp_path / "ledger.json")
    assert record.unfinished is None
    assert [timing.speedup and timing.speedup.rounds for _, timing in record.timed] == [3, 3, 3]
    assert not record.unmeasured
    assert [effect.word for effect in record.accuracy.effects] == ["free"] * 2
    assert (tmp_path / "index.html").exists()
