"""What ranks of divided models hold and exchange in a step, for a list of layouts, one after another in four ranks.

    torchrun --nproc_per_node 4 tests/integration/plan_worker.py FOLDER

Writes FOLDER/RANK.json: {layout: {"planned": bytes, "held": bytes, "exchanged": {collective: bytes}}}; planned is the
peak that the memory plan of this rank says.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pycls_fast.config import RunConfig, load_config
from pycls_fast.ledger.measure.workloads import synthetic_batch
from pycls_fast.parallel.launch import start_world
from pycls_fast.parallel.world import World
from pycls_fast.plan.layout import Layout
from pycls_fast.plan.memory_plan import MemoryPlan
from pycls_fast.plan.operators import EXCHANGES, CountWork, LiveMemory
from pycls_fast.strategies import Parallel
from pycls_fast.train.metrics import StepMemory, TrainMetrics
from tests.factories import step_of
from tests.integration.strategy_worker import divided

CPU = torch.device("cpu")
# All tensors can be divided by four, so that no shard is padded.
CLASSES, BATCH = 12, 64
COMMON = (
    *(
        "model.width=128", "model.depth=8", "model.heads=2", "model.mlp_width=512", "model.patch_size=8",
        "data=synthetic",
    ),
    *("data.image_size=64", f"data.global_batch_size={BATCH}", "augment=none", "optim=adamw", "speed.optimizer=loop"),
)  # fmt: skip
LAYOUTS = {
    f"{layout}, {layout.accumulation} x" + (", recomputed" if layout.recompute == "full" else ""): replace(
        layout, precision="fp32"
    )
    for layout in (
        Layout(replicate=4),
        Layout(shard=4),
        Layout(shard=4, accumulation=2),
        Layout(replicate=2, shard=2),
        Layout(shard=2, tensor=2),
        Layout(shard=2, tensor=2, recompute="full"),
        Layout(shard=4, expert=2),
        Layout(shard=4, expert=4),
        Layout(shard=2, tensor=2, expert=2),
        Layout(replicate=2, pipeline=2, accumulation=4),
        Layout(replicate=2, pipeline=2, accumulation=4, schedule="gpipe"),
        Layout(replicate=2, pipeline=2, accumulation=4, schedule="interleaved_1f1b"),
        Layout(replicate=2, pipeline=2, accumulation=4, schedule="interleaved_zero_bubble"),
        Layout(replicate=2, pipeline=2, accumulation=4, schedule="zbv"),
        Layout(shard=2, pipeline=2, accumulation=4),
        Layout(shard=2, pipeline=2, accumulation=4, recompute="full"),
        Layout(shard=2, pipeline=2, accumulation=4, schedule="interleaved_1f1b"),
        Layout(shard=2, pipeline=2, accumulation=4, schedule="zbv"),
        Layout(shard=2, expert=2, pipeline=2, accumulation=4),
        Layout(tensor=2, pipeline=2, accumulation=4),
        Layout(pipeline=4, accumulation=8),
    )
}


def configured(layout: Layout) -> RunConfig:
    """The run of a layout."""
    name = "vit_moe_digits" if layout.expert > 1 else "vit_digits"
    return load_config(name, [*COMMON, *layout.overrides])


def measured(world: World, layout: Layout) -> dict[str, Any]:
    """What the plan says of this rank, and what it holds and exchanges."""
    config, parts = configured(layout), layout.accumulation
    world = divided(world, config)
    images, size = BATCH // world.data_size // parts, config.data.image_size
    metrics = TrainMetrics(CPU)
    with LiveMemory() as memory:
        batch = synthetic_batch(images, size, CLASSES, erase_probability=0.0, seed=0, device=CPU)
        step = step_of(config, world, classes=CLASSES)
        # The optimizer has its state after the first.
        for index in range(2):
            memory.peak = memory.live
            step(index, [batch] * parts, metrics)
    found: Counter[str] = Counter()
    alone = StepMemory(world, compiled=False)
    with alone.counting(step.persistent_tensors), CountWork() as work:
        step(2, [batch] * parts, metrics)
    for each in work.found:
        if each.kind in EXCHANGES:
            found[each.kind] += round(each.bytes)
    planned = MemoryPlan(config, world, CLASSES).peak(parts)
    return {"planned": planned, "held": memory.peak, "counted": alone.bytes(), "exchanged": found}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with start_world("cpu", Parallel()) as ranks:
        everything = {name: measured(ranks, layout) for name, layout in LAYOUTS.items()}
    (Path(sys.argv[1]) / f"{ranks.rank}.json").write_text(json.dumps(everything))
