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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from provenance import provenance_lines
from turns import Clock, Contender, add_clock, around_median, clock_of, take_turns

from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.ledger.measure.workloads import Trainer, synthetic_batch
from pycls_fast.parallel.world import ALONE
from pycls_fast.train.assemble import make_step
from pycls_fast.train.environment import environment

RESULTS = Path(__file__).parents[1] / "docs" / "results"
CLASSES = 1000
LR = 1e-4
WARMUP = 2

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


# By experiment: the model's name in timm, and the settings to try.
SUBJECTS: Mapping[str, tuple[str, Sequence[Peer]]] = {
    "vit_s16": ("vit_small_patch16_224", VIT_PEERS),
    "vit_ti16": ("vit_tiny_patch16_224", VIT_PEERS),
    "resnet50": ("resnet50", RESNET_PEERS),
    "resnet18": ("resnet18", RESNET_PEERS),
}

# speed=reference in float32 is the reference; the others have the fastest switches.
OURS = (
    "speed=reference precision=fp32",
    "speed=fast precision=fp32",
    "speed=fast precision=amp_bf16",
    "speed=fast precision=bf16_params",
)
# Only the network: no erasing, mixing, drop-path or label smoothing, which the plain loop does not have.
PLAIN = (
    "data=synthetic", "augment=none", "model.drop_path=0", "loss.label_smoothing=0", "optim=adamw", f"optim.lr={LR}",
    "optim.lr_batch_size=null", "schedule=constant", "schedule.warmup_epochs=0", "schedule.final_factor=0",
    "runtime.device=cpu",
)  # fmt: skip


def our_step(name: str, settings: str, batch: int, image_size: int) -> Step:
    """The step of `tools/train_net.py` on one batch of uint8 images."""
    sizes = [f"data.global_batch_size={batch}", f"data.image_size={image_size}", f"model.num_classes={CLASSES}"]
    config, world = load_config(name, [*PLAIN, *settings.split(), *sizes]), ALONE
    switches = build.switches(config, world.device)
    build.set_backend(config, world.device, switches)
    network = build.place(config, build.model(config, CLASSES, switches), world, switches)
    trainer = Trainer(make_step(config, network, world, switches, steps_per_epoch=1000), world, switches)
    images = synthetic_batch(
        batch, config.data.image_size, CLASSES, erase_probability=0.0, seed=1, device=world.device,
        host=build.prepare_on_host(config, switches),
    )  # fmt: skip
    return lambda: trainer([images])


def peer_step(name: str, peer: Peer, batch: int, image_size: int) -> Step:
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


def measure(name: str, options: argparse.Namespace, clock: Clock) -> tuple[list[Contender], dict[str, float]]:
    """The turns of ours and of the selected peers, and the seconds of all peers in the selection, the fastest first."""
    timm_name, settings = SUBJECTS[name]
    sizes = options.batch, options.image_size
    peers = [
        Contender(peer.name, peer_step(timm_name, peer, *sizes))
        for peer in settings
        if not (peer.compiled and options.no_compile)
    ]
    take_turns(peers, options.choosing_rounds, clock, warmup=WARMUP)
    tried = {peer.name: statistics.median(peer.seconds) for peer in peers}
    peers.sort(key=lambda peer: tried[peer.name])
    of_all, with_float32 = peers[0], next(peer for peer in peers if not peer.name.startswith("timm, bfloat16"))
    # The weights and optimizer states of the others are freed.
    peers = [with_float32] if of_all is with_float32 else [with_float32, of_all]
    gc.collect()
    for peer in peers:
        peer.seconds.clear()
    everyone = [*(Contender(each, our_step(name, each, *sizes)) for each in OURS), *peers]
    take_turns(everyone, options.rounds, clock, warmup=WARMUP)
    return everyone, dict(sorted(tried.items(), key=lambda item: item[1]))


def table(name: str, everyone: Sequence[Contender], tried: Mapping[str, float], batch: int) -> str:
    """The turns of one model as Markdown."""
    others = [everyone[0], *everyone[len(OURS) :]]
    lines = [
        f"## {name}, batch {batch}",
        "",
        f"| step | ms, median (p10 to p90) | images/s | {' | '.join(f'over {other.name}' for other in others)} |",
        f"|---|---|---|{'---|' * len(others)}",
    ]
    for each in everyone:
        cells = [
            around_median([1e3 * s for s in each.seconds]),
            f"{batch / statistics.median(each.seconds):.1f}",
            *(str(each.over(other)) for other in others),
        ]
        lines.append(f"| {each.name} | {' | '.join(cells)} |")
    fastest = "; ".join(f"{peer}: {1e3 * seconds:.0f} ms" for peer, seconds in list(tried.items())[:3])
    lines += ["", f"The plain loop's fastest settings (all: cpu_step.json): {fastest}."]
    return "\n".join([*lines, ""])


def heading(options: argparse.Namespace) -> str:
    """What all tables have in common."""
    return "\n".join([
        "# The training step on a CPU, beside timm's model in a plain loop",
        "",
        *provenance_lines(torch.device("cpu")),
        "",
        f"{'CPU' if options.clock == 'process' else 'Wall'} time of a step, in turns in one process. Ratios: "
        "geometric means over the rounds (95% intervals); above 1 is faster.",
        "",
        "- A step is the forward pass, the loss, the backward pass and fused AdamW. This package's also normalises "
        "uint8 images, follows a schedule and computes the gradient norm.",
        "- `amp_bf16` corresponds to the plain loop's autocast. `bf16_params` computes in bfloat16 with float32 "
        "masters, which the plain loop's `bfloat16` has not.",
        "- `speed.allocator` speeds up the whole process, so the plain loop, too.",
        "",
    ])  # fmt: skip


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["vit_s16", "resnet50"], choices=SUBJECTS)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--image-size", type=int, default=224, help="use a smaller one to try out this file")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--choosing-rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="threads of torch (default: one per core)")
    add_clock(parser)
    parser.add_argument("--no-compile", action="store_true", help="leave out the compiled settings of the plain loop")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of cpu_step.md and cpu_step.json")
    options = parser.parse_args()
    clock = clock_of(parser, options, is_alone=options.threads == 1, use="--threads 1")
    if options.threads:
        torch.set_num_threads(options.threads)
    text, records = [heading(options)], {}
    for name in options.models:
        everyone, tried = measure(name, options, clock)
        text.append(table(name, everyone, tried, options.batch))
        print(text[-1], flush=True)
        records[name] = {"seconds": {each.name: each.seconds for each in everyone}, "tried": tried}
        gc.collect()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "cpu_step.md").write_text("\n".join(text), encoding="utf-8")
    whole = {"environment": environment(torch.device("cpu"), 1), "models": records}
    (options.out / "cpu_step.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
