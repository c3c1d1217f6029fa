"""The planner against what others measured, and against runs here; writes docs/results/plan.md.

    python benchmarks/plan.py TABLES [--every 1] [--cache FILE]

TABLES is a folder with timm's tables (`results/` of huggingface/pytorch-image-models): training with AMP on an RTX
3090 (NCHW, NHWC), inference on an RTX 4090 and on a CPU. The constants of each table are fitted to half of the
families; errors are of the other half. Nothing is computed: models are
built on the meta device.
"""

from __future__ import annotations

import argparse
import csv
import gc
import pickle
import random
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pycls_fast import plan
from pycls_fast.config import load_config
from pycls_fast.parallel import keep_in_float32
from pycls_fast.plan.activations import materialise
from pycls_fast.plan.live_memory import LiveMemory
from pycls_fast.plan.memory_plan import USABLE
from pycls_fast.plan.time import Accelerator, Kernels, errors, fitted
from pycls_fast.plan.work import CountWork, Work
from pycls_fast.train.environment import provenance_lines

PAGE = Path(__file__).parents[1] / "docs" / "results" / "plan.md"
TABLES = {
    "training, RTX 3090, NCHW": ("benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv", "rtx3090"),
    "training, RTX 3090, NHWC": ("benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv", "rtx3090"),
    "inference, RTX 4090, compiled": ("benchmark-infer-amp-nchw-pt291-cu128-4090-dynamo.csv", "rtx4090"),
    "inference, CPU, float32, compiled": ("benchmark-infer-fp32-nchw-pt240-cpu-i9_10940x-dynamo.csv", "i9_10940x"),
}
# timm's batches: 512, and what it tries after each time that memory runs out.
BATCHES = (512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
# Intel's data sheet: 14 cores at 3.3 GHz with two AVX-512 units of 16 multiply-adds; four channels of DDR4-2933.
I9 = Accelerator(
    memory=64e9,
    flops={2: 2.9e12, 4: 2.9e12},
    bandwidth=94e9,
    efficiency={"product": 0.5, "convolution": 0.4, "grouped": 0.2, "depthwise": 0.5, "pass": 0.5},
    kernel=1e-5,
)
# SGD with momentum reads or writes 11 tensors for each parameter tensor, with 3 kernels; gradients are set to zero.
SGD_PASSES, SGD_KERNELS = 11, 3


@dataclass(frozen=True)
class Row:
    """A row of a table."""

    model: str
    size: int
    batch: int
    seconds: float

    @property
    def family(self) -> str:
        """The first letters of the name."""
        found = re.match(r"[a-z]+", self.model.removeprefix("tf_"))
        return found.group() if found else self.model


def rows_of(file: Path) -> Iterator[Row]:
    """The rows of a table."""
    kind = "train" if "-train-" in file.name else "infer"
    with file.open() as lines:
        for row in csv.DictReader(lines):
            batch = int(row[f"{kind}_batch_size"])
            seconds = batch / float(row[f"{kind}_samples_per_sec"])
            yield Row(row["model"], int(row[f"{kind}_img_size"]), batch, seconds)


def passes(row: Row, images: int, *, trains: bool, half: bool) -> tuple[int, list[Work], Any]:
    """Peak of a forward (and backward) pass of one of timm's models besides its weights, its kernels, the model."""
    with torch.device("meta"):
        network = timm.create_model(row.model, num_classes=1000)
    network.train(trains)
    casts = torch.autocast("cpu", torch.bfloat16) if half else nullcontext()
    with FakeTensorMode(allow_non_fake_inputs=True):
        materialise(network.modules(), False)
        images_BCHW = torch.empty(images, 3, row.size, row.size)
        known = [*network.parameters(), *network.buffers()]
        with LiveMemory(known) as memory, CountWork() as work, torch.set_grad_enabled(trains):
            with casts:
                logits_BK = network(images_BCHW)
            if trains:
                loss = torch.nn.functional.cross_entropy(logits_BK.float(), torch.empty(images, dtype=torch.long))
                del logits_BK
                loss.backward()
    return memory.peak, work.found, network


@dataclass(frozen=True)
class Traced:
    """A model: the kernels of a step with two numbers of images, and the bytes of a step by their number."""

    images: tuple[int, int]
    few: Kernels
    many: Kernels
    fixed: float
    each: float

    def kernels(self, images: int) -> Kernels:
        """The kernels with so many images."""
        return self.few.between(self.many, (images - self.images[0]) / (self.images[1] - self.images[0]))

    def peak(self, images: int) -> float:
        """Bytes of a training step."""
        return self.fixed + self.each * images


def traced(row: Row, *, trains: bool, half: bool) -> Traced:
    """A row's model on fake tensors; timm had only explicit attention with PyTorch 1.12."""
    timm.layers.set_fused_attn(not trains)
    few, many = (8, 16) if trains else (row.batch, row.batch)
    peak, works, network = passes(row, few, trains=trains, half=half)
    if not trains:
        return Traced((few, few + 1), Kernels.of(works), Kernels.of(works), 0.0, 0.0)
    larger, more, _ = passes(row, many, trains=trains, half=half)
    weights = [parameter.nbytes for parameter in network.parameters()]
    update = [Work("pass", SGD_PASSES / SGD_KERNELS * each) for each in weights for _ in range(SGD_KERNELS)]
    # Weights, momentum, gradients, and the input, which the step keeps.
    slope = (larger - peak) / (many - few)
    fixed = 3.0 * sum(weights) + peak - few * slope
    return Traced(
        (few, many), Kernels.of([*works, *update]), Kernels.of([*more, *update]), fixed, slope + 12.0 * row.size**2
    )


Table = tuple[str, Accelerator, bool, list[tuple[Row, Traced]]]


def tried(row: Row, **how: bool) -> Traced | None:
    """A row's model; None, with a line that says why, if today's timm cannot build or trace it."""
    try:
        return traced(row, **how)
    except (RuntimeError, TypeError, AssertionError, AttributeError, KeyError, ValueError) as error:
        print(f"left out: {row.model} at {row.size} px ({type(error).__name__}: {str(error).partition(chr(10))[0]})")
        return None
    finally:
        gc.collect()


def summary(name: str, found: np.ndarray[Any, Any]) -> str:
    """A line of errors."""
    sizes = np.abs(found)
    return (
        f"| {name} | {len(found)} | {np.median(sizes):.1%} | {np.quantile(sizes, 0.9):.1%} | {sizes.max():.0%} "
        f"| {np.mean(sizes <= 0.25):.1%} | {np.median(found):+.1%} |"
    )


def time_lines(known: list[Table]) -> Iterator[str]:
    """The errors of time as lines of Markdown, and the constants that were fitted."""
    yield "| table | rows | median | 90% | worst | within 25% | median with its sign |"
    yield "|---|---|---|---|---|---|---|"
    constants = []
    for name, accelerator, compiled, rows in known:
        families = sorted({row.family for row, _ in rows})
        used = set(random.Random(0).sample(families, len(families) // 2))
        halves = [
            [(traced.kernels(row.batch), row.seconds) for row, traced in rows if (row.family in used) == fits]
            for fits in (True, False)
        ]
        made = fitted(accelerator, halves[0], compiled=compiled)
        yield summary(f"{name}: fitted to these", errors(made, halves[0], compiled=compiled))
        yield summary(f"**{name}: not fitted**", errors(made, halves[1], compiled=compiled))
        shares = ", ".join(f"{kind} {share:.3g}" for kind, share in made.efficiency.items())
        constants.append(f"- {name}: {shares}; {1e6 * made.kernel:.2g} us for each kernel")
    yield from ("", "Constants (shares of the peak or of the bandwidth):", "", *constants)


def memory_lines(known: list[Table]) -> Iterator[str]:
    """The largest batches as lines of Markdown."""
    yield "| table | rows | the batch that fitted | one step off | more | worst |"
    yield "|---|---|---|---|---|---|"
    for name, accelerator, _, rows in known:
        if not name.startswith("training"):
            continue
        steps = []
        for row, traced in rows:
            fits = [batch for batch in BATCHES if traced.peak(batch) <= USABLE * accelerator.memory]
            steps.append((BATCHES.index(fits[0] if fits else 1) - BATCHES.index(row.batch), row.model))
        off = np.abs([each for each, _ in steps])
        worst = max(steps, key=lambda each: abs(each[0]))
        yield (
            f"| {name} | {len(off)} | {np.mean(off == 0):.1%} | {np.mean(off == 1):.1%} | {np.mean(off > 1):.1%} "
            f"| {abs(worst[0])} steps, {worst[1]} |"
        )


@dataclass(frozen=True)
class Published:
    """A published run: a configuration with the settings that its source states.

    Attributes:
        speeds: of a cluster the images on each GPU, and images/s of all.
    """

    name: str
    config: str
    settings: str
    speeds: Mapping[str, tuple[int, int]]


# Configuration: g_14.yaml of NVIDIA/NeMo-Framework-Launcher (bfloat16, written-out attention, no compiler, 64 images);
# speeds: docs.nvidia.com/nemo-framework, performance of ViT.
NEMO = (
    "speed.compile=off speed.attention=reference model.width=1408 model.depth=40 model.heads=16 model.mlp_width=6144 "
    "model.patch_size=14"
)
# mlcommons/training_results_v3.0: the median of all epochs' `throughput` in the logs of NVIDIA, CoreWeave (3,584 GPUs)
# and Dell (4 and 16 H100, A100). MXNet fuses normalisation and ReLU with convolutions: `compile` stands for that.
PUBLISHED = (
    Published(
        "NeMo, ViT-g/14", "vit_h16", NEMO,
        {f"a100x{8 * n}": (64, speed) for n, speed in ((1, 693), (2, 1_347), (4, 2_642), (8, 5_454), (16, 10_644))},
    ),
    Published(
        "NeMo, ViT-g/14", "vit_h16", NEMO,
        {f"h100x{8 * n}": (64, speed) for n, speed in ((1, 1_428), (2, 2_846), (4, 5_737), (8, 11_222), (16, 21_561))},
    ),
    Published(
        "MLPerf 3.0, ResNet-50", "resnet50", "speed.compile=model",
        {
            "a100x8": (408, 28_603), "a100x16": (204, 53_741), "h100x4": (816, 29_133), "h100x8": (400, 56_074),
            "h100x16": (200, 96_499), "h100x64": (50, 294_759), "h100x512": (40, 2_249_638),
            "h100x768": (42, 3_409_916), "h100x3584": (16, 10_103_304),
        },
    ),
)  # fmt: skip
# Meta, ViT-H/16 (ai.meta.com, significantly faster vision transformer training): how many times as fast FSDP with half
# weights, multi-tensor optimizer and batch-second features is as DDP with autocast. 8 A100 are assumed: of the 560
# images of 224 px and the 384 of 256 px they hold 40 GB each by the plan.
META = (
    ("560 images", 8, 70, 224, "fp16_master", 1.51),
    ("384 images, 256 px", 8, 48, 256, "fp16_master", 1.86),
    ("384 images, 256 px, all float16", 8, 48, 256, "fp16", 2.18),
    ("256 px, 64 GPUs", 64, 48, 256, "fp16_master", 1.83),
)


def speed(name: str, config: str, images: int, settings: Iterable[str], layout: plan.Layout) -> float:
    """Images/s of all GPUs of a cluster."""
    cluster = plan.cluster(name)
    settings = ["data=synthetic", f"data.global_batch_size={images * cluster.ranks}", *settings]
    return plan.Search(load_config(config, settings), cluster).outcome(layout).images_per_second


def published_lines() -> Iterator[str]:
    """Published speeds of several GPUs as lines of Markdown."""
    yield "| run | GPUs | images on each | published, images/s | predicted | error |"
    yield "|---|---|---|---|---|---|"
    errors = []
    for run in PUBLISHED:
        for name, (images, measured) in run.speeds.items():
            layout = plan.Layout(replicate=plan.cluster(name).ranks)
            found = speed(name, run.config, images, run.settings.split(), layout)
            errors.append(found / measured - 1.0)
            yield f"| {run.name} | {name} | {images} | {measured:,} | {found:,.0f} | {errors[-1]:+.1%} |"
    sizes = np.abs(errors)
    yield from ("", f"Median {np.median(sizes):.1%}, largest {sizes.max():.1%}.", "")
    yield "| Meta, ViT-H/16, A100 | published | predicted | error |"
    yield "|---|---|---|---|"
    for what, ranks, images, size, precision, ratio in META:
        same = ["speed.compile=off", "speed.attention=reference", "optim.ema_decay=null", f"data.image_size={size}"]
        before = ["speed.optimizer=loop", "speed.clip=loop", "model.classifier=token", *same]
        after = ["speed.optimizer=foreach", "speed.layout=batch_second", *same]
        times = speed(f"a100x{ranks}", "vit_h16", images, after, plan.Layout(shard=ranks, precision=precision)) / speed(
            f"a100x{ranks}", "vit_h16", images, before, plan.Layout(replicate=ranks, precision="amp_fp16")
        )
        yield f"| {what} | {ratio}x | {times:.2f}x | {times / ratio - 1.0:+.0%} |"


def read(folder: Path, every: int, cache: Path | None) -> list[Table]:
    """The tables with their models."""
    warnings.filterwarnings("ignore")
    done: dict[Any, Traced | None] = pickle.loads(cache.read_bytes()) if cache and cache.exists() else {}
    known = []
    for name, (file, accelerator) in TABLES.items():
        trains, half, found = "train" in file, "-amp-" in file, []
        rows = list(rows_of(folder / file))
        random.Random(1).shuffle(rows)
        for row in rows[::every]:
            key = (row.model, row.size, trains, half)
            if key not in done:
                done[key] = tried(row, trains=trains, half=half)
            model = done[key]
            if model is not None and row.batch in (*BATCHES, 1024, 2048):
                found.append((row, model))
        if cache:
            cache.write_bytes(pickle.dumps(done))
        chosen = I9 if accelerator == "i9_10940x" else plan.accelerator(accelerator)
        print(f"{name}: {len(found)} of {len(rows[::every])} rows", flush=True)
        known.append((name, chosen, "compiled" in name, found))
    return known


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tables", type=Path)
    parser.add_argument("--every", type=int, default=1, help="only each so many rows of a table")
    parser.add_argument("--cache", type=Path, help="a file that keeps the traced models")
    parser.add_argument("--out", type=Path, default=PAGE)
    arguments = parser.parse_args()
    keep_in_float32(torch.device("cpu"))
    known = read(arguments.tables, arguments.every, arguments.cache)
    text = [
        "# The plan against measurements",
        "",
        *provenance_lines(torch.device("cpu")),
        "",
        "## Memory: timm's largest batches",
        "",
        "A row says that a batch fits into 24 GiB and that the next larger one does not. Predicted: the largest whose",
        f"peak is at most {USABLE:.0%} of that, the share that the planner always uses; nothing is fitted.",
        "",
        *memory_lines(known),
        "",
        "## Time: one device",
        "",
        "Predicted over measured seconds of a step, minus 1.",
        "",
        *time_lines(known),
        "",
        "## Time: published runs on several GPUs",
        "",
        "NeMo's ViT-g/14, images/s of all GPUs. The jitter in clusters.yaml was fitted to the ratio of the two sizes.",
        "",
        *published_lines(),
    ]
    arguments.out.write_text("\n".join(text) + "\n")
    print("\n".join(text))


if __name__ == "__main__":
    main()
