"""The memory plan on paper, and against real processes; writes docs/results/memory_plan.md.

    python benchmarks/memory_plan.py --paper
    python benchmarks/memory_plan.py [--models vit_s16 resnet50] [--only ddp fsdp]

On paper: the microbatches that `optim.accumulation_steps=auto` takes on GPUs of several sizes; none is needed.
Measured: whole training steps on the CPU over gloo with a few images per rank. The peak is each process's resident
memory above that before the model was built; the allocator is set to return freed blocks to the system. ddp
runs on 2 ranks: its memory per rank does not depend on their number.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from provenance import provenance_lines

from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.errors import UserError
from pycls_fast.ledger.measure.workloads import synthetic_batch
from pycls_fast.plan.memory_plan import MemoryPlan
from pycls_fast.plan.memory_plan import gigabytes as readable
from pycls_fast.train.assemble import make_step
from pycls_fast.train.metrics import TrainMetrics

PAGE = Path(__file__).parents[1] / "docs" / "results" / "memory_plan.md"
PAPER = ("vit_h16", "vit_b16", "resnet50")
GIGABYTES, RANKS = (24, 40, 80, 141), (1, 8)
STRATEGIES = {
    "single": (1, ["parallel=single"]),
    "ddp": (2, ["parallel=ddp"]),
    "fsdp": (4, ["parallel=fsdp"]),
    "hsdp": (4, ["parallel=hsdp", "parallel.shard_degree=2"]),
}
STEPS, IMAGES = 3, 8


def paper() -> Iterator[str]:
    """The plan's choices as lines of Markdown."""
    yield f"| experiment | ranks | {' | '.join(f'{gigabytes} GB' for gigabytes in GIGABYTES)} |"
    yield f"|---|---{'|---' * len(GIGABYTES)}|"
    for name in PAPER:
        for ranks in RANKS:
            config = load_config(name, ["data=synthetic", "precision=amp_bf16"])
            made = MemoryPlan.imagined(config, torch.device("cuda"), ranks)
            yield f"| {name} | {ranks} | {' | '.join(choice(made, gigabytes * 1e9) for gigabytes in GIGABYTES)} |"


def choice(made: MemoryPlan, memory: float) -> str:
    """What the plan takes on a device, or how the step would fit elsewhere."""
    steps = made.fewest_microbatches(memory)
    if steps is None:
        return f"needs {readable(made.peak(made.microbatch_counts()[0]))}; {made.way_out(memory)}"
    return f"{steps} x {made.per_rank // steps}: {readable(made.peak(steps))}"


def highest_resident() -> int:
    """The peak of this process's resident memory since `forget_peak`, in bytes."""
    (kilobytes,) = re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(kilobytes) * 1024


def forget_peak() -> None:
    """Let the peak begin at what is resident now (man 5 proc_pid_clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def measure(model: str, overrides: list[str]) -> dict[str, float]:
    """The plan for this rank, and its real peak."""
    torch.set_num_threads(1)
    common = ["data=synthetic", "precision=fp32", "augment=none", "optim.accumulation_steps=1", "speed.compile=off"]
    config = load_config(model, [*common, "speed.allocator=default", "schedule.warmup_epochs=0", *overrides])
    with build.world(config) as world:
        switches = build.switches(config, world.device)
        planned = MemoryPlan(config, world).peak(1)
        # Libraries take their memory.
        layer = torch.nn.Conv2d(3, 8, 3)
        layer(torch.randn(2, 3, 32, 32)).sum().backward()
        size = config.data.image_size
        forget_peak()
        before = highest_resident()
        network = build.place(config, build.trained_model(config, 1000, switches, world), world, switches)
        step = make_step(config, network, world, switches, steps_per_epoch=10)
        batch = synthetic_batch(IMAGES, size, 1000, erase_probability=0.0, seed=world.rank, device=world.device)
        metrics = TrainMetrics(world.device)
        for index in range(STEPS):
            step(index, [batch], metrics)
        return {"planned": planned, "peak": highest_resident() - before}


def launch(model: str, overrides: list[str], ranks: int) -> dict[str, float]:
    """The maximum of each figure over the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--models", model, "--into", folder, *(f"--set={override}" for override in overrides)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
        command = [sys.executable, *launcher, str(ranks), __file__, *arguments]
        subprocess.run(command, env=environment, check=True)
        found = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    return {key: max(figures[key] for figures in found) for key in found[0]}


def measured(models: list[str], only: list[str]) -> Iterator[str]:
    """The plan against real processes as lines of Markdown."""
    yield "| experiment | strategy | ranks | plan, MB | process, MB | plan / process |"
    yield "|---|---|---|---|---|---|"
    for model in models:
        for name in only:
            ranks, overrides = STRATEGIES[name]
            row = launch(model, [*overrides, f"data.global_batch_size={IMAGES * ranks}"], ranks)
            planned, peak = row["planned"], row["peak"]
            line = f"| {model} | {name} | {ranks} | {planned / 1e6:,.0f} | {peak / 1e6:,.0f} | {planned / peak:.3f} |"
            print(line, flush=True)
            yield line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--paper", action="store_true", help="print the choices on paper, and stop")
    parser.add_argument("--models", nargs="+", default=["vit_s16", "resnet50"])
    parser.add_argument("--only", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--out", type=Path, default=PAGE)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--set", action="append", default=[], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.into is not None:
        figures = measure(arguments.models[0], arguments.set)
        (arguments.into / f"{os.environ['RANK']}.json").write_text(json.dumps(figures))
        return
    on_paper = []
    for line in paper():
        print(line, flush=True)
        on_paper.append(line)
    if arguments.paper:
        return
    text = [
        "# The memory plan",
        "",
        *provenance_lines(torch.device("cpu")),
        "",
        "## On paper",
        "",
        "Microbatches x images of a rank that `optim.accumulation_steps=auto` takes on GPUs of these sizes, the fewest",
        "whose peak is at most 92% of the memory, and that peak. precision=amp_bf16, speed=fast, the recipe's batch.",
        "",
        *on_paper,
        "",
        "## Against processes",
        "",
        f"{STEPS} steps in float32 with {IMAGES} images of 224 pixels per rank; processes of one thread on one CPU,",
        "over gloo. The process's peak is resident memory above that before the model was built.",
        "",
        *measured(arguments.models, arguments.only),
    ]
    arguments.out.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
