"""A configuration to be timed: its network, its step and its input pipeline, built; and what was measured of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pycls_fast import build
from pycls_fast.config import RunConfig
from pycls_fast.counter import counter_seed
from pycls_fast.data import Source
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
    synthetic_batch,
)
from pycls_fast.models import Complexity, complexity
from pycls_fast.parallel import World, place_model
from pycls_fast.speed import SwitchName
from pycls_fast.train.building import make_step
from pycls_fast.train.resolving import with_precision

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


def build_variant(
    name: str,
    config: RunConfig,
    parts: Sequence[PartName],
    world: World,
    order: StepRange,
    others: Sequence[Variant],
    matmul_size: int | None,
) -> Variant:
    """Build what the parts need.

    Args:
        name: the variant's.
        config: its configuration.
        parts: which parts will be timed.
        world: the ranks.
        order: the steps whose images no input pipeline has read so far.
        others: variants built before: the same data is opened once, and the same products have one peak.
        matmul_size: side of the matrices whose product sets the peak; None for the device's default.

    Raises:
        UserError: something cannot be built or read.
    """
    if config.data.source != "synthetic" and config.data.root is None:
        # Only if no image is read, which the configuration's checks ensure: the number of classes has to come from
        # somewhere, and the record says from where.
        config = config.with_values(data={"source": "synthetic"})
    config = with_precision(config, world)
    switches = build.switches(config, world.device)
    build.set_backend(config, world.device, switches)
    build.microbatch_size(config, world)
    same_data = [o.sources for o in others if o.config.data == config.data and o.config.seed == config.seed]
    sources = same_data[0] if same_data else build.sources(config, world)
    train = sources["train"]
    classes = build.num_classes(config, train)
    config = build.resolve_auto(config, len(train), world, classes=classes)
    microbatch = build.microbatch_size(config, world)
    if {"loader", "both"} & set(parts):
        # Only these parts read images, and need at least one global batch.
        build.steps_per_epoch(config, len(train))
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
        variant.parts["train"] = TrainPart(variant.trainer, batch, config.optim.microbatches, world)
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
