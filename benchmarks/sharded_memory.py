"""Memory per rank for weights, gradients and optimizer state by strategy; writes docs/results/sharded_memory.md.

    python benchmarks/sharded_memory.py [--model vit_l16] [--ranks 4]

Whole training steps of AdamW on the CPU, with one image of 32 pixels per rank, so that activations are negligible.
Counts the bytes of persistent tensors, and samples each process's resident memory during building and training, above
that before the model was built. The allocator is set to return freed blocks to the system. ddp runs with `--ddp-ranks`
(2): its memory per rank does not depend on their number, and four ranks take 20 GB for ViT-L.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.ledger.measure.workloads import synthetic_batch
from pycls_fast.optim import local
from pycls_fast.parallel import place_model
from pycls_fast.train.building import make_step
from pycls_fast.train.environment import provenance_lines
from pycls_fast.train.metrics import TrainMetrics

PAGE = Path(__file__).parents[1] / "docs" / "results" / "sharded_memory.md"
STRATEGIES = {
    "ddp": ["parallel=ddp"],
    "fsdp, ZeRO-2": ["parallel=fsdp", "parallel.reshard_after_forward=false"],
    "fsdp, ZeRO-3": ["parallel=fsdp"],
    "hsdp, 2 x 2": ["parallel=hsdp", "parallel.shard_degree=2"],
}
STEPS = 3


def resident() -> int:
    """Resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """Peak resident memory inside the context, sampled by a thread every few milliseconds."""

    def __init__(self) -> None:
        self.bytes = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.002):
                self.bytes = max(self.bytes, resident())

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def measure(model: str, overrides: list[str]) -> dict[str, Any]:
    """Measure the bytes of this rank."""
    torch.set_num_threads(1)
    config = load_config(
        model,
        [
            *overrides,
            "data=synthetic",
            "data.image_size=32",
            "precision=fp32",
            "optim=adamw",
            "optim.ema_decay=null",
            "optim.accumulation_steps=1",
            "augment=none",
            "speed.optimizer=fused",
            "model.drop_path=0",
        ],
    )
    with build.world(config) as world:
        switches = build.switches(config, world.device)
        batch = synthetic_batch(1, 32, 1000, erase_probability=0.0, seed=world.rank, device=world.device)
        before = resident()
        building, training = Peak(), Peak()
        with building.watching():
            network = build.model(config, 1000, switches, empty=build.is_sharded(config, world))
            units = network.units()
            sizes = {
                "parameters": sum(p.numel() for p in network.parameters()),
                "largest_unit": max(sum(p.numel() for p in unit.parameters()) for _, unit in units),
            }
            network = place_model(network, world, memory_format="contiguous")
            step = make_step(config, network, world, switches, steps_per_epoch=10)
        metrics = TrainMetrics(world.device)
        with training.watching():
            for index in range(STEPS):
                step(index, [batch], metrics)
        state = [leaf for leaf in tree_leaves(dict(step.optimizer.state)) if isinstance(leaf, torch.Tensor)]
        held = {id(tensor): local(tensor) for tensor in (*step.parameters, *state)}
        return {
            **sizes,
            # A gradient is as large as its parameter, and freed after the step.
            "counted": sum(t.nbytes for t in held.values()) + sum(local(p).nbytes for p in step.parameters),
            "building": building.bytes - before,
            "training": training.bytes - before,
        }


def launch(model: str, overrides: list[str], ranks: int) -> dict[str, Any]:
    """The maximum of each figure over the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--model", model, "--into", folder, *(f"--set={override}" for override in overrides)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
        subprocess.run(
            [sys.executable, *launcher, str(ranks), __file__, *arguments],
            env=environment,
            check=True,
        )
        found = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    return {key: max(figures[key] for figures in found) for key in found[0]} | {"ranks": ranks}


def page(model: str, rows: dict[str, dict[str, Any]]) -> str:
    """The results as Markdown."""
    ddp = rows["ddp"]
    unit = 4 * ddp["largest_unit"]
    lines = [
        "# Memory per rank by strategy",
        "",
        *provenance_lines(torch.device("cpu")),
        "",
        "AdamW in float32; processes of one thread each on one CPU, connected by gloo.",
        "Counted: a rank's weights, gradients and optimizer state. Peaks: resident memory above that before the",
        f"model was built, the maximum over the ranks, during building and during {STEPS} steps with one image of 32",
        "pixels per rank, so that activations are negligible; they include gathered blocks (weights and gradients, and",
        "the next block's weights), communication buffers and temporaries. ddp needs the same on any number of ranks.",
        "",
        f"{model}: {ddp['parameters']:,} parameters ({_mb(4 * ddp['parameters'])} MB in float32), the largest block "
        f"{ddp['largest_unit']:,} ({_mb(unit)} MB).",
        "",
        "| strategy | ranks | counted, MB | of ddp | peak of building, MB | peak of training, MB | of ddp |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        lines.append(
            f"| {name} | {row['ranks']} | {_mb(row['counted'])} | {row['counted'] / ddp['counted']:.1%} "
            f"| {_mb(row['building'])} | {_mb(row['training'])} | {row['training'] / ddp['training']:.1%} |"
        )
    return "\n".join(lines) + "\n"


def _mb(count: float) -> str:
    return f"{count / 1e6:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="vit_l16")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--ddp-ranks", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=list(STRATEGIES))
    parser.add_argument("--out", type=Path, default=PAGE)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--set", action="append", default=[], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.into is not None:
        figures = measure(arguments.model, [*arguments.set, f"data.global_batch_size={os.environ['WORLD_SIZE']}"])
        (arguments.into / f"{os.environ['RANK']}.json").write_text(json.dumps(figures))
        return
    rows = {}
    for name in arguments.only:
        started = time.monotonic()
        rows[name] = launch(
            arguments.model, STRATEGIES[name], arguments.ddp_ranks if name == "ddp" else arguments.ranks
        )
        print(f"{name}: {rows[name]} ({time.monotonic() - started:.0f} s)", flush=True)
    arguments.out.write_text(page(arguments.model, rows))


if __name__ == "__main__":
    main()
