"""From the data's configuration to splits, batches on several ranks, loaders, transforms and their preparation."""

from __future__ import annotations

import os
from collections.abc import Collection, Generator
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing import current_process
from typing import Any

import torch

from pycls_fast.build.device import DTYPES, cores_per_rank, level
from pycls_fast.config.conflicts import Purpose, problems
from pycls_fast.config.run import RunConfig
from pycls_fast.data import native
from pycls_fast.data.batch import Batch
from pycls_fast.data.dataset import ImageDataset
from pycls_fast.data.decoders import DECODERS, SCALED_REGION, Decoder
from pycls_fast.data.loader import ImageLoader
from pycls_fast.data.prepare import Mixer, Prepare, PrepareOnHost, to_device
from pycls_fast.data.sampling import EvalSampler, TrainSampler, order_of
from pycls_fast.data.source import Opening
from pycls_fast.data.sources.base import Images
from pycls_fast.data.sources.splits import as_splits
from pycls_fast.data.transforms import EvalTransform, TrainTransform
from pycls_fast.errors import UserError, refusing
from pycls_fast.files import user_path
from pycls_fast.models.pretrained import Description
from pycls_fast.parallel.world import World
from pycls_fast.speed import Speed

# Large enough to keep a GPU busy without gradients, and small enough for a laptop.
_SCORING_BATCH = 128
# Images of a split that a CPU reads without workers.
_FEW = 256


def sources(config: RunConfig, world: World, *, index_all: bool = False, whole: bool = False) -> dict[str, Images]:
    """The splits by name, "train" and "val" among them; `whole`: a dataset that would be split at random is "all".

    With `index_all` the indexes of small datasets are cached, too.
    """
    data = config.data
    if data.root is None and data.needs_root:
        raise UserError("data.root: not set; give the folder with the images as data=PATH")
    root = data.root or ""
    root = root if "://" in root else str(user_path(root))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    how = Opening(seed=config.seed, index_all=index_all, processes=ranks)
    # An experiment's root says nothing of a source that needs none.
    key, where = ("data.root", root) if data.needs_root else ("data.source", data.source)
    try:
        with refusing(f"{key}: {where[:200]} cannot be read", use="give another"):
            return as_splits(data.open(root, how), data, where=where, whole=whole)
    except UserError as error:
        lines = (line if line.startswith(("data.", "data: ")) else f"{key}: {line}" for line in error.lines)
        raise UserError(*lines) from error


def microbatch_size(config: RunConfig, world: World) -> int:
    """Number of images in one forward pass on one rank."""
    batch, accumulation = config.data.global_batch_size, config.optim.microbatches
    parts = world.data_size * accumulation
    if batch % parts:
        below = max(batch // parts, 1) * parts
        raise UserError(
            f"data.global_batch_size: {batch} is not divisible by {world.data_size} ranks x "
            f"optim.accumulation_steps={accumulation}; use {below} or {below + parts}, or, to keep the batch of a run "
            "that resumes, other ranks or accumulation steps"
        )
    return batch // parts


def steps_per_epoch(config: RunConfig, images: int) -> int:
    """Number of whole global batches in a training set of so many images."""
    batch = config.data.global_batch_size
    if images < batch:
        raise UserError(
            f"data.global_batch_size: {batch} is larger than the training set of {images} images; use a smaller one"
        )
    return images // batch


def check_mixing(config: RunConfig, world: World) -> None:
    """Refuse to mix in microbatches of one image: mixing is among the images of one rank's forward pass."""
    if config.augment.mixes and microbatch_size(config, world) == 1:
        batch, parts = config.data.global_batch_size, config.optim.microbatches
        raise UserError(
            f"data.global_batch_size: mixing needs at least 2 images in a microbatch, and {batch} leaves 1 to each of "
            f"{world.data_size} ranks x optim.accumulation_steps={parts}; use a larger batch, fewer parts, or "
            "augment.mix_probability=0"
        )


def total_steps(config: RunConfig, steps_per_epoch: int) -> int:
    whole, most = config.schedule.epochs * steps_per_epoch, config.schedule.max_steps
    return whole if most is None else min(whole, most)


def steps_between_evaluations(config: RunConfig, steps_per_epoch: int) -> int:
    return config.runtime.eval_every_steps or steps_per_epoch * config.runtime.eval_every_epochs


def train_loader(
    config: RunConfig, source: Images, world: World, switches: Speed, *, start_step: int, steps: int
) -> ImageLoader:
    """The loader of this rank's microbatches from `start_step` up to `steps`."""
    sizes = config.data.training_image_sizes
    transforms = {
        epoch: TrainTransform(config.augment, image_size=size, mean=config.data.mean) for epoch, size in sizes.items()
    }
    sampler = TrainSampler(
        len(source),
        seed=config.seed,
        global_batch_size=config.data.global_batch_size,
        rank=world.data_rank,
        world_size=world.data_size,
        start_step=start_step,
        total_steps=steps,
        accumulation_steps=config.optim.microbatches,
        order=order_of(source, config.data, config.augment.repeats)[1],
        repeats=config.augment.repeats,
    )
    dataset = ImageDataset(
        source,
        transforms,
        seed=config.seed,
        training=True,
        host=prepare_on_host(config, switches),
        open_picture=_decoder(config, switches, training=True),
    )
    return _loader(config, dataset, sampler, world, num_workers(config))


def _decoder(config: RunConfig, switches: Speed, *, training: bool = False) -> Decoder:
    name = switches.decode
    if name == "region":
        # Compiled here if necessary, not in every worker.
        native.library()
    if name == "simplejpeg" and find_spec("simplejpeg") is None:
        raise UserError(
            "speed.decode: simplejpeg is not installed; pip install 'pycls_fast[jpeg]', or use speed.decode=pillow"
        )
    decoder = SCALED_REGION if training and switches.decode_scale == "dct" else DECODERS[name]
    return replace(decoder, convert=config.data.conversion)


def eval_batches(config: RunConfig, source: Images, world: World, switches: Speed) -> Generator[Batch, None, None]:
    """This rank's batches of a split on its device, every image once over all ranks."""
    transform = EvalTransform(config.augment, image_size=config.data.image_size, mean=config.data.mean)
    batch_size = config.data.eval_batch_size or microbatch_size(config, world)
    sampler = EvalSampler(len(source), batch_size=batch_size, rank=world.data_rank, world_size=world.data_size)
    dataset = ImageDataset(
        source,
        transform,
        seed=config.seed,
        training=False,
        host=prepare_on_host(config, switches),
        open_picture=_decoder(config, switches),
    )
    workers = num_workers(config)
    if config.data.num_workers is None and world.device.type == "cpu" and len(sampler) * batch_size <= _FEW:
        # A fork shares the memory of this process, and on a CPU that is a step's: each page that it writes again while
        # workers live is copied first, which takes longer than reading so few images (LOG.md).
        workers = 0
    return to_device(_loader(config, dataset, sampler, world, workers), world.device, mode=switches.input_copy)


def for_scoring(config: RunConfig) -> RunConfig:
    """The configuration (numbers, no `auto`) with an `eval_batch_size` if it had none.

    The training batch was chosen for that run's ranks and memory; the batch size does not change an image's scores.
    """
    data = config.data
    if data.eval_batch_size is not None:
        return config
    microbatch = max(data.global_batch_size // config.optim.microbatches, 1)
    return config.with_values(data={"eval_batch_size": min(microbatch, _SCORING_BATCH)})


def _loader(
    config: RunConfig, dataset: ImageDataset, sampler: TrainSampler | EvalSampler, world: World, workers: int
) -> ImageLoader:
    return ImageLoader(
        dataset,
        sampler,
        num_workers=workers,
        # From there copies to a CUDA device run asynchronously.
        pin_memory=world.device.type == "cuda",
        prefetch_factor=config.data.prefetch_factor,
        timeout_seconds=config.parallel.timeout_seconds,
        while_waiting=world.while_waiting,
    )


def num_workers(config: RunConfig) -> int:
    """Loader workers of this rank: as configured, else its share of the cores that the run may use, at most 16, and
    none in a daemon (a process of `multiprocessing.Pool`), which may not start any."""
    if config.data.num_workers is not None:
        return config.data.num_workers
    return 0 if current_process().daemon else min(cores_per_rank(), 16)


def prepare(config: RunConfig, device: torch.device, switches: Speed) -> Prepare:
    """The transform from batches on the device, prepared on the host or not, to the model's input."""
    return Prepare(
        config.data.mean,
        config.data.std,
        dtype=DTYPES[level(config).weights],
        erase_value=config.augment.erase_value,
        memory_format=switches.memory_format,
        device=device,
    )


def prepare_on_host(config: RunConfig, switches: Speed) -> PrepareOnHost | None:
    """The batch preparation in the loader's workers, or None if the device does it all."""
    if switches.normalize_on == "device":
        return None
    prepare = Prepare(config.data.mean, config.data.std, erase_value=config.augment.erase_value)
    return PrepareOnHost(
        prepare, erase=switches.erase_on == "cpu", mixer=mixer(config) if switches.mix_on == "cpu" else None
    )


def preprocessing(config: RunConfig) -> str:
    """One line that describes the preprocessing of scored images: accuracies mean little without it."""
    data, augment = config.data, config.augment
    how = {"center": "covering", "squash": "squashed to", "border": "within"}[augment.eval_crop]
    whole = (round(side / augment.eval_crop_ratio) for side in data.image_size)
    resized, size = (" x ".join(map(str, sides)) for sides in (whole, data.image_size))
    mean, std = (" ".join(f"{value:g}" for value in values) for values in (data.mean, data.std))
    turned = "EXIF orientation, " if data.exif_orientation else ""
    white = "transparent on white, " if data.transparent == "white" else ""
    return f"{turned}{white}{how} {resized} ({augment.interpolation}), centre {size}, mean {mean}, std {std}"


def with_preprocessing(config: RunConfig, about: Description, kept: Collection[str] = ()) -> RunConfig:
    """The configuration that preprocesses images for scoring as the weights say, but for the keys that are `kept`; a
    `UserError` if the size does not fit the model."""
    data = {"image_size": about.image_size, "mean": about.mean, "std": about.std}
    augment = {
        "eval_crop": about.crop,
        "eval_crop_ratio": about.crop_ratio,
        "interpolation": about.interpolation,
    }
    sections: dict[str, dict[str, Any]] = {"data": data, "augment": augment}
    changed = config.with_values(**{
        section: {key: value for key, value in values.items() if f"{section}.{key}" not in kept}
        for section, values in sections.items()
    })  # fmt: skip
    found = [f"{key}: {message}" for key, message in problems(changed, Purpose(needs_data=False, scores_sets=True))]
    if found:
        raise UserError(*found, f"weights: {about.weights} is for images of {about.image_size} px")
    return changed


def mixer(config: RunConfig) -> Mixer | None:
    """Mixup and CutMix, or None when both are off. Batches that were mixed on the host are left unchanged."""
    return Mixer(config.augment) if config.augment.mixes else None
