"""From the data's configuration to its splits and the order in which they are read."""

from __future__ import annotations

import os
import zlib
from functools import partial
from typing import Any

import numpy as np

from pycls_fast.config.run import RunConfig
from pycls_fast.data.sampling import Order, block_order, class_order
from pycls_fast.data.source import Opening
from pycls_fast.data.sources.base import Images
from pycls_fast.data.sources.eval_sets import EvalSet, open_eval_set
from pycls_fast.errors import UserError
from pycls_fast.files import user_path
from pycls_fast.parallel import World


def sources(config: RunConfig, world: World, *, index_all: bool = False, whole: bool = False) -> dict[str, Images]:
    """The splits by name, "train" and "val" among them.

    Args:
        index_all: cache the indexes of small datasets, too.
        whole: a dataset without a validation split is not split at random; it is the split "all".

    Raises:
        UserError: the data is missing or in an unknown layout.
    """
    data = config.data
    if data.root is None and data.needs_root:
        raise UserError("data.root: not set; give the folder with the images as data.root=PATH")
    root = data.root or ""
    root = root if "://" in root else str(user_path(root))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    how = Opening(seed=config.seed, whole=whole, index_all=index_all, processes=ranks)
    try:
        return data.open(root, how)
    except PermissionError as error:
        raise UserError(f"data.root: {root} cannot be read ({error.filename}: {error.strerror})") from error
    except UserError as error:
        lines = (line if line.startswith("data.") else f"data.root: {line}" for line in error.lines)
        raise UserError(*lines) from error


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
