"""The gate lets the same through and stops what has lost."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from pycls_fast.config.ladder import read_ladder
from pycls_fast.errors import UserError
from pycls_fast.ledger.report.gate import check, compare_ledgers
from pycls_fast.ledger.report.record import Record, Unfinished, VariantRecord, read_record
from pycls_fast.ledger.report.statistics import Speedup, geometric_mean, p_lower
from tests.unit.ledger.stand_ins import accuracy, effect, record_of, timing, variant

GATE = Path(__file__).parents[2] / "gate"


def ledger() -> Record:
    return record_of(
        variant("base", None, timing=timing([100.0, 102.0, 98.0])),
        variant("fast", "base", timing=timing([200.0, 204.0, 196.0], Speedup(2.0, 1.9, 2.1, 3))),
        accuracy=accuracy(effect("fast", "free")),
    )


Change = Callable[[Record], object]


def put(path: str, value: object) -> Change:
    """A change of a record: the value at this place."""

    def change(record: Record) -> None:
        *owners, name = path.split(".")
        owner: Any = record
        for key in owners:
            owner = owner[int(key)] if key.isdigit() else getattr(owner, key)
        setattr(owner, name, value)

    return change


def with_speed(ratio: float, low: float | None, high: float | None, rounds: int = 3) -> Change:
    return put("variants.1.timing.speedup", Speedup(ratio, low, high, rounds))


def with_effect(difference: float, error: float = 0.1) -> Change:
    return put("accuracy", accuracy(effect("fast", "undecided", difference, error)))


def broken(record: Record) -> None:
    fast = record.variants[1]
    fast.status, fast.reason, fast.timing = "failed", "it burns [here]", None


untrained = put("accuracy", None)
all_slower = put("variants.0.timing.rounds", [80.0, 81.0, 79.0])


def changed(*changes: Change) -> Record:
    record = ledger()
    for change in changes:
        change(record)
    return record


CASES: dict[str, tuple[Change, int]] = {
    "same": (lambda record: None, 0),
    "slower": (with_speed(1.5, 1.4, 1.6), 1),
    "slower within the interval": (with_speed(1.8, 1.4, 2.3), 0),
    "slower within the tolerance": (with_speed(1.92, 1.90, 1.94), 0),
    "slower in one round": (with_speed(0.2, None, None, 1), 1),
    "little slower in one round": (with_speed(1.95, None, None, 1), 0),
    "faster": (with_speed(4.0, 3.9, 4.1), 0),
    "all slower": (all_slower, 1),
    "not timed": (put("variants.1.timing", None), 1),
    "first not timed": (put("variants.0.timing", None), 1),
    "less accurate": (with_effect(-0.5), 1),
    "less accurate by chance": (with_effect(-0.2), 0),
    "less accurate with a large error": (with_effect(-0.5, 0.4), 0),
    "more accurate": (with_effect(0.5), 0),
    "breaks training": (put("accuracy", accuracy(broken={"fast": "5 of 16 failed"})), 1),
    "untrained": (untrained, 1),
    "gone": (lambda record: record.variants.pop(), 1),
    "broken": (broken, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_the_status_says_whether_something_was_lost(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, status = CASES[name]
    before, now = ledger(), changed(change)
    files = [tmp_path / "seed=1.json", tmp_path / "now.json"]
    for file, record in zip(files, (before, now), strict=True):
        file.write_text(record.model_dump_json())
    assert check(*map(str, files), tolerance=0.05, absolute=True) == status
    shown = capsys.readouterr().out
    assert ("LOST" in shown) == bool(status)
    assert ("it burns [here]" in shown) == (name == "broken")


def test_other_overrides_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An experiment's own folders may have moved; the user knows what matters."""
    files = [tmp_path / "before.json", tmp_path / "now.json"]
    for file, rate in zip(files, ("1", "2"), strict=True):
        other = changed(put("base", ["--config-name", "x", f"optim.lr={rate}"]))
        file.write_text(other.model_dump_json())
    assert check(*map(str, files), tolerance=0.05, absolute=True) == 0
    told = "note: the experiment was --config-name x optim.lr=1, now --config-name x optim.lr=2\n"
    assert capsys.readouterr().err == told


def lost(before: Record, now: Record, tolerance: float = 0.05, **named: Any) -> list[str]:
    return [each.variant for each in compare_ledgers(before, now, tolerance=tolerance, **named) if each.lost]


@pytest.mark.parametrize("change", [with_effect(-0.35), with_speed(1.84, 1.74, 1.94)])
def test_a_loss_by_chance_in_one_of_many_variants_is_none(change: Change) -> None:
    """Alone the variant has lost (p below 0.01); as one of twelve it has not."""
    before, now = ledger(), changed(change)
    assert lost(before, now) == ["fast"]
    for i in range(10):
        fast = Speedup(2.0, 1.9, 2.1, 3)
        for record in (before, now):
            other = variant(f"variant {i}", "base", timing=timing([200.0, 204.0, 196.0], fast))
            record.variants.append(VariantRecord.model_validate(other))
            record.accuracy.effects.append(effect(f"variant {i}", "free"))
    assert lost(before, now) == []


def test_what_could_not_run_or_was_not_trained_before_or_is_left_out_is_not_lost() -> None:
    assert lost(changed(broken, untrained), ledger()) == lost(changed(untrained), changed(untrained)) == []
    assert lost(changed(with_effect(-0.8)), changed(with_effect(-0.2))) == []
    assert lost(ledger(), changed(all_slower)) == ["base"]
    assert lost(ledger(), changed(all_slower), absolute=False) == []


def test_means_without_errors_are_compared_as_they_are() -> None:
    assert p_lower((0.0, 0.0, 1), (-0.2, 0.3, 8)) == pytest.approx(stats.t.cdf(-0.2 / 0.3, 8))
    assert [p_lower((0.0, 0.0, 1), (mean, 0.0, 1)) for mean in (-1.0, 0.0, 1.0)] == [0.0, 0.5, 1.0]


def texts(before: Record, now: Record, name: str = "fast") -> dict[str, str]:
    found = compare_ledgers(before, now, tolerance=0.05)
    return {each.quantity: each.row[""] for each in found if each.variant == name}


def test_a_slower_machine_is_no_loss_and_slower_code_is() -> None:
    """Whether the matrix product of the machine itself was slower by as much."""

    def first(share: float) -> dict[str, str]:
        products = [2e11, 2.04e11, 1.96e11]
        before, now = (
            put("variants.0.timing.matmul_flops_per_second", [of * flops for flops in products]) for of in (1.0, share)
        )
        return texts(changed(before), changed(all_slower, now), "base")

    assert first(0.8)["images/s per TFLOP/s"] == "+0.0%, within the intervals"
    assert first(1.0)["images/s per TFLOP/s"] == "LOST: -20.0%"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda record: setattr(record.environment, "cpu_count", 8), "different machine: not compared"),
        (lambda record: setattr(record, "device", "H200"), "different machine: not compared"),
        (lambda record: setattr(record.variants[0], "ranks", 2), "different number of ranks: not compared"),
        (lambda record: record.versions.update(torch="3"), "LOST: -20.0%"),
    ],
)
def test_the_rate_of_a_different_machine_is_not_compared(change: Change, text: str) -> None:
    assert texts(ledger(), changed(all_slower, change), "base")["images/s"] == text


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (put("config_name", "resnet"), "a different experiment (vit and resnet) cannot be compared"),
        (put("unfinished", Unfinished(done=1, of=9)), "unfinished; run the ledger's command again, which resumes it"),
        (put("variants.1.timing.images_per_second", -1.0), "(variants.1.timing.images_per_second: "),
        (with_speed(-2.0, None, None), "(variants.1.timing.speedup.ratio: "),
    ],
)
def test_mistakes(change: Change, line: str, tmp_path: Path) -> None:
    (tmp_path / "before").write_text(ledger().model_dump_json())
    (tmp_path / "now").write_text(changed(change).model_dump_json())
    with pytest.raises(UserError, match=re.escape(line)):
        check(str(tmp_path / "before"), str(tmp_path / "now"), tolerance=0.05, absolute=True)
    with pytest.raises(UserError, match="nothing to compare"):
        compare_ledgers(record_of(variant("base", None)), ledger(), tolerance=0.05)


def test_the_baseline_is_that_of_the_gates_ladder() -> None:
    """Otherwise `make gate` would miss a variant, or find all of them gone."""
    ladder = read_ladder(str(GATE / "ladder.yaml"), ())
    kept = read_record(GATE / "baseline.json")
    assert kept.ladder == ladder
    assert [each.name for each in kept.variants] == [ladder.baseline.name, *(each.name for each in ladder.variants)]
    assert [each.variant for each in kept.accuracy.effects] == [each.name for each in ladder.variants]
    assert lost(kept, kept, 0.5, absolute=False) == []


def test_the_gate_sees_a_variant_at_0_4_of_its_speed() -> None:
    """In nearly all cases, if the rounds on the machine of that day scatter by 10%."""
    kept = read_record(GATE / "baseline.json")
    draw = np.random.default_rng(0)
    found = 0
    for case in range(120):
        now, slow = kept.model_copy(deep=True), 1 + case % 3
        for place, (_, each) in enumerate(now.timed[1:], 1):
            share = 0.4 if place == slow else 1.0
            rounds = share * each.speedup.ratio * np.exp(draw.normal(0, 0.1, each.speedup.rounds))
            each.speedup = geometric_mean(rounds.tolist())
        found += lost(kept, now, 0.5, absolute=False) == [kept.variants[slow].name]
    assert found >= 0.9 * 120
