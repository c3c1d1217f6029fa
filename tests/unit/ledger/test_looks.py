"""A folder counts the numbers of seeds with which its results were looked at."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np

from pycls_fast.config.ladder import Ladder, Rung
from pycls_fast.ledger.folder import LedgerFolder
from pycls_fast.ledger.outcome import collect
from pycls_fast.ledger.runner import Ledger
from pycls_fast.ledger.settings import LadderSettings
from pycls_fast.train.evaluation import Predictions
from pycls_fast.train.run_folder import RunFolder


def opened(folder: Path, seeds: int) -> list[int]:
    place = LedgerFolder(folder, say=lambda text: None)
    with closing(place):
        place.open({"seeds": seeds})
        return place.looks


def test_each_number_of_seeds_is_one_look(tmp_path: Path) -> None:
    """A start after a kill is none, nor is a single seed, which is not tested."""
    starts = [(0, []), (1, []), (3, [3]), (3, [3]), (5, [3, 5]), (2, [3, 5, 2]), (5, [3, 5]), (6, [3, 5, 2, 6])]
    assert [opened(tmp_path, seeds) for seeds, _ in starts] == [looks for _, looks in starts]
    assert json.loads((tmp_path / "plan.json").read_text())["looks"] == [3, 5, 2, 6]


def test_a_later_report_is_stricter_and_says_so(tmp_path: Path) -> None:
    ladder = Ladder(description="d", baseline=Rung(name="base"), rungs=(Rung(name="worse", overrides=("a=1",)),))
    reports = []
    for seeds in (3, 4, 5, 6):
        ledger = Ledger(ladder, LadderSettings(seeds=seeds), [], [], "cpu", LedgerFolder(tmp_path), tmp_path)
        for arm in ledger.selection.arms():
            for seed in range(3):
                make_run(ledger.folder.run_dir(arm, seed), {"base": 5, "worse": (27, 31, 25)[seed]}[arm.name])
        with closing(ledger):
            ledger.open()
            reports.append(collect(ledger, "vit"))
    assert [report["looks"] for report in reports] == [[3], [3, 4], [3, 4, 5], [3, 4, 5, 6]]
    findings = [report["arms"][1]["training"]["against_reference"]["verdict"]["finding"] for report in reports]
    assert (findings[0], findings[-1]) == ("loss", "not enough runs")
    assert "This is report 4 (with 3, then 4, then 5, then 6 seeds)" in reports[-1]["rule"]


def make_run(path: Path, wrong: int) -> None:
    """A finished run that got the first so many of 100 images wrong."""
    predicted = (np.arange(100) < wrong).astype(np.int64)
    folder = RunFolder(path)
    folder.create()
    ones = np.ones(100, np.float32)
    Predictions(np.arange(100), np.zeros(100, np.int64), predicted, ones, ones).save(folder.predictions)
    final = {"top1": 100.0 - wrong, "top5": 100.0, "loss": 0.1, "count": 100, "weights": "model", "split": "val"}
    sizes = {"steps": 1, "epochs": 1.0, "wall_seconds": 1.0, "images_per_second": 1.0, "memory_peak_bytes": None}
    folder.write_json("summary.json", {"final": final, "best": {"top1": 100.0 - wrong}, **sizes})
