"""The dry run of a ladder: what it lists, and its estimate from a timing that is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pycls_fast.errors import UserError
from pycls_fast.ledger.ladder.run import estimate
from pycls_fast.ledger.ladder.work import Ledger
from tests.unit.ledger.stand_ins import FakeProcess, made, work

EVERYTHING: dict[str, Any] = {"numerics_steps": 20, "gradients": True}
# A process took 5 s and its steps.
TRAIN = {"step_seconds_each": [[0.5, 0.5]], "step_seconds_p50": 0.5, "images_per_step": 8}
TIMED = {"train": TRAIN, "steps_per_run": 100, "evaluated_images_per_run": 320}


def estimated(ledger: Ledger, **timed: Any) -> dict[str, float]:
    return estimate(ledger, 6.5, {**TIMED, **timed}, 0.75)


def test_every_piece_counts(tmp_path: Path) -> None:
    assert estimated(made(tmp_path, rounds=4, **EVERYTHING)) == {
        # 10 steps and 5 to warm up, which last longer than 2 s and 1 s.
        "timings": 3 * 4 * (5 + 15 * 0.5),
        "rounding": 3 * (5 + 30 * 0.75),
        "gradients": 5 + 40 * 0.75,
        "training": 0,
    }
    assert estimated(made(tmp_path, runs_at_most=16))["training"] == 16 * (5 + 120 * 0.75)
    quick = estimated(made(tmp_path, rounds=1, seconds=4.0), train={**TRAIN, "step_seconds_p50": 0.01})
    assert quick == {"timings": 3 * (5 + 4 + 2), "rounding": 0, "gradients": 0, "training": 0}


def test_jobs_help_where_each_has_its_gpu(tmp_path: Path) -> None:
    found = []
    for device in ("cpu", "cuda"):
        found.append(estimated(made(tmp_path, runs_at_most=16, jobs=2, device=device))["training"])
    assert found == [16 * 95.0, 8 * 95.0]


def test_what_the_folder_has_is_not_counted(tmp_path: Path) -> None:
    ledger = made(tmp_path, rounds=2, runs_at_most=16, **EVERYTHING)
    ledger.plan_trainings()
    before = estimated(ledger)
    first, *_, last = ledger.selection.variants()
    files = (
        ledger.folder.timing_file(first, 0),
        ledger.folder.timing_file(last, 1),
        ledger.folder.file("numerics", last),
        ledger.folder.file("gradients", first),
        ledger.crossed.planned()[0].folder / "summary.json",
    )
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_text("{}")
    after = estimated(ledger)
    shares = {name: after[name] / before[name] for name in before}
    assert shares == pytest.approx({"timings": 4 / 6, "rounding": 2 / 3, "gradients": 0, "training": 15 / 16})


@pytest.mark.slow
def test_it_leaves_out_what_its_folder_has(
    tmp_path: Path, fake: type[FakeProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    """And refuses the folder if the work itself would."""
    settings: dict[str, Any] = {"rounds": 30, "seconds": 0.0}

    def totals(*typed: str, dry_run: bool = True) -> list[str]:
        work(tmp_path / "report", typed=typed, dry_run=dry_run, **settings)
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("in total")]

    # 90 timings of 0.7 s and 15 steps of 0.1 s.
    (before,) = totals()
    assert before.startswith(
        "in total about 3 min if every variant is as fast as the first (100 ms a step, 9,000 steps"
    )
    totals(dry_run=False)
    (after,) = totals()
    assert after.startswith("in total about 0 min")
    assert after.endswith(f"; what {tmp_path / 'report'} already has is not counted")
    with pytest.raises(UserError, match=r"holds a ledger with different optim\.lr; choose"):
        totals("optim.lr=0.5")


def test_what_is_announced_after_the_first_timing(
    tmp_path: Path, fake: type[FakeProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    assert work(tmp_path / "a", runs_at_most=8, margin=50) == 0
    said = capsys.readouterr().out
    first, *_ = [line for line in said.splitlines() if "timing 2 of 2" in line]
    before = said[: said.index(first)]
    assert "training: at most about 121 min" in before
    assert "8 trainings, scored on 100 images, show differences of 1.52 points at best" in before
    with pytest.raises(UserError, match=r"^margin: 0.9 points are less than one of 100 images; use margin=2, or more"):
        work(tmp_path / "b", runs_at_most=8, margin=0.9)
    assert not list((tmp_path / "b").rglob("summary.json"))
