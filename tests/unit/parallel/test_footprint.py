"""The memory that the start table tells, against what is alive during real steps."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.ledger.measure.clocks import LiveMemory
from pycls_fast.ledger.measure.workloads import synthetic_batch
from pycls_fast.parallel import ALONE, Copies, World, footprint, place_model
from pycls_fast.parallel.mesh import make_mesh
from pycls_fast.speed import OPTIMIZERS
from pycls_fast.strategies import STRATEGIES
from pycls_fast.train.building import make_step
from pycls_fast.train.introduction import memory_per_rank
from pycls_fast.train.metrics import TrainMetrics
from tests.integration.fairscale_cpu import play_cuda

CPU = torch.device("cpu")
# Few tokens and wide blocks, so that activations are next to nothing.
WIDE = (
    *("model.width=128", "model.depth=4", "model.mlp_width=512", "model.patch_size=4", "data.image_size=8"),
    *("augment=none", "optim=adamw", "speed.optimizer=loop"),
)


def assert_held(world: World, *overrides: str) -> None:
    """The peak over whole steps is what the table says, up to activations and temporaries."""
    config = load_config("vit_digits", [*WIDE, f"data.global_batch_size={2 * world.size}", *overrides])
    switches = build.switches(config, CPU)
    batch = synthetic_batch(1, 8, 10, erase_probability=0.0, seed=0, device=CPU)
    metrics = TrainMetrics(CPU)
    with LiveMemory() as memory:
        network = place_model(build.model(config, 10, switches), world, memory_format="contiguous")
        step = make_step(config, network, world, switches, steps_per_epoch=4)
        # The optimizer has its state after the first.
        for index in range(2):
            memory.peak = memory.live
            step(index, [batch] * config.optim.accumulation_steps, metrics)
    run: Any = SimpleNamespace(
        config=config,
        world=world,
        network=network,
        step=step,
        switches=switches,
        complexity=SimpleNamespace(parameters=sum(p.numel() for p in network.parameters())),
        largest_unit=max(sum(p.numel() for p in unit.parameters()) for _, unit in network.units()),
    )
    assert memory.peak == pytest.approx(memory_per_rank(run), rel=0.1)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("optim.ema_decay=0.9",),
        ("optim.ema_decay=0.9", "optim.trainable=head"),
        ("precision=amp_bf16", "optim.accumulation_steps=2"),
        ("precision=amp_bf16", "optim.accumulation_steps=2", "optim.trainable=[head,blocks.2]"),
        ("precision=amp_bf16", "optim.accumulation_steps=2", "optim.trainable=head"),
        ("precision=bf16_params",),
        ("precision=bf16_params", "optim.ema_decay=0.9", "optim.trainable=head"),
        ("precision=fp16_master",),
        ("precision=bf16",),
    ],
)
def test_one_process_holds_what_the_table_says(overrides: tuple[str, ...]) -> None:
    assert_held(ALONE, *overrides)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("optim=sgd",),
        ("optim=sgd", "optim.momentum=0", "optim.nesterov=false"),
        ("optim=adafactor",),
        ("optim=adafactor", "optim.momentum_dtype=float32"),
        ("optim=lion",),
        ("optim=adamw",),
        ("optim=lamb",),
    ],
)
def test_optimizers_keep_what_the_table_says(overrides: tuple[str, ...]) -> None:
    config = load_config("vit_digits", [*WIDE, *overrides])
    switches = build.switches(config, CPU)
    network = build.model(config, 10, switches)
    step = make_step(config, network, ALONE, switches, steps_per_epoch=4)
    step(0, [synthetic_batch(1, 8, 10, erase_probability=0.0, seed=0, device=CPU)], TrainMetrics(CPU))
    kept = sum(
        value.nbytes
        for state in step.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    weights = sum(parameter.nbytes for parameter in network.parameters())
    # What Adafactor keeps of its second moments is a row and a column of each matrix.
    expected = OPTIMIZERS[config.optim.name].state_copies(config.optim.own())
    assert kept / weights == pytest.approx(expected, abs=0.05)


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """The first of eight ranks, whose messages go nowhere."""
    play_cuda(monkeypatch)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield World(rank=0, size=8, device=CPU, mesh=make_mesh("cpu", None, 8, datetime.timedelta(seconds=60)))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("average", ["null", "0.9"])
def test_a_rank_of_oss_holds_what_the_table_says(eight: World, average: str, accumulation: int) -> None:
    overrides = ("parallel=fairscale_sharded_ddp", f"optim.accumulation_steps={accumulation}")
    assert_held(eight, *overrides, f"optim.ema_decay={average}")


def test_footprint() -> None:
    def held(
        strategy: str, degree: int = 4, *, averaged: bool = False, trained: int | None = None, **keys: Any
    ) -> float:
        copies = Copies(strategy, degree, **keys)
        return footprint(1000, 100, copies, state_copies=2, averaged=averaged, trained=trained)

    assert held("single", 1) == held("ddp", 1) == 16_000
    # A quarter, and a block's weights and gradients with the weights of the next.
    assert held("fsdp") == 4_000 + 1_200
    assert held("fsdp", compute_bytes=2) == 4_000 + 600
    # All weights, and a block's gradients.
    assert held("fsdp", reshard_after_forward=False) == 4_000 + 4_400
    assert held("fsdp", averaged=True) == 5_000 + 1_200
    assert held("fsdp", trained=40) == 1_000 + 120 + 800 + 160
    # Weights whole, and a block's gradients on their way to their owners; all gradients where they are added up.
    oss = "fairscale_sharded_ddp"
    assert held(oss) == 4_000 + 1_000 + 400 + 2_000
    assert held(oss, trained=40) == 4_000 + 160 + 80
    assert held(oss, accumulates=True) == 8_000 + 2_000
    assert held(oss, accumulates=True, averaged=True) == 12_000 + 2_000


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("degree", [1, 4])
def test_footprint_counts_the_copies_that_autocast_keeps_whole(strategy: str, degree: int) -> None:
    def held(**keys: Any) -> float:
        return footprint(1000, 100, Copies(strategy, degree, **keys), state_copies=2)

    assert held(autocast_bytes=2) == held() + 2_000
    assert held(autocast_bytes=2, recomputes=True) == held() + 200
