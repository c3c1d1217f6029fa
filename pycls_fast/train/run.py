"""A training run from its configuration to its summary: puts the parts together and keeps their state."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pycls_fast import build
from pycls_fast.config.schema import RunConfig
from pycls_fast.data import Source
from pycls_fast.errors import UserError
from pycls_fast.models import Complexity
from pycls_fast.network import Network
from pycls_fast.optim import MasterWeights, load_named_state, named_state
from pycls_fast.parallel import FlatShards, World, floating_buffers, footprint, plain_name
from pycls_fast.speed import CATALOGUE, SwitchName
from pycls_fast.train import checkpoint
from pycls_fast.train.building import build_parts
from pycls_fast.train.building import make_step as make_step
from pycls_fast.train.display import Display, human
from pycls_fast.train.resume import choose_run_dir, resume
from pycls_fast.train.run_folder import RunFolder, device_name, environment, versions
from pycls_fast.train.saving import Saver
from pycls_fast.train.step import Step

# What optimizers keep, in float32 copies of the weights. Muon has two for what it leaves to AdamW.
_STATE_COPIES = {
    "sgd": 1.0, "adamw": 2.0, "lamb": 2.0, "lion": 1.0, "adafactor": 0.5, "muon": 1.0, "adamw8bit": 0.5,
}  # fmt: skip


@dataclass
class Run:
    """Everything that training reads and changes."""

    config: RunConfig
    world: World
    folder: RunFolder
    display: Display
    sources: dict[str, Source]
    network: Network
    step: Step
    switches: build.Switches
    complexity: Complexity
    # Parameters of the largest block, which sharded strategies gather whole.
    largest_unit: int
    saver: Saver
    steps_per_epoch: int
    total_steps: int
    start_step: int = 0
    saved_step: int | None = None
    damaged: dict[str, str] = field(default_factory=dict)
    # Wall time of the processes before this one.
    seconds_before: float = 0.0
    started: float = field(default_factory=time.monotonic)

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names in the order of the model's outputs."""
        return self.sources["train"].classes

    @property
    def weights(self) -> Network | MasterWeights | FlatShards:
        """What checkpoints hold and the optimizer owns: the masters of a network in a half format, the flat shards of
        one that was flattened, else the network."""
        return self.step.wrapped.weights or self.step.masters or self.network

    def epoch(self, step: int) -> float:
        """Steps as epochs."""
        return step / self.steps_per_epoch

    def sync_buffers(self) -> None:
        """Give all ranks the same BatchNorm statistics, those of the average included."""
        buffers = floating_buffers(self.network)
        if self.step.ema is not None:
            found = {id(buffer) for buffer in buffers}
            # FairScale's wrappers put themselves into the names; the average has plain ones.
            names = {plain_name(name) for name, buffer in self.network.named_buffers() if id(buffer) in found}
            buffers += [value for name, value in self.step.ema.values.items() if name in names]
        self.world.average_buffers(buffers)

    def state(self) -> checkpoint.State:
        """Everything that the next step depends on: tensors under the network's names and in their logical shapes,
        replicated or as DTensors, which share memory with what training changes where that is possible.

        All ranks call this: what compression carries is averaged over them.
        """
        compression, flat, ema = self.step.wrapped.compression, self.step.wrapped.weights, self.step.ema
        average = None if ema is None else dict(ema.values)
        if flat is None:
            learned = named_state(self.step.optimizer, self.weights.named_parameters())
        else:
            average = None if average is None else flat.split(average)
            learned = flat.named_optimizer_state(self.step.optimizer)
        return {
            "model": dict(self.weights.state_dict()),
            "ema": average,
            "optimizer": learned,
            "loss_scaler": self.step.scaler.state_dict(),
            "compression": compression.carried() if compression is not None else {},
        }

    def save(self, step: int) -> None:
        """Begin to write a checkpoint, after the one that is on its way; all ranks call this.

        Raises:
            UserError: the one before could not be written (or this one, where saving is not asynchronous).
        """
        self.finish_saving()
        if step == self.saved_step:
            return
        self.sync_buffers()
        state = {
            "step": step,
            "epoch": self.epoch(step),
            **self.state(),
            "classes": list(self.classes),
            "train_images": len(self.sources["train"]),
            "config": self.config.model_dump(mode="json"),
            "seconds": self.seconds(),
            "world_size": self.world.size,
        }
        self.saver.save(state, step)
        self.saved_step = step
        if not self.config.runtime.checkpoint_async:
            self.finish_saving()

    def finish_saving(self) -> None:
        """Wait for the checkpoint that is on its way, if any, and note it down; all ranks call this.

        Raises:
            UserError: it could not be written; the same on all ranks.
        """
        saved = self.saver.finish()
        if saved is None or saved.path is None or not self.world.is_main:
            return
        self.folder.add_record(
            "checkpoint",
            saved.step,
            self.epoch(saved.step),
            path=str(saved.path.relative_to(self.folder.path)),
            blocked_seconds=round(saved.blocked_seconds, 4),
            seconds=round(saved.seconds, 4),
        )

    def seconds(self) -> float:
        """Wall time since the run began, without the time between processes."""
        return self.seconds_before + time.monotonic() - self.started

    def load_state(self, opened: checkpoint.Checkpoint) -> None:
        """Restore model, average, optimizer and loss scale in place, whatever number of ranks saved them."""
        own = {**self.state(), "optimizer": {}, "compression": {}}
        into, _ = checkpoint.split(own)
        into |= opened.like(own["model"])
        opened.check_fits(into)
        opened.read(into)
        state = opened.state(into)
        self.weights.load_state_dict(state["model"])
        flat = self.step.wrapped.weights
        if self.step.ema is not None:
            self.step.ema.load(state["ema"] if flat is None else flat.join(state["ema"]))
        # The groups keep this run's settings (decay, implementation); only what was learned is taken.
        if flat is None:
            load_named_state(self.step.optimizer, self.weights.named_parameters(), state["optimizer"])
        else:
            flat.load_optimizer_state(self.step.optimizer, state["optimizer"])
        if state["loss_scaler"] and self.step.scaler.is_enabled():
            self.step.scaler.load_state_dict(state["loss_scaler"])
        if self.step.wrapped.compression is not None:
            self.step.wrapped.compression.load(state["compression"], state["step"])


def start_run(config: RunConfig, world: World, display: Display) -> Run:
    """Build every part, in the order that each needs the ones before it.

    Raises:
        UserError: anything in the configuration, the data or the machine that stands in the way.
    """
    parts = build_parts(config, world, display)
    # Named after what was asked for: a restart with fewer ranks finds it, whatever else they change.
    run_dir, restarted = choose_run_dir(config, world)
    config, sources = parts.config, parts.sources
    whole = config.schedule.epochs * parts.steps_per_epoch
    folder = RunFolder(run_dir)
    run = Run(
        config=config,
        world=world,
        folder=folder,
        display=display,
        sources=sources,
        network=parts.network,
        step=parts.step,
        switches=parts.switches,
        complexity=parts.complexity,
        largest_unit=parts.largest_unit,
        saver=Saver(
            folder.checkpoints,
            world,
            keep=config.runtime.keep_checkpoints,
            asynchronous=config.runtime.checkpoint_async,
        ),
        steps_per_epoch=parts.steps_per_epoch,
        total_steps=min(whole, config.schedule.max_steps or whole),
    )
    _occupy(run)
    resume(run, restarted=restarted)
    # A lower schedule.max_steps takes nothing back.
    run.total_steps = max(run.total_steps, run.start_step)
    if world.is_main:
        run.folder.create()
    _occupy(run)
    if world.is_main:
        resolved = {**config.model_dump(mode="json"), "run_dir": str(run.folder.path)}
        resolved["speed"] |= {str(name): value for name, value in run.switches.items()}
        run.folder.write_config(resolved)
        run.folder.write_json("environment.json", environment(world.device, world.size))
    _introduce(run)
    return run


def _occupy(run: Run) -> None:
    """Keep other runs out of the folder, once it is there.

    Raises:
        UserError: one is in there.
    """
    there = run.world.is_main and run.folder.path.is_dir()
    holder = run.world.from_main(run.folder.occupy() if there else None)
    if holder is not None:
        raise UserError(
            f"run_dir: {run.folder.path} is in use by {holder}; wait for it, or give each run a folder of its own"
        )


def _introduce(run: Run) -> None:
    config, world = run.config, run.world
    train, val = run.sources["train"], run.sources["val"]
    batch = f"{config.data.global_batch_size}"
    if world.size * config.optim.accumulation_steps > 1:
        each = config.data.global_batch_size // world.size // config.optim.accumulation_steps
        batch += f" = {world.size} ranks x {config.optim.accumulation_steps} microbatches x {each}"
    parameters = run.complexity.parameters
    group = run.step.wrapped.shard_group
    level, compute_bytes = build.level(config), build.compute_dtype(config).itemsize
    memory = footprint(
        parameters,
        run.largest_unit,
        state_copies=_STATE_COPIES[config.optim.name] + (run.step.ema is not None),
        strategy=build.strategy(config, world),
        degree=1 if group is None else group.size(),
        reshard_after_forward=config.parallel.reshard_after_forward,
        compute_bytes=compute_bytes if level.weights != "float32" else 4,
        autocast_bytes=compute_bytes if level.autocast else 0,
        recomputes=run.switches[SwitchName.RECOMPUTE] == "full",
    )
    chosen = "  ".join(
        f"{switch.name}={run.switches[switch.name]}"
        for switch in CATALOGUE
        if config.model.kind in switch.applies_to and run.switches[switch.name] != switch.reference
    )
    rows = [
        ("model", f"{config.model.kind}, {human(parameters)} parameters"),
        (
            "one image",
            f"{human(run.complexity.forward_flops, 'FLOP')} forward, {human(run.complexity.activations)} activations",
        ),
        *_trainable_row(run),
        ("training images", f"{len(train):,} in {len(train.classes)} classes"),
        ("validation images", f"{len(val):,}"),
        ("steps", f"{run.total_steps:,} ({config.schedule.epochs} epochs of {run.steps_per_epoch:,})"),
        ("global batch", batch),
        ("preprocessing", build.preprocessing(config)),
        ("memory per rank", f"{human(memory, 'B')} for weights, gradients and optimizer"),
        (
            "device",
            f"{device_name(world.device)}, {world.size} rank{'s' if world.size > 1 else ''}, {config.precision.name}",
        ),
        ("switches", chosen or "all at their reference"),
        ("run folder", str(run.folder.path)),
    ]
    run.display.table(config.config_name, rows)
    if run.switches[SwitchName.COMPILE] != "off":
        run.display.note("speed.compile: the first step compiles the network, which takes 20 to 100 s")


def _trainable_row(run: Run) -> list[tuple[str, str]]:
    if "all" in run.config.optim.trainable:
        return []
    trained = [parameter.numel() for parameter in run.network.parameters() if parameter.requires_grad]
    names = ", ".join(run.config.optim.trainable)
    return [("trained", f"{names}: {human(sum(trained))} parameters in {len(trained)} tensors")]


def summary(
    run: Run, evaluations: list[dict[str, Any]], rate: float, step_seconds: float, memory: int
) -> dict[str, Any]:
    """The values of `summary.json`."""
    primary = primary_records(run, evaluations)
    best = best_evaluation(primary, run.config.schedule.early_stopping_metric)
    return {
        "config_name": run.config.config_name,
        "seed": run.config.seed,
        "steps": run.total_steps,
        "epochs": run.epoch(run.total_steps),
        "final": primary[-1] if primary else None,
        "best": None if best is None else primary[best],
        "images_per_second": _number(rate),
        "step_seconds_p50": _number(step_seconds),
        "memory_peak_bytes": memory,
        "parameters": run.complexity.parameters,
        "forward_flops_per_image": run.complexity.forward_flops,
        "wall_seconds": run.seconds(),
        "world_size": run.world.size,
        "device": device_name(run.world.device),
        "versions": versions(),
    }


def primary_records(run: Run, evaluations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The evaluations that count: those of the average where there is one."""
    weights = "ema" if run.step.ema is not None else "model"
    return [record for record in evaluations if record["weights"] == weights and record["split"] == "val"]


def best_evaluation(evaluations: Sequence[Mapping[str, Any]], metric: str) -> int | None:
    """The place of the first of the best evaluations; None where there is none.

    Args:
        evaluations: records of `metrics.jsonl`.
        metric: "top1" (the highest is best) or "loss" (the lowest; one that is no number is the worst).
    """
    scores = [-record["top1"] if metric == "top1" else record["loss"] for record in evaluations]
    scores = [math.inf if score is None or math.isnan(score) else score for score in scores]
    return scores.index(min(scores)) if scores else None


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
