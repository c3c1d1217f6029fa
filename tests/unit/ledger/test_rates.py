"""Rates agree with the speed-ups in their row."""

from __future__ import annotations

from typing import Any

import pytest

from pycls_fast.ledger.plan import Arm
from pycls_fast.ledger.rates import compare_speed, with_rates
from pycls_fast.published import IMAGENET_TRAINING_IMAGES

Record = dict[str, Any]


def timing(rounds: list[float], times: list[float] | None = None) -> Record:
    # The median over all steps, which is not the mean of the rounds.
    return {
        "images_per_second": 50.0, "flops_per_second": 500.0, "rounds": rounds, "paired_rounds": [],
        "times": times or [float(i) for i in range(len(rounds))],
    }  # fmt: skip


def arms(*names: str) -> list[Arm]:
    return [Arm(name, (), 1, before=names[i - 1] if i else None) for i, name in enumerate(names)]


def test_rates_are_geometric_means() -> None:
    found = with_rates(timing([10.0, 40.0]), ranks=2)
    assert found["images_per_second"] == pytest.approx(20.0)
    assert found["images_per_second_per_rank"] == pytest.approx(10.0)
    assert found["flops_per_second"] == pytest.approx(200.0)
    assert found["imagenet_epoch_seconds"] == pytest.approx(IMAGENET_TRAINING_IMAGES / 20)
    # Once more, it is the same.
    again = with_rates(found, ranks=2)
    assert {key: again[key] for key in ("images_per_second", "flops_per_second")} == pytest.approx(
        {key: found[key] for key in ("images_per_second", "flops_per_second")}
    )
    assert with_rates({**timing([10.0, 40.0]), "flops_per_second": None}, 1)["flops_per_second"] is None


def test_the_quotient_of_two_rates_is_the_speedup() -> None:
    plan = arms("a", "b", "c")
    rounds = {"a": [100.0, 80.0, 120.0], "b": [130.0, 90.0, 170.0], "c": [70.0, 95.0, 101.0]}
    records = {name: {"timing": with_rates(timing(of), 1)} for name, of in rounds.items()}
    assert compare_speed(plan, records, [0.0]) == {}
    rates = {name: record["timing"]["images_per_second"] for name, record in records.items()}
    for name, before in (("b", "a"), ("c", "b")):
        found = records[name]["timing"]
        assert found["speedup"]["ratio"] == pytest.approx(rates[name] / rates["a"])
        assert found["speedup_before"]["ratio"] == pytest.approx(rates[name] / rates[before])


def test_only_rounds_of_the_same_start_count() -> None:
    records = {
        "a": {"timing": timing([100.0, 100.0], [1.0, 11.0])},
        "b": {"timing": timing([1.0, 130.0], [12.0, 13.0])},
    }
    compare_speed(arms("a", "b"), records, [0.0, 10.0])
    found = records["b"]["timing"]
    assert (found["paired_rounds"], found["images_per_second"]) == ([1], pytest.approx(130.0))
    assert found["speedup"]["ratio"] == pytest.approx(1.3)
