"""Loss scaling: one verdict for ranks that hold parts of the gradients (the others are played), and skipped steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pycls_fast.optim import scaling
from pycls_fast.optim.scaling import ConstantScaler, RanksScaler
from tests.factories import make_optimizer


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
    dynamic = {"init_scale": 8.0, "backoff_factor": 0.25}
    scaler = (
        RanksScaler("cpu", ranks=[group], **dynamic)
        if constant is None
        else ConstantScaler("cpu", constant, ranks=[group])
    )
    scaler.scale(torch.ones(()))
    weight.grad = None if gradient is None else torch.tensor(8.0 * gradient)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert asked == [(torch.distributed.ReduceOp.MAX, group)]
    return weight.item() != 0.0, scaler.get_scale()


@pytest.mark.parametrize("saved_after", ["its first step", "no step"])
def test_a_saved_scale_goes_on_under_the_settings_of_now(saved_after: str) -> None:
    """It grows after this scaler's interval, by its factor; the 5 steps of the one before count as far as they can."""
    saved = {"scale": 32.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 5}
    scaler = RanksScaler("cpu", init_scale=8.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=3)
    if saved_after == "its first step":
        scaler.scale(torch.ones(()))
    scaler.load_state_dict(saved)
    # That of a run without scaling.
    scaler.load_state_dict({})
    assert scaler.get_scale() == 32.0
    weight = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scales = []
    for gradient in (1.0, 1.0, 1.0, float("inf")):
        scaler.scale(torch.ones(()))
        weight.grad = torch.tensor(gradient)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [128.0, 128.0, 128.0, 32.0]
    constant = ConstantScaler("cpu", 16.0)
    constant.load_state_dict(saved)
    assert constant.get_scale() == 16.0


@pytest.mark.parametrize(("constant", "lowered"), [(None, 2.0), (8.0, 8.0)])
def test_all_skip_what_one_has_to(monkeypatch: pytest.MonkeyPatch, constant: float | None, lowered: float) -> None:
    assert one_step(monkeypatch, constant, 1.0, 0.0) == (True, 8.0)
    assert one_step(monkeypatch, constant, 1.0, 1.0) == (False, lowered)
    assert one_step(monkeypatch, constant, float("inf"), 0.0) == (False, lowered)


def test_a_rank_without_gradients_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    assert one_step(monkeypatch, None, None, 0.0) == (False, 8.0)
    assert one_step(monkeypatch, None, None, 1.0) == (False, 2.0)


@pytest.mark.parametrize("implementation", ["loop", "foreach", "fused"])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_first_step_that_is_skipped_leaves_no_trace(name: str, implementation: str) -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(300), [torch.full((300,), torch.inf), torch.randn(300), torch.randn(300)]
    ends = []
    for skipped in (False, True):
        # What the allocator gives back is what was there: not a number.
        del_me = [torch.full((300,), torch.nan) for _ in range(8)]
        del del_me
        parameter = nn.Parameter(start.clone())
        groups = [{"params": [parameter], "weight_decay": 0.1}]
        optimizer = make_optimizer(name, groups, lr=0.1, implementation=implementation)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
        for gradient in gradients if skipped else gradients[1:]:
            # scale() is what makes the scaler's tensors.
            scaler.scale(torch.ones(()))
            parameter.grad = gradient * scaler.get_scale()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        ends.append(parameter.detach().clone())
    assert torch.isfinite(ends[1]).all()
    # A power of two scales without rounding.
    assert torch.equal(ends[0], ends[1])
