"""Only the optimizer step, on the parameters of a ViT: loop, foreach, fused and compiled, in turns in one process.

Command:  python benchmarks/optimizers.py
          python benchmarks/optimizers.py --sharded    what the shards of fsdp add to the host's time
Result:   docs/results/optimizers_cpu.md has the tables of one machine; the ratios carry over, the times do not.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from provenance import provenance_lines
from torch import nn
from torch.optim import Optimizer
from turns import Clock, Contender, add_clock, around_median, clock_of, take_turns

from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.config.run import RunConfig
from pycls_fast.ledger.measure.device import synchronize
from pycls_fast.optim.choices import Optimizer as Chosen
from pycls_fast.optim.optimizers import set_lr
from pycls_fast.optim.owned_weights import LocalShards, OwnedWeights
from pycls_fast.parallel.launch import start_world
from pycls_fast.parallel.world import World
from pycls_fast.parallel.wrap import place_model
from pycls_fast.strategies import Parallel

WARMUP = 3


def main() -> None:
    """Measure and print tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_s16", help="the name of a model (default: vit_s16)")
    parser.add_argument("--optimizers", default="adamw,sgd,lamb,lion", help=f"any of {','.join(Chosen.choices())}")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    add_clock(parser)
    parser.add_argument("--sharded", action="store_true", help="fused steps of fsdp's shards beside plain tensors")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path, help="also write the tables here")
    options = parser.parse_args()
    is_alone = options.threads == 1 and options.device == "cpu"
    clock = clock_of(parser, options, is_alone=is_alone, use="--threads 1 --device cpu")
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    text = sharded(options, device, clock) if options.sharded else tables(options, device, clock)
    if options.out is not None:
        options.out.write_text("\n".join(text), encoding="utf-8")


def tables(options: argparse.Namespace, device: torch.device, clock: Clock) -> list[str]:
    """Print where it was measured, and the table of each optimizer; returns the same."""
    text = [heading(options, device)]
    print(text[0], flush=True)
    for name in options.optimizers.split(","):
        steps = make_steps(name, options.model, device, compiled=not options.no_compile)
        take_turns(steps, 2, clock)
        first = {each.name: sum(each.seconds) for each in steps}
        for each in steps:
            each.seconds.clear()
        take_turns(steps, options.rounds, clock, warmup=WARMUP)
        text.append(table(name, steps, first))
        print(text[-1], flush=True)
        del steps, each
        gc.collect()
    return text


def make_steps(name: str, model: str, device: torch.device, *, compiled: bool) -> list[Contender]:
    """Every implementation of an optimizer with its own copy of the parameters, the loop first; all share the
    gradients. A step includes setting the learning rate, as in training."""
    torch.manual_seed(0)
    config = configured(name, model, "loop", compile_step="off")
    network = build.model(config, 1000, build.switches(config, device)).to(device)
    gradients = [1e-3 * torch.randn_like(parameter) for parameter in network.parameters()]
    choices = [(which, "off") for which in Chosen.choices()[name].implementations]
    choices += [(which, "on") for which in Chosen.choices()[name].compilable if compiled]
    steps = []
    for which, compile_step in choices:
        config = configured(name, model, which, compile_step=compile_step)
        switches = build.switches(config, device)
        own = build.model(config, 1000, switches).to(device)
        for parameter, gradient in zip(own.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer = build.optimizer(config, own, switches)

        def step(optimizer: Optimizer = optimizer) -> None:
            set_lr(optimizer, 1e-4)
            optimizer.step()
            synchronize(device)

        label = f"{switches.optimizer}{', compiled' if compile_step == 'on' else ''}"
        steps.append(Contender(label, step, prepare=partial(synchronize, device)))
    return steps


# The tensors of a ViT-H, and next to nothing in them: what is left is the host's work.
MANY_SMALL = ("model=vit_h16", "model.width=32", "model.mlp_width=64", "model.heads=2", "data.image_size=32")


def sharded(options: argparse.Namespace, device: torch.device, clock: Clock) -> list[str]:
    """Print the host's time of a whole update on plain tensors, on local shards of fsdp, and on its DTensors; returns
    the same."""
    text = []
    for name in [name for name in options.optimizers.split(",") if Chosen.choices()[name].elementwise]:
        own = [*MANY_SMALL, f"optim={name}", "data=synthetic", "speed=fast", "precision=fp32"]
        with start_world(device.type, Parallel(name="fsdp")) as world:
            # torch has no fused SGD for DTensors.
            ways = ("plain tensors", "local shards", "DTensors")[: 2 if name == "sgd" else 3]
            updates = [_update(way, own, world) for way in ways]
            take_turns(updates, options.rounds, clock, warmup=WARMUP)
        lines = [f"### {name}, {options.rounds} rounds\n", "| on | ms (p10 to p90) | times plain |", "|---|---|---|"]
        medians = [statistics.median(each.seconds) for each in updates]
        for each, median in zip(updates, medians, strict=True):
            times = around_median([1e3 * seconds for seconds in each.seconds], 2)
            lines.append(f"| {each.name} | {times} | {median / medians[0]:.2f} |")
        text.append("\n".join(lines) + "\n")
        print(text[-1], flush=True)
    return text


def _update(kind: str, overrides: Sequence[str], world: World) -> Contender:
    """The update of a network, once it has gradients."""
    cut = kind != "plain tensors"
    config = load_config("vit_s16", [*overrides, f"parallel={'fsdp' if cut else 'single'}"])
    switches = build.switches(config, world.device)
    network = place_model(build.model(config, 1000, switches, empty=cut), world, memory_format="contiguous")
    build.wrap(config, network, world, switches)
    weights = LocalShards(network) if kind == "local shards" else OwnedWeights(network)
    optimizer = build.optimizer(config, network, switches, weights, sharded=cut)
    gradients = [(parameter, 1e-3 * torch.randn_like(parameter)) for parameter in network.parameters()]

    def prepare() -> None:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        synchronize(world.device)

    def update() -> None:
        set_lr(optimizer, 1e-4)
        weights.take_gradients()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Contender(kind, update, prepare)


def configured(name: str, model: str, implementation: str, *, compile_step: str) -> RunConfig:
    """`configs/vit_s16.yaml` with a different model and optimizer; no image is read."""
    return load_config(
        "vit_s16",
        [f"model={model}", f"optim={name}", f"speed.optimizer={implementation}",
         f"speed.optimizer_compile={compile_step}", "data=synthetic"],
    )  # fmt: skip


def table(name: str, steps: Sequence[Contender], first: Mapping[str, float]) -> str:
    """A table of medians with tenth and ninetieth percentiles, and ratios to the loop within each round."""
    lines = [
        f"### {name}\n",
        "| implementation | ms (p10 to p90) | times faster than loop (95% interval) | first two steps, s |",
        "|---|---|---|---|",
    ]
    loop = steps[0]
    for each in steps:
        times = around_median([1e3 * seconds for seconds in each.seconds], 1)
        ratio = "1" if each is loop else str(each.over(loop))
        lines.append(f"| {each.name} | {times} | {ratio} | {first[each.name]:.1f} |")
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
