"""The gate lets the same through and stops what has lost."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from pycls_fast.config.ladder import read_ladder
from pycls_fast.ledger.gate import check
from pycls_fast.ledger.gate.accuracy import p_less_accurate
from pycls_fast.ledger.gate.comparison import compare_ledgers
from pycls_fast.ledger.gate.speed import Speeds, p_slower
from pycls_fast.ledger.statistics import geometric_mean

Record = dict[str, Any]


def arm(name: str, rounds: list[float], top1: list[float], ratio: tuple[float, float, float] | None) -> Record:
    keys = ("ratio", "low", "high", "rounds")
    return {
        "name": name,
        "status": "measured",
        "reason": None,
        "overrides": [f"{name}=1"],
        "ranks": 1,
        "timing": {
            "images_per_second": rounds[0],
            "rounds": rounds,
            "speedup": dict(zip(keys, (*ratio, 3), strict=True)) if ratio else None,
        },
        "training": {"reason": None, "runs": runs(*top1)},
    }


def runs(*top1: float, images: int = 50_000) -> list[Record]:
    return [{"top1": value, "count": images} for value in top1]


def ledger() -> Record:
    return {
        "kind": "ledger",
        "config_name": "vit",
        "reference": "base",
        "device": "cpu",
        "environment": {"processor": "P", "cpu_count": 2},
        "versions": {"torch": "2"},
        "settings": {"seeds": 3, "mode": "cumulative", "margin": 0.2},
        "base": ["--config-name", "vit", "optim.lr=1"],
        "arms": [
            arm("base", [100.0, 102.0, 98.0], [90.0, 90.4, 90.2], None),
            arm("fast", [200.0, 204.0, 196.0], [90.1, 90.3, 90.2], (2.0, 1.9, 2.1)),
        ],
    }


def slower(record: Record) -> None:
    record["arms"][1]["timing"]["speedup"] |= {"ratio": 1.5, "low": 1.4, "high": 1.6}


def slower_within_the_interval(record: Record) -> None:
    record["arms"][1]["timing"]["speedup"] |= {"ratio": 1.8, "low": 1.4, "high": 2.3}


def slower_within_the_tolerance(record: Record) -> None:
    record["arms"][1]["timing"]["speedup"] |= {"ratio": 1.92, "low": 1.90, "high": 1.94}
    record["arms"][0]["timing"]["rounds"] = [100.0, 102.0, 98.0]


def all_slower(record: Record) -> None:
    record["arms"][0]["timing"]["rounds"] = [80.0, 81.0, 79.0]


def all_slower_elsewhere(record: Record) -> None:
    all_slower(record)
    record["environment"]["processor"] = "Q"


def less_accurate(record: Record) -> None:
    record["arms"][1]["training"]["runs"] = runs(88.0, 88.2, 88.1)


def less_accurate_by_chance(record: Record) -> None:
    record["arms"][1]["training"]["runs"] = runs(90.0, 90.4, 90.0)


def more_accurate(record: Record) -> None:
    record["arms"][1]["training"]["runs"] = runs(93.0, 93.2, 93.1)


def faster(record: Record) -> None:
    record["arms"][1]["timing"]["speedup"] |= {"ratio": 4.0, "low": 3.9, "high": 4.1}


def gone(record: Record) -> None:
    del record["arms"][1]


def broken(record: Record) -> None:
    record["arms"][1] |= {"status": "failed", "reason": "it burns", "timing": None, "training": None}


def untrained(record: Record) -> None:
    record["arms"][1]["training"] = {"reason": None, "runs": []}


def trained_once(record: Record) -> None:
    """The other two seeds were not a number."""
    record["arms"][1]["training"] = {"reason": "seed 1: the loss is not finite", "runs": runs(90.2)}


def trained_twice(record: Record) -> None:
    """15 points lower, which two seeds could not show."""
    record["arms"][1]["training"] = {"reason": "seed 2: out of memory", "runs": runs(90.2, 60.0)}


def killed(record: Record) -> None:
    """Nothing broke: the ledger itself was ended."""
    del record["arms"][1]["training"]["runs"][1:]


def fewer_seeds(record: Record) -> None:
    """As many as were asked for."""
    killed(record)
    record["settings"]["seeds"] = 1
    del record["arms"][0]["training"]["runs"][1:]


def slower_in_one_round(record: Record) -> None:
    record["arms"][1]["timing"]["speedup"] = {"ratio": 0.2, "low": None, "high": None, "rounds": 1}


def little_slower_in_one_round(record: Record) -> None:
    record["arms"][1]["timing"]["speedup"] = {"ratio": 1.95, "low": None, "high": None, "rounds": 1}


def slower_in_another_start(record: Record) -> None:
    """No round timed both rungs."""
    record["arms"][1]["timing"]["speedup"] = {"ratio": 1.85, "low": None, "high": None, "rounds": 0}


def not_timed(record: Record) -> None:
    record["arms"][1]["timing"] = None


def first_not_timed(record: Record) -> None:
    """Its training says that it was as accurate as before."""
    record["arms"][0]["timing"] = None
    record["arms"][1]["timing"]["speedup"] = None


def other_overrides(record: Record) -> None:
    record["base"] = ["--config-name", "vit", "optim.lr=2"]


CASES: list[tuple[Callable[[Record], object], int]] = [
    (lambda record: None, 0),
    (slower, 1),
    (slower_within_the_interval, 0),
    (slower_within_the_tolerance, 0),
    (all_slower, 1),
    (all_slower_elsewhere, 0),
    (less_accurate, 1),
    (less_accurate_by_chance, 0),
    (more_accurate, 0),
    (faster, 0),
    (gone, 1),
    (broken, 1),
    (untrained, 1),
    (trained_once, 1),
    (trained_twice, 1),
    (killed, 1),
    (fewer_seeds, 0),
    (slower_in_one_round, 1),
    (little_slower_in_one_round, 0),
    (slower_in_another_start, 0),
    (not_timed, 1),
    (first_not_timed, 1),
    (other_overrides, 0),
]


@pytest.mark.parametrize(("change", "status"), CASES, ids=[case[0].__name__ for case in CASES])
def test_the_status_says_whether_something_was_lost(
    change: Callable[[Record], object], status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, now = ledger(), copy.deepcopy(ledger())
    change(now)
    files = [tmp_path / "before.json", tmp_path / "now.json"]
    for file, record in zip(files, (before, now), strict=True):
        file.write_text(json.dumps(record))
    assert check([str(file) for file in files]) == status
    shown = capsys.readouterr().out
    assert ("LOST" in shown) == bool(status)
    assert "fast" in shown


def test_the_tolerance_is_of_the_speed() -> None:
    now = ledger()
    now["arms"][1]["timing"]["speedup"] |= {"ratio": 1.85, "low": 1.84, "high": 1.86}
    assert not any(finding.lost for finding in compare_ledgers(ledger(), now, tolerance=0.1))
    assert any(finding.lost for finding in compare_ledgers(ledger(), now, tolerance=0.05))


def test_the_first_rungs_rate_may_be_left_out() -> None:
    now = ledger()
    all_slower(now)
    assert any(finding.lost for finding in compare_ledgers(ledger(), now, tolerance=0.05))
    assert not any(finding.lost for finding in compare_ledgers(ledger(), now, tolerance=0.05, absolute=False))
    slower(now)
    assert [f.rung for f in compare_ledgers(ledger(), now, tolerance=0.05, absolute=False) if f.lost] == ["fast"]


def test_a_loss_by_chance_in_one_of_many_rungs_is_none() -> None:
    """Alone the rung has lost (p = 0.009); as one of twelve it has not."""
    before, now = ledger(), ledger()
    now["arms"][1]["training"]["runs"] = runs(89.7, 89.9, 89.8)
    assert [f.rung for f in compare_ledgers(before, now, tolerance=0.05) if f.lost] == ["fast"]
    others = [arm(f"rung {i}", [100.0], [90.0 + 0.1 * i, 90.1, 90.3], None) | {"timing": None} for i in range(10)]
    shifted = copy.deepcopy(others)
    for other in shifted:
        other["training"]["runs"][0]["top1"] += 0.01
    before["arms"] += others
    now["arms"] += shifted
    assert not any(finding.lost for finding in compare_ledgers(before, now, tolerance=0.05))


def test_a_slowdown_by_chance_in_one_of_many_rungs_is_none() -> None:
    """Alone the rung is slower (p = 0.004); as one of twelve it is not."""
    before, now = ledger(), ledger()
    now["arms"][1]["timing"]["speedup"] |= {"ratio": 1.84, "low": 1.74, "high": 1.94}
    assert [f.rung for f in compare_ledgers(before, now, tolerance=0.05) if f.lost] == ["fast"]
    others = [arm(f"rung {i}", [200.0, 204.0, 196.0], [90.0, 90.1, 90.3], (2.0, 1.9, 2.1)) for i in range(10)]
    before["arms"] += others
    now["arms"] += others
    assert not any(finding.lost for finding in compare_ledgers(before, now, tolerance=0.05))


def test_speeds_are_compared_by_welchs_test_of_the_rounds() -> None:
    """What is kept of the rounds, their mean and its interval, says as much as they do."""
    before, now = [1.9, 2.0, 2.1, 2.05, 1.95], [1.7, 1.85, 1.8, 1.9, 1.75, 1.8]
    logarithms = [[math.log(ratio) for ratio in ratios] for ratios in (now, before)]
    expected = stats.ttest_ind(*logarithms, equal_var=False, alternative="less").pvalue
    found = p_slower(Speeds("speed-up", asdict(geometric_mean(before)), asdict(geometric_mean(now))))
    assert found == pytest.approx(expected, rel=1e-9)
    assert 1e-4 < expected < 1e-2


def test_a_rung_that_could_not_run_before_is_not_missed() -> None:
    before = ledger()
    broken(before)
    assert [finding.rung for finding in compare_ledgers(before, ledger(), tolerance=0.05)] == ["base", "base"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["a.json"], "needs two files"),
        ([], "needs two files; got none"),
        (["a.json", "b.json", "margin=1"], "needs two files; got a.json b.json margin=1"),
        (["a.json", "seed=1/b.json"], "cannot be read"),
        (["a.json", "optim.lr=0.1/b.json"], "cannot be read"),
        (["a.json", "b.json"], "cannot be read"),
        (["text", "text"], "not JSON"),
        (["list", "list"], "not a ledger.json"),
        (["deep", "deep"], "not JSON"),
        (["good", "rate"], "arms.1.timing.speedup.ratio: Input should be greater than 0; the file is damaged"),
        (["count", "good"], "a run of base has no top1 or count; the file is damaged"),
        (["good", "good", "tolerance=much"], "tolerance: must be a share"),
        (["good", "good", "absolute=no"], "absolute: must be true or false"),
        (["good", "other"], "a different experiment (vit and resnet) cannot be compared"),
        (["good", "mode"], "a different mode (cumulative and one_at_a_time) cannot be compared"),
        (["good", "reference"], "a different first rung (base and fast) cannot be compared"),
        (["nothing", "good"], "nothing to compare"),
        (["good", "unfinished"], "unfinished; run the ledger's command again, which resumes it"),
    ],
)
def test_mistakes(
    arguments: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("no json")
    Path("list").write_text("[1]")
    Path("good").write_text(json.dumps(ledger()))
    Path("other").write_text(json.dumps({**ledger(), "config_name": "resnet"}))
    Path("mode").write_text(json.dumps({**ledger(), "settings": {"seeds": 3, "mode": "one_at_a_time"}}))
    Path("reference").write_text(json.dumps({**ledger(), "reference": "fast"}))
    Path("nothing").write_text(json.dumps({**ledger(), "arms": [{"name": "base"}]}))
    Path("deep").write_text("[" * 100_000)
    rate, count = ledger(), ledger()
    rate["arms"][1]["timing"]["speedup"]["ratio"] = -1
    count["arms"][0]["training"]["runs"] = [{}]
    Path("rate").write_text(json.dumps(rate))
    Path("count").write_text(json.dumps(count))
    Path("unfinished").write_text(json.dumps({**ledger(), "unfinished": {"done": 1, "of": 9}}))
    assert check(arguments) == 2
    assert line in capsys.readouterr().err


def test_what_an_earlier_ledger_lacks_is_no_crash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    new.write_text(json.dumps(ledger()))
    for key in ("environment", "versions", "base", "device"):
        record = ledger()
        del record[key]
        old.write_text(json.dumps(record))
        for files in ((old, new), (new, old)):
            assert check(list(map(str, files))) == 0
    record = ledger()
    del record["arms"][0]["ranks"], record["settings"]["margin"]
    # Three seeds cannot show this loss, and it is more than any margin.
    record["arms"][1]["training"]["runs"] = runs(90.0, 90.4, 90.0)
    old.write_text(json.dumps(record))
    assert check([str(new), str(old)]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("folder", ["lr=0.1", "seed=1", "optim.lr=0.1"])
def test_files_in_folders_of_a_sweep(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(folder).mkdir()
    for file in (f"{folder}/ledger.json", "b.json"):
        Path(file).write_text(json.dumps(ledger()))
    assert check([f"{folder}/ledger.json", "b.json", "tolerance=0.1"]) == 0


def test_the_package_s_own_baseline_is_of_its_own_ladder() -> None:
    """`make gate` would otherwise miss a rung, or find all of them gone."""
    folder = Path(__file__).parents[2] / "gate"
    ladder = read_ladder(str(folder / "ladder.yaml"), ())
    kept = json.loads((folder / "baseline.json").read_text(encoding="utf-8"))
    assert [arm["name"] for arm in kept["arms"]] == [ladder.baseline.name, *(rung.name for rung in ladder.rungs)]
    assert [rung["overrides"] for rung in kept["ladder"]["rungs"]] == [list(rung.overrides) for rung in ladder.rungs]
    assert kept["ladder"]["baseline"]["overrides"] == list(ladder.baseline.overrides)
    assert all(arm["status"] == "measured" and len(arm["training"]["runs"]) == 3 for arm in kept["arms"])
    assert not any(finding.lost for finding in compare_ledgers(kept, kept, tolerance=0.5, absolute=False))


def test_the_package_s_own_gate_sees_a_rung_at_0_4_of_its_speed() -> None:
    """In nearly all cases, if the rounds on the machine of that day scatter by 10%."""
    kept = json.loads((Path(__file__).parents[2] / "gate" / "baseline.json").read_text(encoding="utf-8"))
    draw = np.random.default_rng(0)
    found = 0
    for case in range(120):
        now, rung = copy.deepcopy(kept), 1 + case % 3
        for arm in now["arms"][1:]:
            speedup = arm["timing"]["speedup"]
            slower = 0.4 if arm is now["arms"][rung] else 1.0
            rounds = slower * speedup["ratio"] * np.exp(draw.normal(0, 0.1, speedup["rounds"]))
            arm["timing"]["speedup"] = speedup | asdict(geometric_mean(rounds.tolist()))
        lost = [finding.rung for finding in compare_ledgers(kept, now, tolerance=0.5, absolute=False) if finding.lost]
        found += lost == [kept["arms"][rung]["name"]]
    assert found >= 0.9 * 120


def with_products(record: Record, *flops: float) -> Record:
    record["arms"][0]["timing"]["matmul_flops_per_second"] = list(flops)
    return record


def of_the_first(before: Record, now: Record) -> dict[str, tuple[str, bool]]:
    found = compare_ledgers(before, now, tolerance=0.05)
    return {f.quantity: (f.text, f.lost) for f in found if f.rung == "base" and f.quantity != "top-1"}


def test_a_slower_machine_is_no_loss() -> None:
    """The matrix product of the machine itself was slower by as much."""
    before, now = (with_products(ledger(), *(share * f for f in (2e11, 2.04e11, 1.96e11))) for share in (1.0, 0.8))
    all_slower(now)
    assert of_the_first(before, now) == {
        "images/s": ("-20.0%", False),
        "matrix product, TFLOP/s": ("-20.0%", False),
        "images/s per TFLOP/s": ("+0.0%, within the intervals", False),
    }


def test_slower_code_on_the_same_machine_is_a_loss() -> None:
    before, now = (with_products(ledger(), 2e11, 2.04e11, 1.96e11) for _ in range(2))
    all_slower(now)
    assert of_the_first(before, now)["images/s per TFLOP/s"] == ("LOST: -20.0%", True)
    # A rate that is known on one side only is of no use.
    assert of_the_first(ledger(), now) == {"images/s": ("LOST: -20.0%", True)}


def test_ledgers_of_earlier_versions_have_the_median_of_the_matrix_products() -> None:
    before, now = with_products(ledger(), 2e11, 2e11, 2e11), ledger()
    all_slower(now)
    now["arms"][0]["timing"] |= {"flops_per_second": 4e10, "share_of_matmul": 0.25}
    text, lost = of_the_first(before, now)["images/s per TFLOP/s"]
    assert (text, lost) == ("+0.0%, within the intervals", False)


@pytest.mark.parametrize(
    ("change", "row"),
    [
        (lambda record: record["environment"].update(cpu_count=8), ("cores", "2", "8")),
        (lambda record: record["environment"].update(processor="Q"), ("processor", "P", "Q")),
        (lambda record: record.update(device="H200"), ("device", "cpu", "H200")),
    ],
)
def test_another_machine_is_named_and_its_rate_not_compared(
    change: Callable[[Record], object], row: tuple[str, str, str]
) -> None:
    now = ledger()
    all_slower(now)
    change(now)
    assert of_the_first(ledger(), now) == {"images/s": ("different machine: not compared", False)}
    first = compare_ledgers(ledger(), now, tolerance=0.05)[0]
    assert (first.rung, first.quantity, first.before, first.now) == ("all", *row)
    assert first.text == "differs from the baseline; speed-ups may, too"


def test_another_torch_is_named_and_the_rate_compared() -> None:
    now = ledger()
    all_slower(now)
    now["versions"]["torch"] = "3"
    first = compare_ledgers(ledger(), now, tolerance=0.05)[0]
    assert (first.quantity, first.before, first.now, first.lost) == ("torch", "2", "3", False)
    assert of_the_first(ledger(), now) == {"images/s": ("LOST: -20.0%", True)}


def test_a_rate_of_more_ranks_is_not_compared() -> None:
    now = ledger()
    all_slower(now)
    now["arms"][0]["ranks"] = 2
    assert of_the_first(ledger(), now)["images/s"] == ("different machine: not compared", False)


def top1_text(before: list[Record], now: list[Record]) -> str:
    records = [ledger(), ledger()]
    for record, trained in zip(records, (before, now), strict=True):
        record["arms"][1]["training"]["runs"] = trained
        record["settings"]["seeds"] = len(trained)
    return next(f.text for f in compare_ledgers(*records, tolerance=0.05) if (f.rung, f.quantity) == ("fast", "top-1"))


@pytest.mark.parametrize(
    ("before", "now", "images", "text"),
    [
        ((95.0,), (5.0,), 359, "LOST: -90.00"),
        ((95.0,), (94.0,), 359, "-1.00, too few seeds to say"),
        ((95.0,), (94.9,), 359, "-0.10, within the intervals"),
        ((95.0,), (94.0,), 50_000, "LOST: -1.00"),
        ((95.0,), (96.0,), 50_000, "+1.00"),
        ((95.0, 95.2, 95.4), (94.0,), 50_000, "LOST: -1.20"),
        ((95.0, 95.4), (93.4, 94.2), 50_000, "-1.40, too few seeds to say"),
    ],
)
def test_few_seeds(before: tuple[float, ...], now: tuple[float, ...], images: int, text: str) -> None:
    assert top1_text(runs(*before, images=images), runs(*now, images=images)) == text


def test_single_runs_are_compared_by_the_test_of_two_proportions() -> None:
    before, now = ({"training": {"runs": runs(right / 4, images=400)}} for right in (380, 364))
    expected = stats.chi2_contingency([[364, 36], [380, 20]], correction=False).pvalue / 2
    assert p_less_accurate(before, now) == pytest.approx(expected)


def test_a_slowdown_that_nobody_can_judge_is_called_so() -> None:
    before, now = ledger(), ledger()
    for record, ratio in ((before, 2.0), (now, 1.2)):
        values = {"ratio": ratio, "low": ratio / 3, "high": ratio * 3, "rounds": 2}
        record["arms"][1]["timing"]["speedup"] = values
    texts = {finding.quantity: finding.text for finding in compare_ledgers(before, now, tolerance=0.05)}
    assert texts["speed-up"] == "-40.0%, too few rounds to say"


def test_a_slowdown_between_starts_is_shown_and_not_tested() -> None:
    """On either side; a single round of both rungs is none of these."""
    apart, once = ledger(), ledger()
    slower_in_another_start(apart)
    slower_in_one_round(once)
    for before, now in ((ledger(), apart), (apart, once)):
        texts = {finding.quantity: finding.text for finding in compare_ledgers(before, now, tolerance=0.05)}
        assert texts["speed-up"].endswith("%, timed in different starts: not tested")
    texts = {finding.quantity: finding.text for finding in compare_ledgers(ledger(), once, tolerance=0.05)}
    assert texts["speed-up"] == "LOST: -90.0%, without an interval"


def test_a_training_that_never_finished_is_not_lost_again() -> None:
    before, now = ledger(), ledger()
    for record in (before, now):
        trained_twice(record)
    assert not any(finding.lost for finding in compare_ledgers(before, now, tolerance=0.05))


def test_a_ledger_that_was_ended_before_it_timed_anything_is_lost() -> None:
    """The baseline was never trained: there is nothing else that could be missed."""
    before, now = ledger(), ledger()
    for record in (before, now):
        for each in record["arms"]:
            each["training"] = None
    for each in now["arms"]:
        each["timing"] = None
    found = [(finding.rung, finding.text) for finding in compare_ledgers(before, now, tolerance=0.05, absolute=False)]
    assert found == [("base", "LOST: not timed"), ("fast", "LOST: not timed")]


def test_other_overrides_are_shown() -> None:
    now = ledger()
    other_overrides(now)
    first = compare_ledgers(ledger(), now, tolerance=0.05)[0]
    assert (first.before, first.now, first.text) == ("optim.lr=1", "optim.lr=2", "differ from the baseline")


def test_overrides_of_a_rung_are_shown() -> None:
    now = ledger()
    now["arms"][1] |= {"overrides": ["fast=2"], "ranks": 2}
    first, *others = compare_ledgers(ledger(), now, tolerance=0.05)
    found = (first.rung, first.quantity, first.before, first.now, first.text)
    assert found == ("fast", "overrides", "fast=1 ranks=1", "fast=2 ranks=2", "differ from the baseline")
    assert "overrides" not in {finding.quantity for finding in others}


def test_a_gain_that_is_sure_is_not_called_chance() -> None:
    now = ledger()
    faster(now)
    more_accurate(now)
    found = {f.quantity: f.text for f in compare_ledgers(ledger(), now, tolerance=0.05) if f.rung == "fast"}
    assert found == {"speed-up": "+100.0%", "top-1": "+2.90"}


def test_a_gain_that_may_be_chance_is_called_so() -> None:
    now = ledger()
    now["arms"][1]["timing"]["speedup"] |= {"ratio": 2.05, "low": 1.9, "high": 2.2}
    now["arms"][1]["training"]["runs"] = runs(90.1, 90.5, 90.2)
    found = {f.quantity: f.text for f in compare_ledgers(ledger(), now, tolerance=0.05) if f.rung == "fast"}
    assert found == {"speed-up": "+2.5%, within the intervals", "top-1": "+0.07, within the intervals"}


@pytest.mark.parametrize(("top1", "lost"), [(99.16, False), (96.0, True)])
def test_seeds_that_agree_by_chance_make_no_loss_of_one_image(top1: float, lost: bool) -> None:
    before, now = ledger(), ledger()
    before["arms"][1]["training"]["runs"] = runs(99.44, 99.44, 99.44, images=359)
    now["arms"][1]["training"]["runs"] = runs(top1, top1, top1, images=359)
    assert any(finding.lost for finding in compare_ledgers(before, now, tolerance=0.05)) == lost


def test_brackets_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The terminal's library reads words in brackets as styles, and ends where it cannot."""
    before, now = ledger(), ledger()
    for record in (before, now):
        record["arms"][0]["name"] = record["reference"] = "base [fp32]"
    broken(now)
    now["arms"][1]["reason"] = "data.root: no images in [/data/x]"
    for name, record in (("before", before), ("now", now)):
        (tmp_path / name).write_text(json.dumps(record))
    assert check([str(tmp_path / "before"), str(tmp_path / "now")]) == 1
    shown = capsys.readouterr().out
    assert "base [fp32]" in shown
    assert "LOST: data.root: no images in [/data/x]" in shown
