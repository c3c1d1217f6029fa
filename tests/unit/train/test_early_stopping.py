"""Which evaluation is the best."""

from __future__ import annotations

from pycls_fast.train.run import best_evaluation


def test_the_first_of_the_best() -> None:
    records = [
        {"top1": 10.0, "loss": 3.0},
        {"top1": 30.0, "loss": 2.0},
        {"top1": 30.0, "loss": 1.0},
        {"top1": 20.0, "loss": None},
        {"top1": 20.0, "loss": 1.0},
    ]
    assert best_evaluation(records, "top1") == 1
    assert best_evaluation(records, "loss") == 2
    assert best_evaluation([], "top1") is None
    assert best_evaluation([{"top1": 0.0, "loss": float("nan")}, {"top1": 0.0, "loss": 9.0}], "loss") == 1
