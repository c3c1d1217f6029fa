"""Timing one experiment, or several variants of it in turns: build, measure, record."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from pycls_fast import build
from pycls_fast.config import RunConfig
from pycls_fast.counter import counter_seed
from pycls_fast.data import Source
from pycls_fast.errors import UserError
from pycls_fast.exit_status import DONE
from pycls_fast.ledger.clocks import DeviceMemory, MatmulPeak
from pycls_fast.ledger.parts import (
    InferencePart,
    LoaderPart,
    Part,
    PartName,
    StepRange,
    Trainer,
    TrainPart,
    Turn,
    slowest,
    synthetic_batch,
)
from pycls_fast.ledger.records import part_record, speed_comparison
from pycls_fast.ledger.stages import measure_stages
from pycls_fast.ledger.timing_table import print_record
from pycls_fast.ledger.turn_length import turn_length
from pycls_fast.models import Complexity, complexity
from pycls_fast.parallel import World, place_model
from pycls_fast.paths import timestamp
from pycls_fast.speed import SwitchName
from pycls_fast.train.building import make_step
from pycls_fast.train.display import Display
from pycls_fast.train.enough import enough_images
from pycls_fast.train.environment import environment_command, provenance
from pycls_fast.train.metrics import memory_peak_bytes
from pycls_fast.train.output_file import output_file, write_json

Mode = Literal["train", "model", "loader", "both", "all"]

PARTS: Mapping[Mode, tuple[PartName, ...]] = {
    "train": ("train",),
    "model": ("train", "inference"),
    "loader": ("loader",),
    "both": ("both",),
    "all": ("train", "inference", "loader", "both"),
}

_EVALUATION_BATCH, _TRAINING_BATCH = 1, 2


@dataclass
class Variant:
    """A built configuration with its measurements."""

    name: str
    config: RunConfig
    switches: build.Switches
    sources: dict[str, Source]
    # For one image of evaluation, and for one of the first epoch.
    complexity: Complexity
    training_complexity: Complexity
    classes: int
    memory: DeviceMemory
    matmul: MatmulPeak | None = None
    trainer: Trainer | None = None
    parts: dict[PartName, Part] = field(default_factory=dict)
    turns: dict[PartName, list[Turn]] = field(default_factory=dict)
    skipped_steps: int = 0
    # Record of the input pipeline's stages.
    stages: dict[str, Any] | None = None
    # Peak memory of the process after the first part, on the CPU.
    process_peak: int | None = None


def time_variants(
    variants: Sequence[tuple[str, RunConfig]],
    *,
    mode: Mode,
    steps: int,
    warmup_steps: int,
    repeats: int,
    seconds: float = 0.0,
    matmul_size: int | None = None,
    output: str | None = None,
) -> int:
    """Time configurations in turns, print a table, write JSON; returns the exit status.

    Args:
        variants: name and configuration; the others are compared with the first.
        mode: which parts are timed.
        steps: timed steps per turn, at least.
        warmup_steps: steps before the first turn (before every turn for parts with the input pipeline), at least.
        repeats: turns per part and variant.
        seconds: a turn lasts at least this long, and the warm-up half of it, whatever the number of steps.
        matmul_size: side of the matrices whose product sets the peak; None for the device's default.
        output: the JSON file; None for one in `run_dir` if that is set, else in `timings/`.

    Raises:
        UserError: something cannot be built, read, compared or written.
    """
    base = variants[0][1]
    _check_comparable(variants)
    with build.world(base) as world:
        file = _output_file(base, output, world)
        display = Display(speaks=world.is_main, mode="plain")
        order = StepRange()
        built: list[Variant] = []
        for name, config in variants:
            built.append(_build(name, config, PARTS[mode], world, order, built, matmul_size))
        for part in PARTS[mode]:
            length = f"{steps} steps each" + (f" or more, for {seconds:g} s" if seconds else "")
            display.note(f"timing {part}: {repeats} turns of {length}, {len(built)} variant(s)")
            _measure(built, part, world, steps=steps, warmup_steps=warmup_steps, repeats=repeats, seconds=seconds)
        if {"loader", "both"} & set(PARTS[mode]):
            for variant in built:
                display.note(f"timing the stages of the input pipeline in this process: {variant.name}")
                first = order.take(repeats + 1)
                train = variant.sources["train"]
                variant.stages = measure_stages(
                    variant.config, train, world, variant.switches, start=first, repeats=repeats
                )
        for variant in built:
            if variant.skipped_steps:
                display.warn(
                    f"{variant.name}: {variant.skipped_steps} steps had gradients that are not finite; "
                    "if loss scaling skips them, they take less time than full steps"
                )
        if not world.is_main:
            return DONE
        settings = {
            "mode": mode, "steps": steps, "warmup_steps": warmup_steps, "repeats": repeats, "seconds": seconds
        }  # fmt: skip
        record = _record(built, settings, world)
        write_json(file, record)
        print_record(display, record)
        display.note(f"written to {file}")
        return DONE


def _check_comparable(variants: Sequence[tuple[str, RunConfig]]) -> None:
    base = variants[0][1]
    problems = []
    for name, config in variants:
        if config.weights is not None:
            problems.append("weights: timing does not depend on them; leave it out")
        for key in ("runtime", "parallel", "imports"):
            if getattr(config, key) != getattr(base, key):
                problems.append(f"compare: '{name}' changes {key}, which all variants share; time it in a separate run")
    if problems:
        raise UserError(*dict.fromkeys(problems))


def _output_file(config: RunConfig, output: str | None, world: World) -> Path:
    if output is not None:
        return output_file(output, world)
    if config.run_dir is not None:
        return output_file(Path(config.run_dir) / f"timing-{timestamp()}.json", world)
    return output_file(Path("timings") / f"{config.config_name}-{timestamp()}.json", world)


def _build(
    name: str,
    config: RunConfig,
    parts: Sequence[PartName],
    world: World,
    order: StepRange,
    others: Sequence[Variant],
    matmul_size: int | None,
) -> Variant:
    if config.data.source != "synthetic" and config.data.root is None:
        # Only if no image is read, which the configuration's checks ensure: the number of classes has to come from
        # somewhere, and the record says from where.
        config = config.with_values(data={"source": "synthetic"})
    switches = build.switches(config, world.device)
    build.set_backend(config, world.device, switches)
    build.microbatch_size(config, world)
    same_data = [o.sources for o in others if o.config.data == config.data and o.config.seed == config.seed]
    sources = same_data[0] if same_data else build.sources(config, world)
    train = sources["train"]
    config = build.resolve_auto(config, len(train), world)
    microbatch = build.microbatch_size(config, world)
    if {"loader", "both"} & set(parts):
        # Only these parts read images, and need at least one global batch.
        build.steps_per_epoch(config, len(train))
    classes = build.num_classes(config, train)
    counted = {
        size: complexity(lambda: build.counted_model(config, classes, switches), image_size=size)
        for size in {config.data.image_size, config.data.training_image_sizes[0]}
    }
    variant = Variant(
        name=name,
        config=config,
        switches=switches,
        sources=sources,
        complexity=counted[config.data.image_size],
        training_complexity=counted[config.data.training_image_sizes[0]],
        classes=classes,
        memory=DeviceMemory(world.device),
    )
    if {"train", "inference", "both"} & set(parts):
        peaks = (other.matmul for other in others if _products(other.config) == _products(config))
        variant.matmul = next(peaks, None) or MatmulPeak(build.compute_dtype(config), world, matmul_size)
        # Before the model is built: otherwise libraries' workspaces would count as the first variant's memory.
        variant.matmul.measure()
        with variant.memory.during("building"):
            _build_model_parts(variant, parts, microbatch, world)
    if "loader" in parts:
        variant.parts["loader"] = LoaderPart(config, train, switches, world, order)
    if "both" in parts:
        assert variant.trainer is not None
        variant.parts["both"] = LoaderPart(config, train, switches, world, order).feeding(variant.trainer)
    return variant


def _products(config: RunConfig) -> tuple[torch.dtype, bool]:
    # TF32 and float32 have the same dtype.
    return build.compute_dtype(config), build.level(config).tf32


def _build_model_parts(variant: Variant, parts: Sequence[PartName], microbatch: int, world: World) -> None:
    config, switches = variant.config, variant.switches
    network = build.model(config, variant.classes, switches, empty=build.is_sharded(config, world))
    network = place_model(network, world, memory_format=switches[SwitchName.MEMORY_FORMAT])
    steps_per_epoch = max(1, len(variant.sources["train"]) // config.data.global_batch_size)
    step = make_step(config, network, world, switches, steps_per_epoch)
    variant.trainer = Trainer(step, world, switches)
    host = build.prepare_on_host(config, switches)
    if "train" in parts:
        batch = synthetic_batch(
            microbatch,
            config.data.training_image_sizes[0],
            variant.classes,
            erase_probability=config.augment.erase_probability,
            seed=counter_seed(config.seed, _TRAINING_BATCH, world.rank),
            device=world.device,
            host=host,
        )
        variant.parts["train"] = TrainPart(variant.trainer, batch, config.optim.accumulation_steps, world)
    if "inference" in parts:
        batch = synthetic_batch(
            config.data.eval_batch_size or microbatch,
            config.data.image_size,
            variant.classes,
            erase_probability=0.0,
            seed=counter_seed(config.seed, _EVALUATION_BATCH, world.rank),
            device=world.device,
            host=host and replace(host, mixer=None),
        )
        variant.parts["inference"] = InferencePart(network, step, batch, world)


def _measure(
    variants: Sequence[Variant],
    name: PartName,
    world: World,
    *,
    steps: int,
    warmup_steps: int,
    repeats: int,
    seconds: float = 0.0,
) -> None:
    lengths = {}
    for variant in variants:
        variant.turns[name] = []
        with _at_work(variant, name, world):
            variant.parts[name].warm_up(warmup_steps)
            lengths[variant.name] = turn_length(variant.parts[name], world, steps, seconds)
        _read_metrics(variant, world)
    owners = {id(v.matmul): v for v in variants if v.matmul is not None and name != "loader"}
    for repeat in range(repeats):
        for owner in owners.values():
            assert owner.matmul is not None
            build.set_backend(owner.config, world.device, owner.switches)
            owner.matmul.measure()
        # Alternating order: a steady drift and the position in the round cancel over two rounds.
        for variant in variants if repeat % 2 == 0 else reversed(variants):
            world.at(f"timing {variant.name}, {name}: turn {repeat + 1}")
            with _at_work(variant, name, world):
                turn = variant.parts[name].turn(lengths[variant.name])
            variant.turns[name].append(slowest(turn, world))
    for variant in variants:
        variant.skipped_steps += _read_metrics(variant, world)
        if world.device.type == "cpu" and variant.process_peak is None:
            variant.process_peak = max(world.gather(memory_peak_bytes(world.device)))
        elif world.device.type == "cuda":
            variant.memory.peaks[name] = max(world.gather(variant.memory.peaks[name]))


@contextmanager
def _at_work(variant: Variant, part: PartName, world: World) -> Iterator[None]:
    """Apply this variant's process-wide settings, count its memory, start together with the other ranks."""
    build.set_backend(variant.config, world.device, variant.switches)
    world.barrier()
    with variant.memory.during(part), enough_images():
        yield


def _read_metrics(variant: Variant, world: World) -> int:
    """Number of steps since the last call whose gradients were not finite."""
    return int(variant.trainer.metrics.read(world)["skipped_steps"]) if variant.trainer is not None else 0


def _record(variants: Sequence[Variant], settings: Mapping[str, Any], world: World) -> dict[str, Any]:
    """The record to write: a single variant's values at the top level, several in `variants`."""
    shared: dict[str, Any] = {
        "kind": "timing",
        "config_name": variants[0].config.config_name,
        "time": time.time(),
        "command": environment_command(),
        **settings,
        **provenance(world.device, world.size),
        # Of rank 0 so far, without its workers; on the CPU the system keeps only this peak.
        "process_memory_peak_bytes": memory_peak_bytes(world.device) if world.device.type == "cpu" else None,
    }
    if len(variants) == 1:
        return {**shared, **_variant_record(variants[0], alone=True)}
    records = [_variant_record(variant, alone=False) for variant in variants]
    comparisons = [
        speed_comparison(part, records[0], other) for part in PARTS[settings["mode"]] for other in records[1:]
    ]
    return {**shared, "variants": records, "comparisons": comparisons}


def _steps_per_run(variant: Variant) -> int:
    schedule = variant.config.schedule
    whole = schedule.epochs * (len(variant.sources["train"]) // variant.config.data.global_batch_size)
    return min(whole, schedule.max_steps or whole)


def _evaluated_images_per_run(variant: Variant) -> int:
    """Images that the evaluations of a whole run score, twice each if there is an average of the weights."""
    config = variant.config
    steps_per_epoch = max(1, len(variant.sources["train"]) // config.data.global_batch_size)
    every = config.runtime.eval_every_steps or steps_per_epoch * config.runtime.eval_every_epochs
    evaluations = -(-_steps_per_run(variant) // every)
    return evaluations * len(variant.sources["val"]) * (1 if config.optim.ema_decay is None else 2)


def _variant_record(variant: Variant, *, alone: bool) -> dict[str, Any]:
    config, counted, trained = variant.config, variant.complexity, variant.training_complexity
    first = next(iter(variant.turns))
    parts: dict[str, Any] = {}
    for name, turns in variant.turns.items():
        peak = variant.memory.peaks.get(name)
        if peak is None and alone and name == first:
            peak = variant.process_peak
        parts[name] = part_record(
            name,
            turns,
            images_per_step=variant.parts[name].images_per_step,
            forward_flops_per_image=(counted if name == "inference" else trained).forward_flops,
            matmul_flops_per_second=variant.matmul.flops_per_second if variant.matmul is not None else None,
            memory_peak_bytes=peak,
            frozen=config.optim.trainable != ("all",),
        )
    return {
        "name": variant.name,
        "model": config.model.kind,
        "parameters": counted.parameters,
        "forward_flops_per_image": counted.forward_flops,
        "activations_per_image": counted.activations,
        "image_size": config.data.image_size,
        # The training steps are timed with images of the first epoch (`data.image_size_schedule`).
        "train_image_size": config.data.training_image_sizes[0],
        "train_forward_flops_per_image": trained.forward_flops,
        "num_classes": variant.classes,
        "data": variant.sources["train"].describe(),
        "global_batch_size": config.data.global_batch_size,
        "accumulation_steps": config.optim.accumulation_steps,
        "steps_per_run": _steps_per_run(variant),
        "evaluated_images_per_run": _evaluated_images_per_run(variant),
        "num_workers": build.num_workers(config),
        "precision": config.precision.name,
        "switches": {str(switch): value for switch, value in variant.switches.items()},
        "matmul": variant.matmul.record() if variant.matmul is not None else None,
        "skipped_steps": variant.skipped_steps,
        **({"input_pipeline": variant.stages} if variant.stages is not None else {}),
        # The part that the names shared by all tools refer to.
        "headline": first,
        **{key: parts[first][key] for key in ("images_per_second", "step_seconds_p50", "memory_peak_bytes")},
        **parts,
        "config": config.model_dump(mode="json"),
    }
