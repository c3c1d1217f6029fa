"""From the data's configuration to its splits and the order in which they are read."""

from __future__ import annotations

import os
import zlib
from functools import partial
from typing import Any

import numpy as np

from pycls_fast.config.run import RunConfig
from pycls_fast.data.choices import Source
from pycls_fast.data.sampling import Order, block_order, class_order
from pycls_fast.data.sources.base import Images
from pycls_fast.data.sources.eval_sets import EvalSet, open_eval_set
from pycls_fast.data.sources.index import CachePolicy
from pycls_fast.data.sources.shards import ShardCache
from pycls_fast.data.sources.splits import OpenOptions
from pycls_fast.data.sources.synthetic import SyntheticImages
from pycls_fast.errors import UserError
from pycls_fast.files import user_path
from pycls_fast.parallel import World
from pycls_fast.seeds import counter_seed

# Random streams that must not repeat each other's draws, nor that of the initial weights (1).
_SYNTHETIC_TRAIN, _SYNTHETIC_VAL = 2, 3


def sources(config: RunConfig, world: World, *, index_all: bool = False, whole: bool = False) -> dict[str, Images]:
    """The splits by name, "train" and "val" among them.

    Args:
        index_all: cache the indexes of small datasets, too.
        whole: a dataset without a validation split is not split at random; it is the split "all".

    Raises:
        UserError: the data is missing or in an unknown layout.
    """
    data = config.data
    if data.source == "synthetic":
        size, classes = data.image_size, data.synthetic_classes
        train_seed, val_seed = (counter_seed(config.seed, s) for s in (_SYNTHETIC_TRAIN, _SYNTHETIC_VAL))
        return {
            "train": SyntheticImages(data.synthetic_train_images, size, classes, train_seed),
            "val": SyntheticImages(data.synthetic_val_images, size, classes, val_seed),
        }
    if data.root is None and Source.members[data.source].needs_root:
        raise UserError("data.root: not set; give the folder with the images as data.root=PATH")
    root = data.root or ""
    root = root if "://" in root else str(user_path(root))
    try:
        return Source.members[data.source]().open(root, _opening(config, world, index_all, whole))
    except PermissionError as error:
        raise UserError(f"data.root: {root} cannot be read ({error.filename}: {error.strerror})") from error
    except UserError as error:
        raise UserError(*(_with_key(line) for line in error.lines)) from error


def eval_set(config: RunConfig, classes: tuple[str, ...], world: World) -> EvalSet:
    """The evaluation set that `data.eval_set` names.

    Args:
        classes: the model's classes in the order of its outputs.

    Raises:
        UserError: files are missing or do not fit the model.
    """
    data = config.data
    assert data.eval_set is not None
    assert data.eval_root is not None
    return open_eval_set(
        data.eval_set,
        user_path(data.eval_root),
        classes=classes,
        wnids=None if data.wnids is None else user_path(data.wnids),
        val=sources(config, world)["val"] if data.eval_set == "real" else None,
    )


def imagenet_wnids() -> tuple[str, ...]:
    """ImageNet-1k's 1,000 WordNet ids in the order of every published model's outputs."""
    from timm.data import ImageNetInfo

    return tuple(ImageNetInfo("imagenet-1k").label_names())


def _opening(config: RunConfig, world: World, index_all: bool, whole: bool) -> OpenOptions:
    data = config.data
    cache = CachePolicy(data.index_cache, smallest=0) if index_all else CachePolicy(data.index_cache)
    shard_cache = None
    if data.shard_cache is not None:
        limit = None if data.shard_cache_gib is None else int(data.shard_cache_gib * 2**30)
        shard_cache = ShardCache(user_path(data.shard_cache), limit, processes=_ranks_of_node(world))
    return OpenOptions(
        val_fraction=data.val_fraction,
        split_seed=data.split_seed,
        folds=data.folds,
        fold=data.fold,
        whole=whole,
        train=data.train,
        val=data.val,
        path_column=data.path_column,
        image_column=data.image_column,
        label_column=data.label_column,
        hub_config=data.hub_config,
        cache=cache,
        shard_cache=shard_cache,
    )


def _ranks_of_node(world: World) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", world.size))


def _with_key(line: str) -> str:
    return line if line.startswith("data.") else f"data.root: {line}"


def names_id(source: Images) -> str:
    """Identifies the names of a split's images in their order: "names-" and a checksum.

    "numbers-" if the images have none, with the checksum of their positions if it is a part of a larger source.
    """
    hashes = source.name_hashes()
    if hashes is not None:
        return f"names-{_checksum(hashes)}"
    return f"numbers-{_checksum(getattr(source, 'rows', ()))}"


def order(config: RunConfig, source: Images) -> Order | None:
    """The order of an epoch's images as `data.shuffle` and `data.sampling` say; None for a full shuffle.

    Raises:
        UserError: blocks were requested of a source without them, or classes of one that is slow in any other order.
    """
    ends, how = source.block_ends, config.data.shuffle
    if config.data.sampling != "uniform":
        if how == "auto" and source.prefers_blocks:
            raise UserError(
                f"data.sampling: {config.data.sampling} visits images in any order, which is slow with this source; "
                "use loss.class_weights=balanced, or data.shuffle=full to do it anyway"
            )
        power = {"square_root": 0.5, "balanced": 0.0}[config.data.sampling]
        labels = source.labels
        return partial(class_order, labels=labels, power=power, repeats=config.augment.repeats)
    if not _in_blocks(config, source):
        return None
    if ends is None:
        raise UserError("data.shuffle: blocks is for tar shards, which this source does not have; use full")
    buffer, batch = config.data.shuffle_buffer, _images_per_batch(config)
    return partial(block_order, block_ends=ends, buffer=buffer, global_batch_size=batch)


def _images_per_batch(config: RunConfig) -> int:
    """The images of the blocks' order that a global batch takes.

    The sampler repeats images of this order, a whole batch of them at a time: with lanes that divide this number, a
    rank reads at most `augment.repeats` times its share.
    """
    batch, repeats = config.data.global_batch_size, config.augment.repeats
    return batch // repeats if batch % repeats == 0 else batch


def order_name(config: RunConfig, source: Images) -> str:
    """Identifies the order of an epoch's images, which depends on where they are stored: a run has to keep it.

    "full", "classes", or "blocks-" and a checksum of the blocks.
    """
    if config.data.sampling != "uniform":
        return "classes"
    if not _in_blocks(config, source):
        return "full"
    return f"blocks-{_checksum(source.block_ends)}"


def _checksum(integers: Any) -> str:
    return f"{zlib.crc32(np.ascontiguousarray(integers, np.int64).tobytes()):08x}"


def _in_blocks(config: RunConfig, source: Images) -> bool:
    how = config.data.shuffle
    return how == "blocks" or (how == "auto" and source.prefers_blocks)


def class_counts(config: RunConfig, source: Images) -> np.ndarray | None:
    """Number of images of each class, int64, if `loss.class_weights` needs them, else None."""
    if config.loss.class_weights == "none":
        return None
    return np.bincount(source.labels, minlength=len(source.classes))
