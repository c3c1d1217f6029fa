"""A training run from its configuration to its summary: puts the parts together and keeps their state."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from pycls_fast import build
from pycls_fast.config.schema import RunConfig
from pycls_fast.data import Source
from pycls_fast.errors import UserError
from pycls_fast.models import Complexity, complexity
from pycls_fast.optim import MasterWeights, load_named_state, named_state
from pycls_fast.parallel import World, floating_buffers, prepare_model, wrap_model
from pycls_fast.speed import CATALOGUE, SwitchName
from pycls_fast.train import checkpoint
from pycls_fast.train.display import Display, human
from pycls_fast.train.run_folder import RunFolder, device_name, environment, versions
from pycls_fast.train.step import Step
from pycls_fast.train.watchdog import Watchdog
from pycls_fast.train.weights import load_weights

# What a checkpoint has to have in common with the run that goes on from it: the position in the data depends on it.
_SAME_ON_RESUME = (
    "seed",
    "model",
    "data.global_batch_size",
    "data.image_size",
    "optim.name",
    "optim.ema_decay",
    "optim.min_factored",
)
# What may differ without a word.
_FREE_ON_RESUME = ("config_name", "run_dir", "resume", "runtime", "parallel", "speed", "schedule.max_steps")

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
    network: nn.Module
    step: Step
    switches: build.Switches
    complexity: Complexity
    steps_per_epoch: int
    total_steps: int
    start_step: int = 0
    damaged: dict[str, str] = field(default_factory=dict)
    # Wall time of the processes before this one.
    seconds_before: float = 0.0
    started: float = field(default_factory=time.monotonic)

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names in the order of the model's outputs."""
        return self.sources["train"].classes

    @property
    def weights(self) -> nn.Module | MasterWeights:
        """What checkpoints hold and the optimizer owns: the masters of a network in a half format, else the network."""
        return self.step.masters or self.network

    def epoch(self, step: int) -> float:
        """Steps as epochs."""
        return step / self.steps_per_epoch

    def sync_buffers(self) -> None:
        """Give all ranks the same BatchNorm statistics, those of the average included."""
        buffers = floating_buffers(self.network)
        if self.step.ema is not None:
            names = {name for name, _ in self.network.named_buffers()}
            buffers += [value for name, value in self.step.ema.values.items() if name in names]
        self.world.average_buffers(buffers)

    def save(self, step: int) -> Path | None:
        """Write a checkpoint (rank 0); all ranks call this."""
        self.sync_buffers()
        if not self.world.is_main:
            return None
        state = {
            "step": step,
            "model": self.weights.state_dict(),
            "ema": self.step.ema.values if self.step.ema is not None else None,
            "optimizer": named_state(self.step.optimizer, self.weights.named_parameters()),
            "loss_scaler": self.step.scaler.state_dict(),
            "classes": list(self.classes),
            "train_images": len(self.sources["train"]),
            "config": self.config.model_dump(mode="json"),
            "seconds": self.seconds(),
        }
        path = checkpoint.save(state, self.folder.checkpoints, step, keep=self.config.runtime.keep_checkpoints)
        self.folder.add_record("checkpoint", step, self.epoch(step), path=str(path.relative_to(self.folder.path)))
        return path

    def seconds(self) -> float:
        """Wall time since the run began, without the time between processes."""
        return self.seconds_before + time.monotonic() - self.started

    def resume(self) -> None:
        """Go on from where the configuration says, if anywhere.

        Raises:
            UserError: a checkpoint that is missing, damaged or of another run.
        """
        setting = self.config.resume
        if setting == "never":
            # Asked of rank 0: by the time another rank looks, this run's own files may be there.
            if self.world.from_main(self.folder.has_run):
                raise UserError(f"run_dir: {self.folder.path} already holds a run; choose another or use resume=auto")
            return
        if setting == "auto":
            newest = checkpoint.newest(self.folder.checkpoints, self.display.warn) if self.world.is_main else None
            path = self.world.from_main(newest)
            if path is None:
                return
        else:
            path = Path(setting).expanduser()
        state = checkpoint.load(path)
        self._check_resumable(path, state)
        self.load_state(state)
        self.start_step = state["step"]
        self.seconds_before = state["seconds"]
        if self.world.is_main:
            # A checkpoint named by its path may go on in a new folder.
            self.folder.create()
            self.folder.forget_after(self.start_step)
            self.folder.add_record(
                "event", self.start_step, self.epoch(self.start_step), event="resumed", path=str(path)
            )
        self.display.note(f"resumed from {path} at step {self.start_step}, epoch {self.epoch(self.start_step):.2f}")

    def load_state(self, state: checkpoint.State) -> None:
        """Restore model, average, optimizer and loss scale in place."""
        self.weights.load_state_dict(state["model"])
        if self.step.ema is not None:
            self.step.ema.load(state["ema"])
        # The groups keep this run's settings (decay, implementation); only what was learned is taken.
        load_named_state(self.step.optimizer, self.weights.named_parameters(), state["optimizer"])
        if state["loss_scaler"] and self.step.scaler.is_enabled():
            self.step.scaler.load_state_dict(state["loss_scaler"])

    def _check_resumable(self, path: Path, state: checkpoint.State) -> None:
        before, now = _flat(state["config"]), _flat(self.config.model_dump(mode="json"))
        changed = {key: (before.get(key), now.get(key)) for key in before | now if before.get(key) != now.get(key)}
        wrong = [
            f"{key}: {new} now, but {old} when {path} was saved; set it back, or start anew in another run_dir"
            for key, (old, new) in sorted(changed.items())
            if _under(key, _SAME_ON_RESUME)
        ]
        if state["train_images"] != len(self.sources["train"]) or tuple(state["classes"]) != self.classes:
            wrong.append(
                f"data.root: {len(self.sources['train'])} training images in {len(self.classes)} classes now, but "
                f"{state['train_images']} in {len(state['classes'])} (or other class names) when {path} was saved"
            )
        if wrong:
            raise UserError(*wrong)
        for key, (old, new) in sorted(changed.items()):
            if not _under(key, _FREE_ON_RESUME):
                self.display.note(f"changed since the checkpoint: {key} {old} -> {new}")


def _under(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def start_run(config: RunConfig, world: World, display: Display) -> Run:
    """Build every part, in the order that each needs the ones before it.

    Raises:
        UserError: anything in the configuration, the data or the machine that stands in the way.
    """
    build.set_backend(config, world.device)
    switches = build.switches(config, world.device)
    build.microbatch_size(config, world)
    sources = build.sources(config, world)
    steps_per_epoch = len(sources["train"]) // config.data.global_batch_size
    if steps_per_epoch == 0:
        raise UserError(
            f"data.global_batch_size: {config.data.global_batch_size} is larger than the training set of "
            f"{len(sources['train'])} images; use a smaller one"
        )
    network = build.model(config, build.num_classes(config, sources["train"]), switches)
    if config.weights is not None:
        origin = load_weights(network, config.weights, classes=sources["train"].classes, allow=config.weights_allow)
        display.table("weights", origin.fitted.table())
    counted = complexity(network, image_size=config.data.image_size)
    network = prepare_model(network, world, memory_format=switches[SwitchName.MEMORY_FORMAT])
    step = make_step(config, network, world, switches, steps_per_epoch)
    whole = config.schedule.epochs * steps_per_epoch
    run = Run(
        config=config,
        world=world,
        folder=RunFolder(_run_dir(config, world)),
        display=display,
        sources=sources,
        network=network,
        step=step,
        switches=switches,
        complexity=counted,
        steps_per_epoch=steps_per_epoch,
        total_steps=min(whole, config.schedule.max_steps or whole),
    )
    run.resume()
    if world.is_main:
        run.folder.create()
        resolved = {**config.model_dump(mode="json"), "run_dir": str(run.folder.path)}
        resolved["speed"] |= {str(name): value for name, value in switches.items()}
        run.folder.write_config(resolved)
        run.folder.write_json("environment.json", environment(world.device, world.size))
    _introduce(run)
    return run


def make_step(
    config: RunConfig, network: nn.Module, world: World, switches: build.Switches, steps_per_epoch: int
) -> Step:
    """The training step around a network that is on its device, which gets the precision's format."""
    masters = build.lower(config, network, world.device)
    build.save_activation_memory(config, network, switches)
    scaler = build.loss_scaler(config, world.device)
    return Step(
        forward=wrap_model(
            network,
            world,
            compiled=switches[SwitchName.COMPILE],  # type: ignore[arg-type]  # a Literal in the schema
            compile_mode=switches[SwitchName.COMPILE_MODE],  # type: ignore[arg-type]
        ),
        parameters=masters.parameters if masters else [p for p in network.parameters() if p.requires_grad],
        prepare=build.prepare(config, world.device, switches),
        mixer=build.mixer(config),
        loss=build.loss(config),
        autocast=build.autocast(config, world.device),
        scaler=scaler,
        optimizer=build.optimizer(config, network, switches, masters),
        schedule=build.schedule(config, steps_per_epoch),
        clip_norm=config.optim.clip_norm,
        clip_foreach=switches[SwitchName.CLIP] == "foreach",
        ema=build.ema(config, network, switches, masters),
        seed=config.seed,
        rank=world.rank,
        masters=masters,
        watchdog=Watchdog(network, scaled=scaler.is_enabled()) if config.runtime.watchdog else None,
    )


def _run_dir(config: RunConfig, world: World) -> Path:
    if config.run_dir is not None:
        return Path(config.run_dir).expanduser()
    path = Path("runs") / config.config_name / time.strftime("%Y-%m-%d_%H-%M-%S")
    suffix = 1
    while path.exists():
        suffix += 1
        path = path.with_name(f"{path.name.partition('~')[0]}~{suffix}")
    return Path(world.from_main(str(path)))


def _introduce(run: Run) -> None:
    config, world = run.config, run.world
    train, val = run.sources["train"], run.sources["val"]
    batch = f"{config.data.global_batch_size}"
    if world.size * config.optim.accumulation_steps > 1:
        each = config.data.global_batch_size // world.size // config.optim.accumulation_steps
        batch += f" = {world.size} ranks x {config.optim.accumulation_steps} microbatches x {each}"
    parameters = run.complexity.parameters
    # Weights, gradients, optimizer state and average, in float32; activations come on top.
    copies = 2 + _STATE_COPIES[config.optim.name] + (run.step.ema is not None)
    plain = {switch.name: switch.reference for switch in CATALOGUE}
    chosen = "  ".join(f"{name}={value}" for name, value in run.switches.items() if value != plain[name])
    rows = [
        ("model", f"{config.model.kind}, {human(parameters)} parameters"),
        (
            "one image",
            f"{human(run.complexity.forward_flops, 'FLOP')} forward, {human(run.complexity.activations)} activations",
        ),
        ("training images", f"{len(train):,} in {len(train.classes)} classes"),
        ("validation images", f"{len(val):,}"),
        ("steps", f"{run.total_steps:,} ({config.schedule.epochs} epochs of {run.steps_per_epoch:,})"),
        ("global batch", batch),
        ("memory per rank", f"{human(4.0 * copies * parameters, 'B')} for weights, gradients and optimizer"),
        (
            "device",
            f"{device_name(world.device)}, {world.size} rank{'s' if world.size > 1 else ''}, {config.precision.name}",
        ),
        ("switches", chosen or "all at their reference"),
        ("run folder", str(run.folder.path)),
    ]
    run.display.table(config.config_name, rows)


def summary(
    run: Run, evaluations: list[dict[str, Any]], rate: float, step_seconds: float, memory: int
) -> dict[str, Any]:
    """The values of `summary.json`."""
    primary = primary_records(run, evaluations)
    return {
        "config_name": run.config.config_name,
        "seed": run.config.seed,
        "steps": run.total_steps,
        "epochs": run.epoch(run.total_steps),
        "final": primary[-1] if primary else None,
        "best": max(primary, key=lambda record: record["top1"]) if primary else None,
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


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
