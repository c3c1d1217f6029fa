"""One verdict for ranks that hold parts of the gradients; what the other ranks say is played here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pycls_fast.optim import loss_scaler, scaling


def one_step(monkeypatch: pytest.MonkeyPatch, constant: float | None, gradient: float | None, others: float) -> Any:
    """(whether the step was made, the scale after it), when another rank's flag is `others`."""
    asked: list[object] = []
    group: Any = object()

    def all_reduce(flag: Tensor, op: Any, group: object) -> None:
        asked.append((op, group))
        flag.clamp_(min=others)

    monkeypatch.setattr(scaling.dist, "all_reduce", all_reduce)
    weight = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = loss_scaler("cpu", enabled=True, constant=constant, start=8.0, backoff=0.25, ranks=group)
    scaler.scale(torch.ones(()))
    weight.grad = None if gradient is None else torch.tensor(8.0 * gradient)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert asked == [(torch.distributed.ReduceOp.MAX, group)]
    return weight.item() != 0.0, scaler.get_scale()


@pytest.mark.parametrize(("constant", "lowered"), [(None, 2.0), (8.0, 8.0)])
def test_all_skip_what_one_has_to(monkeypatch: pytest.MonkeyPatch, constant: float | None, lowered: float) -> None:
    assert one_step(monkeypatch, constant, 1.0, 0.0) == (True, 8.0)
    assert one_step(monkeypatch, constant, 1.0, 1.0) == (False, lowered)
    assert one_step(monkeypatch, constant, float("inf"), 0.0) == (False, lowered)


def test_a_rank_without_gradients_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    assert one_step(monkeypatch, None, None, 0.0) == (False, 8.0)
    assert one_step(monkeypatch, None, None, 1.0) == (False, 2.0)
