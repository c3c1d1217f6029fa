"""Counts of what float16 cannot hold, on values whose fate is known, and on a short training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from pycls_fast.config import load_config
from pycls_fast.errors import UserError
from pycls_fast.ledger.measure.numerics import LayerCounts, Watch, count_gradients
from tests.factories import config_of
from tests.integration.runs import TINY

CPU = torch.device("cpu")


def counted(*values: float, scale: float = 1024.0) -> dict[str, object]:
    counts = LayerCounts.empty(scale, CPU)
    for value in values:
        counts.add_gradient(torch.tensor([value]))
    return counts.record()


def test_gradients_around_float16s_limits() -> None:
    """2^-24 is its smallest number, 2^-25 rounds to even: to zero; 2^-14 is its smallest normal one."""
    record = counted(0.0, 2.0**-24, -(2.0**-25), 2.0**-34, 2.0**-36, 2.0**-14, -(2.0**-15), 2.0**6)
    assert (record["gradients"], record["zero"]) == (8, 1)
    assert record["exponents"] == {"-36": 1, "-34": 1, "-25": 1, "-24": 1, "-15": 1, "-14": 1, "6": 1}
    assert record["below_subnormal"] == pytest.approx(3 / 7)
    # Times 2^10.
    assert record["below_subnormal_scaled"] == pytest.approx(1 / 7)
    assert record["below_normal"] == pytest.approx(5 / 7)
    assert record["below_normal_scaled"] == pytest.approx(3 / 7)
    assert record["overflow_scaled"] == pytest.approx(1 / 7)


def test_ends_of_the_histogram() -> None:
    assert counted(2.0**-100, 1.9 * 2.0**-60, 3.0 * 2.0**30, 1.5)["exponents"] == {"-60": 2, "0": 1, "16": 1}


def test_updates_around_half_a_unit_in_the_last_place() -> None:
    """Between 1 and 2 float16 numbers are 2^-10 apart and bfloat16 numbers 2^-7."""
    counts = LayerCounts.empty(1.0, CPU)
    before = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0])
    counts.add_update(before, before + torch.tensor([0.0, 2.0**-12, 1.5 * 2.0**-11, 1.5 * 2.0**-8, 0.1]))
    record = counts.record()
    assert record["updates"] == 4
    assert record["updates_lost_float16"] == 1 / 4
    assert record["updates_lost_bfloat16"] == 2 / 4


def test_layers_and_their_sum() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    watch = Watch(network, 1.0)
    before = network[0].weight.detach().clone()
    for _ in range(2):
        with watch.around(optimizer):
            network(torch.randn(5, 4)).sum().backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1e-30)
            optimizer.step()
            optimizer.zero_grad()
    assert list(watch.layers()) == ["0", "1"]
    assert watch.layers()["0"]["gradients"] == 2 * 15
    total = watch.total().record()
    assert total["gradients"] == 2 * (15 + 8)
    # Counted before they were clipped to nothing, and only inside.
    assert total["below_subnormal"] == 0
    assert total["updates"] == 0
    assert torch.equal(network[0].weight, before)
    network(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    assert watch.total().record()["gradients"] == 46


def test_a_short_training(tmp_path: Path, digits: Path) -> None:
    output = tmp_path / "g.json"
    overrides = [*TINY, f"data.root={digits}", "data.num_workers=0"]
    config = config_of(*overrides)
    assert count_gradients(config, steps=2, warmup_steps=2, loss_scale=4096, output=str(output)) == 0
    record = json.loads(output.read_text())
    parameters = record["parameters"]
    assert record["total"]["gradients"] == 2 * parameters
    assert sum(layer["gradients"] for layer in record["layers"].values()) == 2 * parameters
    assert record["total"]["below_subnormal_scaled"] < record["total"]["below_subnormal"] < 0.5
    assert 0 < record["total"]["updates_lost_float16"] < record["total"]["updates_lost_bfloat16"] < 1
    assert sum(record["total"]["exponents"].values()) == 2 * parameters - record["total"]["zero"]
    with pytest.raises(UserError, match=r"^precision: fp16_master rounds gradients before they are counted; use"):
        count_gradients(
            load_config("vit_digits", [*overrides, "precision=fp16_master"]),
            steps=1, warmup_steps=0, loss_scale=1, output=str(output),
        )  # fmt: skip
