"""From turns to rates, spreads, shares and ratios, on numbers that are known."""

from __future__ import annotations

from typing import Any

import pytest

from pycls_fast.ledger.parts import PartName, Turn
from pycls_fast.ledger.records import part_record, speed_comparison

# Two turns of three steps, one of them with a hiccup.
TURNS = [
    Turn((1.0, 2.0, 3.0), 6.0, waited=1.5, first_batch=0.5),
    Turn((4.0, 5.0, 21.0), 30.0, waited=7.5, first_batch=0.7),
]


def record(name: PartName, turns: list[Turn], images_per_step: int = 70, *, frozen: bool = False) -> dict[str, Any]:
    return part_record(
        name,
        turns,
        images_per_step=images_per_step,
        forward_flops_per_image=1000,
        matmul_flops_per_second=1e6,
        memory_peak_bytes=123,
        frozen=frozen,
    )


@pytest.mark.parametrize("name", ["train", "inference"])
def test_steps_that_compute_are_samples(name: PartName) -> None:
    found = record(name, TURNS)
    assert found["step_seconds_p50"] == 3.5
    assert found["images_per_second"] == 20.0
    assert found["step_seconds_mean"] == 6.0
    assert found["samples"] == 6
    assert found["turn_seconds"] == [2.0, 10.0]
    assert found["step_seconds_each"] == [[1.0, 2.0, 3.0], [4.0, 5.0, 21.0]]
    assert "data_wait_fraction" not in found


@pytest.mark.parametrize("name", ["loader", "both"])
def test_steps_that_wait_for_bursts_count_by_turns(name: PartName) -> None:
    # Four workers whose batches arrive together: three waits of nothing, then a long one.
    bursts = [
        Turn((0.0, 0.0, 0.0, 8.0), 8.0, first_batch=1.0),
        Turn((0.0, 0.0, 0.0, 12.0), 12.0, first_batch=3.0),
    ]
    found = record(name, bursts, images_per_step=10)
    assert found["step_seconds_p50"] == 2.5
    assert found["images_per_second"] == 4.0
    assert found["samples"] == 2
    assert found["first_batch_seconds_p50"] == 2.0


def test_training_is_three_forward_passes() -> None:
    train, inference = record("train", TURNS), record("inference", TURNS)
    assert train["flops_per_second"] == 3 * 1000 * 20.0
    assert train["share_of_matmul"] == pytest.approx(0.06)
    assert inference["flops_per_second"] == 1000 * 20.0
    assert inference["share_of_matmul"] == pytest.approx(0.02)
    assert "flops_per_second" not in record("loader", TURNS)


@pytest.mark.parametrize("name", ["train", "both"])
def test_the_backward_pass_of_a_frozen_network_is_not_guessed(name: PartName) -> None:
    found = record(name, TURNS, frozen=True)
    assert not {"flops_per_second", "share_of_matmul"} & set(found)
    assert record("inference", TURNS, frozen=True) == record("inference", TURNS)


def test_waiting_is_a_share_of_all_the_time() -> None:
    assert record("both", TURNS)["data_wait_fraction"] == 9.0 / 36.0


def test_comparison_pairs_turns_and_counts_images_not_steps() -> None:
    # Half the batch in a quarter and in a fifth of the time.
    small = [Turn((0.5, 0.5), 1.0), Turn((2.0, 2.0), 4.0)]
    reference = {"name": "a", "train": record("train", [Turn((2.0, 2.0), 4.0), Turn((10.0, 10.0), 20.0)], 64)}
    variant = {"name": "b", "train": {**record("train", small, 32), "memory_peak_bytes": 246}}
    found = speed_comparison("train", reference, variant)
    assert found["pairs"] == [2.0, 2.5]
    assert found["speedup_p50"] == 2.25
    assert (found["variant"], found["reference"]) == ("b", "a")
    assert found["speedup_low"] is None
    assert found["memory_ratio"] == 2.0


def test_comparison_has_an_interval_from_six_pairs_on() -> None:
    turns = [Turn((s,), s) for s in (1.0, 2.0, 4.0, 1.0, 2.0, 4.0)]
    reference = {"name": "a", "train": record("train", [Turn((4.0,), 4.0)] * 6)}
    found = speed_comparison("train", reference, {"name": "b", "train": record("train", turns)})
    assert (found["speedup_low"], found["speedup_high"]) == (1.0, 4.0)
