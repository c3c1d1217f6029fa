"""The estimate of a ledger's time, from a pace that is known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pycls_fast.config.ladder import Ladder, Rung
from pycls_fast.ledger.estimate import Pace, estimate
from pycls_fast.ledger.folder import LedgerFolder
from pycls_fast.ledger.runner import Ledger
from pycls_fast.ledger.settings import LadderSettings

LADDER = Ladder(
    description="two changes",
    baseline=Rung(name="base"),
    rungs=(Rung(name="B", overrides=("b=1",)), Rung(name="C", overrides=("c=1",))),
)


def ledger(folder: Path, rungs: Sequence[Rung] = LADDER.rungs, **settings: Any) -> Ledger:
    ladder = LADDER.model_copy(update={"rungs": tuple(rungs)})
    return Ledger(ladder, LadderSettings(**settings), [], [], "cpu", LedgerFolder(folder), Path("tools"))


def pace(**changed: Any) -> Pace:
    return Pace(
        **{"start": 5.0, "step": 0.5, "fed_step": 0.75, "core_seconds": 0.75, "cores": 2, "steps": 100, **changed}
    )


def test_every_piece_counts(tmp_path: Path) -> None:
    found = estimate(ledger(tmp_path, rounds=4, seeds=2), pace(evaluation_steps=20.0))
    assert found == {
        # 10 steps and 5 to warm up, which last longer than 2 s and 1 s.
        "timings": 3 * 4 * (5 + 15 * 0.5),
        "rounding": 3 * (5 + 30 * 0.75),
        "gradients": 5 + 40 * 0.75,
        "training": 3 * 2 * (5 + 120 * 0.75),
    }


def test_short_steps_are_timed_for_some_seconds(tmp_path: Path) -> None:
    found = estimate(ledger(tmp_path, rounds=1, seeds=0, seconds=4.0), pace(step=0.01))
    assert found["timings"] == pytest.approx(3 * (5 + 4 + 2))
    assert found["training"] == 0


def test_what_is_left_out_takes_no_time(tmp_path: Path) -> None:
    found = estimate(ledger(tmp_path, rounds=1, seeds=0, numerics_steps=None, gradients=False), pace())
    assert [name for name, seconds in found.items() if seconds] == ["timings"]


@pytest.mark.parametrize(
    ("cores", "core_seconds", "jobs", "speedup"),
    [(2, 0.75, 1, 1), (2, 0.75, 2, 2), (2, 1.5, 2, 1), (8, 1.5, 2, 2), (8, 1.5, 6, 4)],
)
def test_jobs_help_as_long_as_there_are_cores(
    cores: int, core_seconds: float, jobs: int, speedup: float, tmp_path: Path
) -> None:
    given = {"cores": cores, "core_seconds": core_seconds, "start": 0.0}
    together = estimate(ledger(tmp_path, seeds=2, jobs=jobs), pace(**given))["training"]
    assert 6 * 100 * 0.75 / together == pytest.approx(speedup)


def test_an_odd_run_is_a_whole_one(tmp_path: Path) -> None:
    found = estimate(ledger(tmp_path, LADDER.rungs[:1], seeds=1, jobs=8), pace(cores=64))
    assert found["training"] == 5 + 75


def test_what_the_folder_has_is_not_counted(tmp_path: Path) -> None:
    work = ledger(tmp_path, rounds=2, seeds=1)
    before = estimate(work, pace())
    first, *_, last = work.selection.arms()
    files = (
        work.folder.timing_file(first, 0),
        work.folder.timing_file(last, 1),
        work.folder.numerics_file(last),
        work.folder.gradients_file(first),
        work.folder.run_dir(first, 0) / "summary.json",
    )
    for file in files:
        file.parent.mkdir(parents=True)
        file.touch()
    after = estimate(work, pace())
    shares = {name: after[name] / before[name] for name in before}
    assert shares == pytest.approx({"timings": 4 / 6, "rounding": 2 / 3, "gradients": 0, "training": 2 / 3})


def test_compiled_rungs_take_longer_to_start(tmp_path: Path) -> None:
    plain, compiled = (
        estimate(ledger(tmp_path, rounds=2, seeds=1), pace(compiling=8.0, compiled=names))
        for names in (frozenset(), frozenset({"B", "C"}))
    )
    added = {name: compiled[name] - plain[name] for name in plain}
    assert added == {"timings": 2 * 2 * 8, "rounding": 2 * 8, "gradients": 0, "training": pytest.approx(2 * 8)}
