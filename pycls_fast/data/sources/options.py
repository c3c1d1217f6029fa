"""Options for opening a dataset; each layout uses some of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from pycls_fast.data.sources.index_cache import CachePolicy
from pycls_fast.data.sources.shards import ShardCache


@dataclass(frozen=True)
class OpenOptions:
    """The options of all layouts.

    Args:
        val_fraction: the share of each class, in (0, 1), that a random split keeps for validation if there is no such
            split.
        split_seed: seed of the random split.
        folds, fold: see `split_at_random`.
        whole: a dataset without a validation split is not split at random; it is the split "all".
        train, val: the files of a split by name: a path below the root, an absolute one or an address, with `*` and
            `{000..146}`; for the hub the names of the splits. None finds them.
        path_column, image_column, label_column: columns of tables; the last is also the field of a tar's `.json`. If
            `image_column` is None, the only column with images is used.
        hub_config: name of a dataset's configuration on the hub.
        cache: where indexes of large datasets are kept.
        shard_cache: where remote shards are kept; None reads each image separately over the network.
    """

    val_fraction: float = 0.2
    split_seed: int = 0
    folds: int | None = None
    fold: int = 0
    whole: bool = False
    train: str | None = None
    val: str | None = None
    path_column: str = "path"
    image_column: str | None = None
    label_column: str = "label"
    hub_config: str | None = None
    cache: CachePolicy = field(default_factory=CachePolicy)
    shard_cache: ShardCache | None = None
