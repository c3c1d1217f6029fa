"""Numbers of training: read in every step or once an interval, they are the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pycls_fast.parallel.world import ALONE, World
from pycls_fast.train.metrics import TrainMetrics
from tests.unit.train.test_step import batch
from tests.unit.train.test_step import made_of_graphs as made

CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "amp_bf16", "fp16_master"])
def test_twenty_steps_read_step_by_step_give_the_same_bits(precision: str) -> None:
    found: list[tuple[list[dict[str, float]], dict[str, Tensor]]] = []
    for read in ("step", "interval"):
        # With a scale that overflows at first: skipped steps have no norm that counts.
        scale = ["precision.loss_scale_start=1e9"] if precision == "fp16_master" else []
        step, network, _ = made("vit", f"precision={precision}", *scale, graphed=False)
        metrics = TrainMetrics(CPU, read=read)
        numbers = []
        for position in range(20):
            step(position, [batch(position)], metrics)
            if position % 4 == 3:
                numbers.append(metrics.read(ALONE))
        found.append((numbers, {name: value.clone() for name, value in network.state_dict().items()}))
    (expected, plain), (numbers, state) = found
    assert repr(numbers) == repr(expected)
    assert len({each["loss"] for each in numbers}) == 5
    assert sum(each["skipped_steps"] for each in numbers) == (
        0 if precision != "fp16_master" else pytest.approx(10, abs=9)
    )
    assert all(torch.equal(state[name], plain[name]) for name in plain)


def test_the_rank_that_waited_longest_for_data_counts() -> None:
    """The others wait for it, so that their own numbers hide what the step waits for."""

    class Three(World):
        def sum(self, values: Tensor) -> Tensor:
            # These two waited, and trained as this one.
            return torch.cat([3 * values[:5], values[5:] + torch.tensor([0.25, 2.0, 0.0])])

    metrics = TrainMetrics(CPU)
    metrics.add_loss(torch.tensor(3.0))
    metrics.add_step(torch.tensor(1.0))
    numbers = metrics.read(Three(2, 3, CPU), waited=0.5)
    assert numbers["waited"] == 2.0
    assert numbers["loss"] == 3.0
    assert metrics.read(ALONE, waited=0.5)["waited"] == 0.5
