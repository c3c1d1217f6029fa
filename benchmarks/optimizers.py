"""Only the optimizer step, on the parameters of a ViT: loop, foreach, fused and compiled, in turns in one process.

Command:  python benchmarks/optimizers.py
          python benchmarks/optimizers.py --sharded    what the shards of fsdp add to the host's time
Result:   docs/results/optimizers_cpu.md has the tables of one machine; the ratios carry over, the times do not.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.config.run import RunConfig
from pycls_fast.ledger.measure.device import synchronize
from pycls_fast.ledger.report.statistics import paired_ratio, spread
from pycls_fast.ledger.report.text import speed_text
from pycls_fast.optim.choices import Optimizer as Chosen
from pycls_fast.optim.optimizers import set_lr
from pycls_fast.optim.weights import LocalShards, OwnedWeights
from pycls_fast.parallel.launch import start_world
from pycls_fast.parallel.world import World
from pycls_fast.parallel.wrap import place_model
from pycls_fast.strategies import Parallel
from pycls_fast.train.environment import provenance_lines

WARMUP = 3


@dataclass
class Variant:
    """One implementation with its own copy of the parameters; all share the gradients."""

    name: str
    optimizer: Optimizer
    seconds: list[float] = field(default_factory=list)
    first: float = 0.0


def main() -> None:
    """Measure and print tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_s16", help="the name of a model (default: vit_s16)")
    parser.add_argument("--optimizers", default="adamw,sgd,lamb,lion", help=f"any of {','.join(Chosen.choices())}")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    clocks = "process: CPU time of this process, for one thread on a shared machine"
    parser.add_argument("--clock", choices=["wall", "process"], default="wall", help=clocks)
    parser.add_argument("--sharded", action="store_true", help="fused steps of fsdp's shards beside plain tensors")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path, help="also write the tables here")
    options = parser.parse_args()
    if options.clock == "process" and (options.threads != 1 or options.device != "cpu"):
        parser.error("--clock process: needs --threads 1 and --device cpu; use --clock wall")
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    clock = time.process_time if options.clock == "process" else time.perf_counter
    if options.sharded:
        sharded(options, device, clock)
        return
    text = [heading(options, device)]
    print(text[0], flush=True)
    for name in options.optimizers.split(","):
        variants = make_variants(name, options.model, device, compiled=not options.no_compile)
        for variant in variants:
            variant.first = sum(timed(variant, clock, device) for _ in range(2))
        for done in range(WARMUP + options.rounds):
            # In turns and in alternating order, so that a drift of the machine affects all of them equally.
            for variant in variants if done % 2 else variants[::-1]:
                seconds = timed(variant, clock, device)
                if done >= WARMUP:
                    variant.seconds.append(seconds)
        text.append(table(name, variants))
        print(text[-1], flush=True)
        del variants, variant
        gc.collect()
    if options.out is not None:
        options.out.write_text("\n".join(text), encoding="utf-8")


def make_variants(name: str, model: str, device: torch.device, *, compiled: bool) -> list[Variant]:
    """Every implementation of an optimizer, the loop first."""
    torch.manual_seed(0)
    config = configured(name, model, "loop", compile_step="off")
    network = build.model(config, 1000, build.switches(config, device)).to(device)
    gradients = [1e-3 * torch.randn_like(parameter) for parameter in network.parameters()]
    choices = [(which, "off") for which in Chosen.choices()[name].implementations]
    choices += [(which, "on") for which in Chosen.choices()[name].compilable if compiled]
    variants = []
    for which, compile_step in choices:
        config = configured(name, model, which, compile_step=compile_step)
        own = build.model(config, 1000, build.switches(config, device)).to(device)
        for parameter, gradient in zip(own.parameters(), gradients, strict=True):
            parameter.grad = gradient
        switches = build.switches(config, device)
        made = build.optimizer(config, own, switches)
        label = f"{switches.optimizer}{', compiled' if compile_step == 'on' else ''}"
        variants.append(Variant(label, made))
    return variants


# The tensors of a ViT-H, and next to nothing in them: what is left is the host's work.
MANY_SMALL = ("model=vit_h16", "model.width=32", "model.mlp_width=64", "model.heads=2", "data.image_size=32")


def sharded(options: argparse.Namespace, device: torch.device, clock: Callable[[], float]) -> None:
    """Print the host's time of a whole update on plain tensors, on local shards of fsdp, and on its DTensors."""
    for name in [name for name in options.optimizers.split(",") if Chosen.choices()[name].elementwise]:
        own = [*MANY_SMALL, f"optim={name}", "data=synthetic", "speed=fast", "precision=fp32"]
        with start_world(device.type, Parallel(name="fsdp")) as world:
            # torch has no fused SGD for DTensors.
            ways = ("plain tensors", "local shards", "DTensors")[: 2 if name == "sgd" else 3]
            kinds = {kind: _update(kind, own, world) for kind in ways}
            seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
            for done in range(WARMUP + options.rounds):
                for kind in list(kinds)[:: 1 if done % 2 else -1]:
                    prepare, update = kinds[kind]
                    prepare()
                    synchronize(device)
                    begin = clock()
                    update()
                    if done >= WARMUP:
                        seconds[kind].append(clock() - begin)
                    synchronize(device)
        print(f"### {name}, {options.rounds} rounds\n\n| on | ms (p10 to p90) | times plain |\n|---|---|---|")
        for kind, each in seconds.items():
            times, plain = (
                spread([1e3 * second for second in each]),
                spread([1e3 * s for s in seconds["plain tensors"]]),
            )
            print(f"| {kind} | {times.p50:.2f} ({times.p10:.2f} to {times.p90:.2f}) | {times.p50 / plain.p50:.2f} |")


def _update(kind: str, overrides: Sequence[str], world: World) -> tuple[Callable[[], None], Callable[[], None]]:
    """What gives a network gradients, and its update."""
    cut = kind != "plain tensors"
    config = load_config("vit_s16", [*overrides, f"parallel={'fsdp' if cut else 'single'}"])
    switches = build.switches(config, world.device)
    network = place_model(build.model(config, 1000, switches, empty=cut), world, memory_format="contiguous")
    build.wrap(config, network, world, switches)
    weights = LocalShards(network) if kind == "local shards" else OwnedWeights(network)
    shards = weights if isinstance(weights, LocalShards) else None
    optimizer = build.optimizer(config, network, switches, shards, sharded=cut)
    gradients = [(parameter, 1e-3 * torch.randn_like(parameter)) for parameter in network.parameters()]

    def prepare() -> None:
        for parameter, gradient in gradients:
            parameter.grad = gradient

    def update() -> None:
        set_lr(optimizer, 1e-4)
        weights.take_gradients()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return prepare, update


def configured(name: str, model: str, implementation: str, *, compile_step: str) -> RunConfig:
    """`configs/vit_s16.yaml` with a different model and optimizer; no image is read."""
    return load_config(
        "vit_s16",
        [f"model={model}", f"optim={name}", f"speed.optimizer={implementation}",
         f"speed.optimizer_compile={compile_step}", "data=synthetic"],
    )  # fmt: skip


def timed(variant: Variant, clock: Callable[[], float], device: torch.device) -> float:
    """Seconds of one step, including setting the learning rate as in training."""
    synchronize(device)
    begin = clock()
    set_lr(variant.optimizer, 1e-4)
    variant.optimizer.step()
    synchronize(device)
    return clock() - begin


def table(name: str, variants: Sequence[Variant]) -> str:
    """A table of medians with tenth and ninetieth percentiles, and ratios to the loop within each round."""
    lines = [
        f"### {name}\n",
        "| implementation | ms (p10 to p90) | times faster than loop (95% interval) | first two steps, s |",
        "|---|---|---|---|",
    ]
    loop = variants[0]
    for variant in variants:
        times = spread([1e3 * seconds for seconds in variant.seconds])
        ratio = speed_text(paired_ratio([1 / s for s in loop.seconds], [1 / s for s in variant.seconds]))
        lines.append(
            f"| {variant.name} | {times.p50:.1f} ({times.p10:.1f} to {times.p90:.1f}) "
            f"| {'1' if variant is loop else ratio} | {variant.first:.1f} |"
        )
    return "\n".join(lines) + "\n"


def heading(options: argparse.Namespace, device: torch.device) -> str:
    """What was run, on which machine and with which versions."""
    config = configured("adamw", options.model, "loop", compile_step="off")
    with torch.device("meta"):
        network: nn.Module = build.model(config, 1000, build.switches(config, torch.device("cpu")))
    count = sum(parameter.numel() for parameter in network.parameters())
    times = "CPU time of the process" if options.clock == "process" else "wall time"
    return "\n".join([
        f"- Parameters: {options.model}, {count:,} in {len(list(network.parameters()))} tensors, float32; settings of "
        f"`configs/vit_s16.yaml`; {options.rounds} rounds after {WARMUP}; times are {times}",
        *provenance_lines(device),
        "",
    ])  # fmt: skip


if __name__ == "__main__":
    main()
