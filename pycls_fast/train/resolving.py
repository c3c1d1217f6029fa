"""Values of the configuration that depend on the weights, the data or a checkpoint, replaced by what they stand for;
what else is known before a network is built.

The order matters: `weights` is pinned to a commit before anything is read from there, also by `data.normalization`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pycls_fast import build
from pycls_fast.config.run import RunConfig
from pycls_fast.data.sources.base import Images
from pycls_fast.models import pretrained
from pycls_fast.models.choices import TimmModel
from pycls_fast.models.complexity import Complexity, complexity
from pycls_fast.models.pretrained.traits import rgb_triple
from pycls_fast.parallel.world import ALONE, World
from pycls_fast.plan.auto import resolve_auto
from pycls_fast.plan.race import compile_if_it_pays, shared_race
from pycls_fast.speed import Speed
from pycls_fast.train.agreement import check_same_data, check_same_switches, on_main
from pycls_fast.train.checkpoint import Checkpoint
from pycls_fast.train.saved_weights import open_weights
from pycls_fast.values import AUTO

Statistics = tuple[tuple[float, float, float], tuple[float, float, float]]

# google-research/vision_transformer, `input_pipeline.py`: images from -1 to 1.
_JAX: Statistics = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@dataclass
class Resolved:
    """A configuration in which every `auto` is a number, and what follows from it; `sources` are its splits, and
    `outputs` the network's: the classes, and perhaps more."""

    config: RunConfig
    switches: Speed
    sources: Mapping[str, Images]
    outputs: int
    complexity: Complexity
    steps_per_epoch: int


def resolve(
    config: RunConfig, world: World, *, opened: Mapping[str, Images] | None = None, timed: bool = False
) -> Resolved:
    """Resolve what `resolve_before_data` has left, or for timing `with_precision`, and set up the process; all ranks
    call this.

    Args:
        opened: the data, if it is open.
        timed: for steps that are timed, as those of a training that is long enough to be compiled. Data that no step
            reads may have fewer images than a step.
    """
    switches = build.switches(config, world.device)
    check_same_switches(switches, world)
    build.set_backend(config, world.device, switches)
    # A batch that cannot be divided is refused before the data is opened, which may take long.
    build.microbatch_size(config, world)
    sources = opened or build.sources(config, world)
    images = len(sources["train"])
    outputs = build.num_classes(config, sources["train"])
    config = resolve_auto(config, images, world, classes=outputs)
    check_same_data(sources, world)
    batch = config.data.global_batch_size
    steps_per_epoch = max(images // batch, 1) if timed else build.steps_per_epoch(config, images)
    counted = complexity(build.counted_model(config, outputs), image_size=config.data.image_size)
    trained_on = math.inf if timed else build.total_steps(config, steps_per_epoch) * batch
    switches = compile_if_it_pays(config, switches, world, images=trained_on, flops=counted.forward_flops)
    return Resolved(config, switches, sources, outputs, counted, steps_per_epoch)


def resolve_before_data(
    config: RunConfig, world: World, resumed_from: Checkpoint | None, *, note: Callable[[str], None]
) -> RunConfig:
    """The configuration with the commit of `weights`, and with a precision, a number of threads and a normalisation,
    or with those of the checkpoint from which a run resumes; all ranks call this."""
    if resumed_from is not None:
        return as_saved(config, world, resumed_from)
    return resolve_normalization(with_precision(pin_weights(config, world), world), world, note=note)


def as_saved(config: RunConfig, world: World, resumed_from: Checkpoint) -> RunConfig:
    """The configuration of a run that resumes: with its own values for what else would depend on the ranks, their
    devices or the weights, so that it computes the same bits. Mixing and batch norm see the same images together.

    If the ranks are now so many that they, or the stages of a pipeline, cannot divide the checkpoint's microbatches,
    their number stays `auto`.
    """
    saved = resumed_from.plain["config"]
    data: dict[str, Any] = {}
    optim: dict[str, Any] = {}
    precision, threads = config.precision.name, config.runtime.threads
    if config.data.global_batch_size == AUTO:
        data["global_batch_size"] = saved["data"]["global_batch_size"]
    if config.data.normalization != "configured":
        mean, std = _saved_statistics(saved)
        data |= {"normalization": "configured", "mean": mean, "std": std}
    if config.optim.accumulation_steps == AUTO:
        together = saved["parallel"]["tensor_degree"] * saved["parallel"]["pipeline_degree"]
        parts = resumed_from.plain["world_size"] // together
        steps, rest = divmod(saved["optim"]["accumulation_steps"] * parts, world.data_size)
        if not rest and steps % world.pipeline == 0:
            optim["accumulation_steps"] = steps
    if precision == "auto":
        precision = saved["precision"]["name"]
    if threads is None and "OMP_NUM_THREADS" not in os.environ and saved["runtime"]["threads"] is not None:
        threads = min(saved["runtime"]["threads"], build.cores_per_rank())
    if (source := config.weights) is not None and source.startswith(pretrained.HUGGING_FACE):
        pinned = str(saved["weights"])
        if pinned.partition("@")[0] == source.partition("@")[0]:
            config = config.model_copy(update={"weights": pinned})
    return config.with_values(data=data, optim=optim, precision={"name": precision}, runtime={"threads": threads})


def with_precision(config: RunConfig, world: World, *, training: bool = True) -> RunConfig:
    """The configuration with a precision in place of `auto`, and with the number of threads, those that are fastest in
    training or in scoring; all ranks call this."""
    precision: Any = config.precision.name
    threads = config.runtime.threads
    if world.device.type == "cuda":
        # The fastest one with float32 weights: tensor cores compute bfloat16 from Ampere on, float16 before it.
        fastest = "amp_bf16" if torch.cuda.get_device_capability(world.device) >= (8, 0) else "amp_fp16"
        precision = fastest if precision == "auto" else precision
    elif precision == "auto" or threads is None:
        found = shared_race(config, world, training=training)
        precision, threads = found.format if precision == "auto" else precision, threads or found.threads
    return config.with_values(precision={"name": precision}, runtime={"threads": threads})


def pin_weights(config: RunConfig, world: World) -> RunConfig:
    """The configuration with `weights=hf:ORG/NAME@COMMIT` for weights of the Hugging Face hub; all ranks call this.

    Rank 0 asks the hub for the commit, and downloads what timm and torchvision name. A `UserError` on all ranks if it
    cannot.
    """
    source = config.weights
    if source is None or not (source.startswith(pretrained.HUGGING_FACE) or pretrained.is_hub(source)):
        return config
    if pretrained.is_hub(source) and pretrained.local_file(source) is not None:
        return config
    return config.model_copy(update={"weights": on_main(world, lambda: pretrained.pinned(source))})


def resolve_normalization(config: RunConfig, world: World, *, note: Callable[[str], None]) -> RunConfig:
    """The configuration with its weights' mean and standard deviation, if it asks for them and they are known."""
    if config.data.normalization == "configured":
        return config
    update: dict[str, Any] = {"normalization": "configured"}
    whose, model = config.weights, timm_name(config)
    found = None if whose is None else pixel_statistics(whose, world)
    if found is None and config.weights is not None and model is not None:
        whose, found = f"timm's {model}", pixel_statistics(config.weights, world, model=model)
    if found is not None:
        note(f"normalization: mean {_text(found[0])}, std {_text(found[1])}, those of {whose}")
        update |= {"mean": found[0], "std": found[1]}
    elif config.weights is not None and all(
        getattr(config.data, key) == type(config.data).model_fields[key].default for key in ("mean", "std")
    ):
        note(
            f"data.normalization: {config.weights} does not say how its images were normalised, so ImageNet's mean and "
            "standard deviation are used; set data.mean and data.std if they were others"
        )
    return config.with_values(data=update)


def _text(values: tuple[float, float, float]) -> str:
    return " ".join(f"{value:g}" for value in values)


def timm_name(config: RunConfig) -> str | None:
    return config.model.name if isinstance(config.model, TimmModel) else None


def pixel_statistics(source: str | Path, world: World = ALONE, *, model: str | None = None) -> Statistics | None:
    """Mean and standard deviation, for pixels in [0, 1], with which these weights were trained.

    Our runs and files record them, timm and torchvision know those of their hubs, timm's folders have them in
    `config.json`, and Google's `.npz` files all use the same. Any other file has those that timm knows of its `model`;
    None without one.
    """
    weights = open_weights(source, world)
    if weights.config is not None:
        return _saved_statistics(weights.config)
    if str(weights.path).endswith(".npz"):
        return _JAX
    about = weights.description(model=model, for_scoring=False)
    return None if about is None else (about.mean, about.std)


def _saved_statistics(config: Mapping[str, Any]) -> Statistics:
    return rgb_triple(config["data"]["mean"]), rgb_triple(config["data"]["std"])
