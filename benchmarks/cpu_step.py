"""The whole training step on a CPU: this package and timm's model in a plain PyTorch loop, in turns in one process.

    python benchmarks/cpu_step.py
    python benchmarks/cpu_step.py --models vit_s16 --rounds 3

First every setting of the plain loop gets a few turns, and two are selected: the fastest with float32 weights, which
this package's levels `amp_bf16` and `bf16_params` keep too, and the fastest of all, which may have bfloat16 weights
without masters. Then these, `speed=reference` and `speed=fast` take turns. Writes docs/results/cpu_step.md and
cpu_step.json. The plain loop is given float images; this package's steps start from uint8 images, and include the
schedule, the gradient norm and the metrics.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.config.run import RunConfig
from pycls_fast.ledger.measure.workloads import Trainer, synthetic_batch
from pycls_fast.ledger.report.statistics import Speedup, paired_ratio, spread
from pycls_fast.ledger.report.text import speed_text
from pycls_fast.parallel.world import ALONE
from pycls_fast.parallel.wrap import place_model
from pycls_fast.train.assemble import make_step
from pycls_fast.train.environment import environment, provenance_lines

RESULTS = Path(__file__).parents[1] / "docs" / "results"
CLASSES = 1000
LR = 1e-4
WARMUP = 2
CLOCKS = {"wall": "Wall time", "process": "CPU time of the process"}

Step = Callable[[], None]


@dataclass(frozen=True)
class Peer:
    """One setting of the plain loop.

    Attributes:
        precision: "float32", "autocast" (bfloat16, weights float32) or "bfloat16" (the model cast, AdamW on bfloat16).
        attention: timm's `F.scaled_dot_product_attention` ("fused") or its own products ("plain"); only for ViTs.
        memory_format: of model and images.
        compiled: whether torch.compile is applied to the model, in its default mode.
    """

    precision: str
    attention: str = "fused"
    memory_format: str = "contiguous"
    compiled: bool = False

    @property
    def name(self) -> str:
        """The setting in words."""
        words = [self.precision, f"{self.attention} attention", self.memory_format, "compiled" * self.compiled]
        return "timm, " + ", ".join(word for word in words if word)

    @property
    def keeps_float32(self) -> bool:
        """Whether the optimizer changes float32 weights."""
        return self.precision != "bfloat16"


# Every pair of 16-bit format and attention, eager and compiled, beside float32.
HALVES = list(product(("autocast", "bfloat16"), (False, True)))
VIT_PEERS = (
    Peer("float32"),
    Peer("autocast", memory_format="channels_last"),
    *(Peer(precision, way, compiled=which) for precision, which in HALVES for way in ("fused", "plain")),
)
RESNET_PEERS = (
    Peer("float32", "no", "channels_last"),
    Peer("autocast", "no"),
    *(Peer(precision, "no", "channels_last", which) for precision, which in HALVES),
)


@dataclass(frozen=True)
class Subject:
    """A model: its experiment, its name in timm, the settings to try, and the target ratios."""

    config: str
    timm: str
    peers: Sequence[Peer]
    over_peer: float
    over_reference: float


SUBJECTS: Mapping[str, Subject] = {
    "vit_s16": Subject("vit_s16", "vit_small_patch16_224", VIT_PEERS, 1.15, 2.5),
    "vit_ti16": Subject("vit_ti16", "vit_tiny_patch16_224", VIT_PEERS, 1.15, 2.5),
    "resnet50": Subject("resnet50", "resnet50", RESNET_PEERS, 1.0, 1.8),
    "resnet18": Subject("resnet18", "resnet18", RESNET_PEERS, 1.0, 1.8),
}

# speed=reference in float32 is the reference; the others have the fastest switches.
OURS: Mapping[str, tuple[str, ...]] = {
    "speed=reference precision=fp32": ("speed=reference", "precision=fp32"),
    "speed=fast precision=fp32": ("speed=fast", "precision=fp32"),
    "speed=fast precision=amp_bf16": ("speed=fast", "precision=amp_bf16"),
    "speed=fast precision=bf16_params": ("speed=fast", "precision=bf16_params"),
}
# Only the network: no erasing, mixing, drop-path or label smoothing, which the plain loop does not have.
PLAIN = (
    "data=synthetic", "augment=none", "model.drop_path=0", "loss.label_smoothing=0", "optim=adamw", f"optim.lr={LR}",
    "optim.lr_batch_size=null", "schedule=constant", "schedule.warmup_epochs=0", "schedule.final_factor=0",
    "runtime.device=cpu",
)  # fmt: skip


def our_step(subject: Subject, overrides: Sequence[str], batch: int, image_size: int = 224) -> tuple[Step, RunConfig]:
    """The step of `tools/train_net.py` on one batch of uint8 images."""
    config = load_config(
        subject.config,
        [
            *PLAIN,
            *overrides,
            f"data.global_batch_size={batch}",
            f"data.image_size={image_size}",
            f"model.num_classes={CLASSES}",
        ],
    )
    world = ALONE
    switches = build.switches(config, world.device)
    build.set_backend(config, world.device, switches)
    network = build.model(config, CLASSES, switches)
    network = place_model(network, world, memory_format=switches.memory_format)
    trainer = Trainer(make_step(config, network, world, switches, steps_per_epoch=1000), world, switches)
    images = synthetic_batch(
        batch, config.data.image_size, CLASSES, erase_probability=0.0, seed=1, device=world.device,
        host=build.prepare_on_host(config, switches),
    )  # fmt: skip
    return lambda: trainer([images]), config


def peer_step(name: str, peer: Peer, batch: int, image_size: int = 224) -> Step:
    """timm's model in a plain loop: forward, cross-entropy, backward, fused AdamW."""
    import timm
    from timm.layers import set_fused_attn

    set_fused_attn(peer.attention == "fused")
    torch.manual_seed(0)
    sized: dict[str, Any] = {"img_size": image_size} if name.startswith("vit") else {}
    model = timm.create_model(name, num_classes=CLASSES, **sized).train()
    images_BCHW = torch.randn(batch, 3, image_size, image_size)
    labels_B = torch.randint(0, CLASSES, (batch,))
    if peer.memory_format == "channels_last":
        model = model.to(memory_format=torch.channels_last)
        images_BCHW = images_BCHW.to(memory_format=torch.channels_last)
    if peer.precision == "bfloat16":
        model, images_BCHW = model.bfloat16(), images_BCHW.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.05, fused=True)
    forward = torch.compile(model) if peer.compiled else model

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=peer.precision == "autocast"):
            logits_BK = forward(images_BCHW)
        F.cross_entropy(logits_BK.float(), labels_B).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@dataclass
class Contender:
    """A step with the seconds of each of its turns."""

    name: str
    step: Step
    about: dict[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    is_warm: bool = False

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)


def take_turns(contenders: Sequence[Contender], rounds: int, clock: Callable[[], float]) -> None:
    """Run each once per round, in alternating order, so that a drift affects all of them equally."""
    for contender in contenders:
        for _ in range(0 if contender.is_warm else WARMUP):
            contender.step()
        contender.is_warm = True
    for done in range(rounds):
        for contender in contenders if done % 2 == 0 else contenders[::-1]:
            begin = clock()
            contender.step()
            contender.seconds.append(clock() - begin)


def best_peers(subject: Subject, options: argparse.Namespace, clock: Callable[[], float]) -> list[Contender]:
    """Every setting of the plain loop, the fastest first, with the times of the selection rounds."""
    peers = [
        Contender(peer.name, peer_step(subject.timm, peer, options.batch, options.image_size), asdict(peer))
        for peer in subject.peers
        if not (peer.compiled and options.no_compile)
    ]
    take_turns(peers, options.choosing_rounds, clock)
    return sorted(peers, key=lambda peer: peer.median)


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Select the peers and time them in turns with ours; returns the record."""
    subject = SUBJECTS[name]
    clock = time.process_time if options.clock == "process" else time.perf_counter
    peers = best_peers(subject, options, clock)
    tried = [{"name": peer.name, "seconds": list(peer.seconds), **peer.about} for peer in peers]
    of_all = peers[0]
    with_float32 = next(peer for peer in peers if peer.about["precision"] != "bfloat16")
    chosen = [with_float32] if of_all is with_float32 else [with_float32, of_all]
    # Free the weights and optimizer states of the others.
    del peers
    gc.collect()
    for peer in chosen:
        peer.seconds.clear()
    ours = []
    for label, overrides in OURS.items():
        step, config = our_step(subject, overrides, options.batch, options.image_size)
        ours.append(Contender(label, step, {"precision": config.precision.name, "speed": config.speed.preset}))
    everyone = [*ours, *chosen]
    take_turns(everyone, options.rounds, clock)
    return {
        "model": name,
        "timm": subject.timm,
        "bars": {"over_peer": subject.over_peer, "over_reference": subject.over_reference},
        "tried": tried,
        "peers": [peer.name for peer in chosen],
        "results": [
            {"name": one.name, **one.about, "seconds": one.seconds, "seconds_p50": one.median} for one in everyone
        ],
    }


def ratio(record: Mapping[str, Any], faster: str, than: str) -> Speedup:
    """How many times faster one contender is than another, in pairs within each round."""
    seconds = {result["name"]: result["seconds"] for result in record["results"]}
    return paired_ratio([1 / s for s in seconds[than]], [1 / s for s in seconds[faster]])


def tables(record: Mapping[str, Any], batch: int) -> list[str]:
    """The record of one model as Markdown."""
    reference, *_ = OURS
    peers = record["peers"]
    heads = [f"over {name}" for name in (reference, *peers)]
    lines = [
        f"## {record['model']}, batch {batch}",
        "",
        f"| step | ms, median (p10 to p90) | images/s | {' | '.join(heads)} |",
        f"|---|---|---|{'---|' * len(heads)}",
    ]
    for result in record["results"]:
        times = spread([1e3 * s for s in result["seconds"]])
        cells = [speed_text(ratio(record, result["name"], than)) for than in (reference, *peers)]
        lines.append(
            f"| {result['name']} | {times.p50:.0f} ({times.p10:.0f} to {times.p90:.0f}) | "
            f"{batch / result['seconds_p50']:.1f} | {' | '.join(cells)} |"
        )
    lines += ["", "Settings of the plain loop that were tried, with their medians in the selection rounds:", ""]
    lines += ["| setting | ms |", "|---|---|"]
    lines += [f"| {peer['name']} | {1e3 * statistics.median(peer['seconds']):.0f} |" for peer in record["tried"]]
    return [*lines, ""]


def page(records: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> str:
    """The page as text."""
    lines = [
        "# The training step on a CPU, beside timm's model in a plain loop",
        "",
        *provenance_lines(torch.device("cpu")),
        "",
        f"{CLOCKS[options.clock]} of a step, {options.rounds} rounds in turns in one process. A cell is the geometric "
        "mean of the ratios within a round and its 95% interval; above 1 is faster.",
        "",
        "- A step is the forward pass, the loss, the backward pass and fused AdamW. This package's also normalises "
        "uint8 images, follows a schedule and computes the gradient norm.",
        "- `speed=reference` is measured in float32. Precision is a separate choice: `amp_bf16` corresponds to the "
        "plain loop's autocast; `bf16_params` has float32 master weights and computes in bfloat16. The plain loop's "
        "`bfloat16` has neither float32 weights nor float32 optimizer state.",
        "- Process-wide settings (`speed.allocator`) speed up the plain loop as well.",
        "",
    ]
    for record in records:
        lines += tables(record, options.batch)
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="vit_s16,resnet50", help=f"any of {','.join(SUBJECTS)}")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--image-size", type=int, default=224, help="use a smaller one to try out this file")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--choosing-rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="threads of torch (default: one per core)")
    clocks = "process: CPU time, for one thread on a shared machine"
    parser.add_argument("--clock", choices=["wall", "process"], default="wall", help=clocks)
    parser.add_argument("--no-compile", action="store_true", help="leave out the compiled settings of the plain loop")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of cpu_step.md and cpu_step.json")
    options = parser.parse_args(arguments)
    unknown = set(options.models.split(",")) - set(SUBJECTS)
    if unknown:
        parser.error(f"--models: {', '.join(sorted(unknown))}: unknown; use any of {', '.join(SUBJECTS)}")
    if options.clock == "process" and options.threads != 1:
        parser.error("--clock process: adds up all threads; use it with --threads 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the results."""
    options = parse(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    machine = environment(torch.device("cpu"), 1)
    records = []
    for name in options.models.split(","):
        records.append(measure(name, options))
        print("\n".join(tables(records[-1], options.batch)), flush=True)
        gc.collect()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "cpu_step.md").write_text(page(records, options), encoding="utf-8")
    shown = {key: value if isinstance(value, (int, str)) else str(value) for key, value in vars(options).items()}
    whole = {"settings": shown, "environment": machine, "models": records}
    (options.out / "cpu_step.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
