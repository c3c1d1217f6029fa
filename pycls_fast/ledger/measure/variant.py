"""A configuration that is timed: its network, its step and its input pipeline, its turns, and the record of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from pycls_fast import build
from pycls_fast.config import RunConfig
from pycls_fast.data.batch import Batch
from pycls_fast.data.choices import Synthetic
from pycls_fast.data.sources.base import Images
from pycls_fast.ledger.measure.device import DeviceMemory, MatmulPeak
from pycls_fast.ledger.measure.workloads import (
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
from pycls_fast.ledger.report.statistics import paired_ratio, spread
from pycls_fast.models.complexity import complexity
from pycls_fast.parallel.world import World
from pycls_fast.seeds import counter_seed
from pycls_fast.train.assemble import build_step
from pycls_fast.train.metrics import StepMemory
from pycls_fast.train.resolving import resolve, with_precision
from pycls_fast.values import Size

_EVALUATION_BATCH, _TRAINING_BATCH = 1, 2


@dataclass(frozen=True)
class TurnLength:
    """How long a turn is: at least so many steps, and so many seconds; before a part's first one, at least
    `warmup_steps`, and half of the seconds."""

    steps: int
    warmup_steps: int
    seconds: float = 0.0


@dataclass
class Session:
    """What variants that are timed in turns share.

    Attributes:
        matmul_size: see `MatmulPeak`.
        variants: those built so far: the same data is opened once, and the same products have one peak.
    """

    parts: Sequence[PartName]
    world: World
    matmul_size: int | None = None
    order: StepRange = field(default_factory=StepRange)
    variants: list[TimedVariant] = field(default_factory=list)


class TimedVariant:
    """A built configuration with its measurements.

    Attributes:
        training_complexity: for an image of the first epoch.
        lengths: steps of a turn of each part.
        stages: record of the input pipeline's stages.
    """

    config: RunConfig
    sources: Mapping[str, Images]
    matmul: MatmulPeak | None = None
    trainer: Trainer | None = None
    skipped_steps = 0
    stages: dict[str, Any] | None = None

    def __init__(self, name: str, config: RunConfig, session: Session) -> None:
        """Build what the session's parts need; a `UserError` if something cannot be built or read."""
        world, parts, others = session.world, session.parts, session.variants
        if config.data.source != "synthetic" and config.data.root is None:
            # Only if no image is read, which the configuration's checks ensure: the number of classes has to come from
            # somewhere, and the record says from where.
            shared = config.data.model_dump(exclude={"source", *config.data.own()})
            if config.model.num_classes is not None:
                shared["synthetic_classes"] = config.model.num_classes
            config = config.model_copy(update={"data": Synthetic(**shared)})
        same_data = (o.sources for o in others if o.config.data == config.data and o.config.seed == config.seed)
        resolved = resolve(with_precision(config, world), world, opened=next(same_data, None), timed=True)
        config, train = resolved.config, resolved.sources["train"]
        if {"loader", "both"} & set(parts):
            # Only these parts read images, and need at least one global batch.
            build.steps_per_epoch(config, len(train))
        self.training_complexity, size = resolved.complexity, config.data.training_image_sizes[0]
        if size != config.data.image_size:
            network = build.counted_model(config, resolved.outputs)
            self.training_complexity = complexity(network, image_size=size)
        self.resolved, self.config, self.switches = resolved, config, resolved.switches
        self.sources, self.name, self.world, self.memory = resolved.sources, name, world, DeviceMemory(world.device)
        self.parts = dict[PartName, Part]()
        self.lengths = dict[PartName, int]()
        self.turns = dict[PartName, list[Turn]]()
        if {"train", "inference", "both"} & set(parts):
            peaks = (other.matmul for other in others if _products(other.config) == _products(config))
            self.matmul = next(peaks, None) or MatmulPeak(build.compute_dtype(config), world, session.matmul_size)
            # Before the model is built: otherwise libraries' workspaces would count as the first variant's memory.
            self.matmul.measure()
            with self.memory.during("building"):
                self._build_model_parts(parts)
        for part in ("loader", "both"):
            if part in parts:
                trainer = self.trainer if part == "both" else None
                self.parts[part] = LoaderPart(config, train, self.switches, world, session.order, trainer)

    def _build_model_parts(self, parts: Sequence[PartName]) -> None:
        config, switches, world = self.config, self.switches, self.world
        step = build_step(self.resolved, world)
        labels = self.resolved.outputs if step.sets_LK is None else len(step.sets_LK)
        self.trainer = Trainer(step, world, switches)
        microbatch, host = build.microbatch_size(config, world), build.prepare_on_host(config, switches)

        def batch(count: int, size: Size, which: int, **more: Any) -> Batch:
            seed = counter_seed(config.seed, which, world.data_rank)
            return synthetic_batch(count, size, labels, seed=seed, device=world.device, **more)

        if "train" in parts:
            size, erase = config.data.training_image_sizes[0], config.augment.erase_probability
            trained = batch(microbatch, size, _TRAINING_BATCH, erase_probability=erase, host=host)
            memory = StepMemory(world, compiled=build.compiles(config, switches))
            self.parts["train"] = TrainPart(self.trainer, trained, config.optim.microbatches, memory, world)
        if "inference" in parts:
            count, host = config.data.eval_batch_size or microbatch, host and replace(host, mixer=None)
            scored = batch(count, config.data.image_size, _EVALUATION_BATCH, erase_probability=0.0, host=host)
            self.parts["inference"] = InferencePart(step, scored, world)

    def begin(self, part: PartName, length: TurnLength) -> None:
        """Warm up a part, and find how many steps its turns have."""
        self.turns[part] = []
        with self._at_work(part):
            self.parts[part].warm_up(length.warmup_steps)
            self.lengths[part] = turn_length(self.parts[part], self.world, length.steps, length.seconds)
        self._newly_skipped()

    def take_turn(self, part: PartName) -> None:
        self.world.at(f"timing {self.name}, {part}: turn {len(self.turns[part]) + 1}")
        with self._at_work(part):
            turn = self.parts[part].turn(self.lengths[part])
        self.turns[part].append(slowest(turn, self.world))

    def end(self, part: PartName) -> None:
        """Read what the device and the process have counted during a part."""
        self.skipped_steps += self._newly_skipped()
        timed = self.parts[part]
        if isinstance(timed, TrainPart) and timed.memory.counted is not None:
            self.memory.peaks[part] = timed.memory.counted
        if part in self.memory.peaks:
            self.memory.peaks[part] = max(self.world.gather(self.memory.peaks[part]))

    def measure_peak(self) -> None:
        """Time the matrix product under this variant's process-wide settings."""
        assert self.matmul is not None
        build.set_backend(self.config, self.world.device, self.switches)
        self.matmul.measure()

    @contextmanager
    def _at_work(self, part: PartName) -> Iterator[None]:
        """Apply the process-wide settings, count memory, start together with the other ranks."""
        build.set_backend(self.config, self.world.device, self.switches)
        self.world.barrier()
        with self.memory.during(part):
            yield

    def _newly_skipped(self) -> int:
        """Number of steps since the last call whose gradients were not finite."""
        return int(self.trainer.metrics.read(self.world)["skipped_steps"]) if self.trainer is not None else 0

    def record(self) -> dict[str, Any]:
        """What a timing file says of it; rates in images per second, memory in bytes."""
        config, counted, trained = self.config, self.resolved.complexity, self.training_complexity
        first, matmul = next(iter(self.turns)), None if self.matmul is None else self.matmul.record()
        parts: dict[str, Any] = {}
        for name, turns in self.turns.items():
            parts[name] = part_record(
                name,
                turns,
                images_per_step=self.parts[name].images_per_step,
                forward_flops_per_image=(counted if name == "inference" else trained).forward_flops,
                matmul_flops_per_second=None if matmul is None else matmul["flops_per_second"],
                memory_peak_bytes=self.memory.peaks.get(name),
                frozen=config.optim.trainable != ("all",),
            )
        return {
            "name": self.name,
            "model": config.model.kind,
            "parameters": counted.parameters,
            "forward_flops_per_image": counted.forward_flops,
            "image_size": config.data.image_size.typed,
            # The training steps are timed with images of the first epoch (`data.image_size_schedule`).
            "train_image_size": config.data.training_image_sizes[0].typed,
            "train_forward_flops_per_image": trained.forward_flops,
            "num_classes": self.resolved.outputs,
            "data": self.sources["train"].describe(),
            "global_batch_size": config.data.global_batch_size,
            "accumulation_steps": config.optim.microbatches,
            **self._whole_run(),
            "num_workers": build.num_workers(config),
            "precision": config.precision.name,
            "switches": self.switches.values(),
            "matmul": matmul,
            "skipped_steps": self.skipped_steps,
            **({"input_pipeline": self.stages} if self.stages is not None else {}),
            # The part that the names shared by all tools refer to.
            "headline": first,
            **{key: parts[first][key] for key in ("images_per_second", "step_seconds_p50", "memory_peak_bytes")},
            **parts,
            "config": config.model_dump(mode="json"),
        }

    def _whole_run(self) -> dict[str, int]:
        """Steps of a run, and the images that its evaluations score, twice each if the weights are averaged."""
        config, images, steps_per_epoch = self.config, len(self.sources["val"]), self.resolved.steps_per_epoch
        steps = build.total_steps(config, steps_per_epoch)
        every = build.steps_between_evaluations(config, steps_per_epoch)
        evaluations = -(-steps // every) * (1 if config.optim.ema_decay is None else 2)
        return {
            "steps_per_run": steps,
            "evaluated_images": images,
            "evaluated_images_per_run": evaluations * images,
        }


def _products(config: RunConfig) -> tuple[torch.dtype, bool]:
    # TF32 and float32 have the same dtype.
    return build.compute_dtype(config), build.level(config).tf32


def turn_length(part: Part, world: World, steps: int, seconds: float) -> int:
    """Steps of a turn that lasts at least `seconds` and has at least `steps`; the same on all ranks.

    Steps are run to find out, until half of `seconds` has passed: clocks and power take a while to settle under load.
    With `seconds` 0, none are. Kernels and memory of the part are warm.
    """
    if not seconds:
        return steps
    count, warm = 1, 0.0
    while warm < seconds / 2:
        turn = slowest(part.turn(count), world)
        warm += turn.total
        # A loader's has more steps than asked for.
        pace = max(turn.total, 1e-9) / len(turn.seconds)
        count = max(math.ceil((seconds / 2 - warm) / pace), 1)
    return max(steps, math.ceil(seconds / pace))


# Operations of a step, in forward passes: the backward pass has two products for each one of the forward pass
# (gradients of input and weight; Kaplan et al. 2020, section 2.1). Optimizer and recomputation are not counted.
_FORWARD_PASSES: Mapping[PartName, int] = {"train": 3, "inference": 1, "both": 3}

# Compute steps are alike, and each is a sample. Batches from workers arrive in bursts, so that most waits are zero and
# a few are long: there the mean of a turn is the sample.
_SAMPLE_PER_STEP: frozenset[PartName] = frozenset({"train", "inference"})


def part_record(
    name: PartName,
    turns: Sequence[Turn],
    *,
    images_per_step: int,
    forward_flops_per_image: int,
    matmul_flops_per_second: float | None,
    memory_peak_bytes: int | None,
    frozen: bool = False,
) -> dict[str, Any]:
    """The numbers of one part, over all ranks; a multiply-add counts 2.

    Args:
        turns: merged over the ranks by `slowest`.
        frozen: some parameters are not trained; how much of the backward pass that saves is not known.
    """
    turn_seconds = [turn.total / len(turn.seconds) for turn in turns]
    samples = [s for turn in turns for s in turn.seconds] if name in _SAMPLE_PER_STEP else turn_seconds
    summary = spread(samples)
    images_per_second = images_per_step / summary.p50
    record: dict[str, Any] = {
        "images_per_second": images_per_second,
        "images_per_step": images_per_step,
        "step_seconds_p50": summary.p50,
        "step_seconds_p10": summary.p10,
        "step_seconds_p90": summary.p90,
        "step_seconds_mean": summary.mean,
        "samples": summary.count,
        "sample": "step" if name in _SAMPLE_PER_STEP else "turn",
        "memory_peak_bytes": memory_peak_bytes,
    }
    if name in _FORWARD_PASSES and not (frozen and _FORWARD_PASSES[name] > 1):
        flops_per_second = _FORWARD_PASSES[name] * forward_flops_per_image * images_per_second
        record["flops_per_second"] = flops_per_second
        if matmul_flops_per_second is not None:
            record["share_of_matmul"] = flops_per_second / matmul_flops_per_second
    if name == "both":
        record["data_wait_fraction"] = sum(turn.waited for turn in turns) / sum(turn.total for turn in turns)
    record["turn_seconds"] = turn_seconds
    record["step_seconds_each"] = [list(turn.seconds) for turn in turns]
    return record


def speed_comparison(part: str, reference: Mapping[str, Any], variant: Mapping[str, Any]) -> dict[str, Any]:
    """The variant's images per second over the reference's, turn by turn, and its memory over the reference's."""
    rates = [
        [record[part]["images_per_step"] / seconds for seconds in record[part]["turn_seconds"]]
        for record in (reference, variant)
    ]
    peaks = [record[part]["memory_peak_bytes"] for record in (reference, variant)]
    return {
        "part": part,
        "variant": variant["name"],
        "reference": reference["name"],
        "speedup": asdict(paired_ratio(*rates)),
        "memory_ratio": None if None in peaks else peaks[1] / peaks[0],
    }
