"""How to open a dataset; which of it matters depends on the layout."""

from __future__ import annotations

from dataclasses import dataclass, field

from pycls_fast.data.sources.index_cache import CachePolicy
from pycls_fast.data.sources.remote import FileCache


@dataclass(frozen=True)
class Opening:
    """What the layouts can be told.

    Args:
        val_fraction: the share of each class, in (0, 1), that a random split keeps for validation where there is none.
        split_seed: of the random split.
        train, val: the files of a split by name: a path below the root, an absolute one or an address, with `*` and
            `{000..146}`; for the hub the names of the splits. None finds them.
        path_column, image_column, label_column: of tables, the last also the field of a tar's `.json`. With None as
            `image_column` the only column with images is taken.
        hub_config: the hub's name of a variant of a dataset.
        cache: where indexes of large datasets are kept.
        shard_cache: where remote shards are kept; None reads each image over the network by itself.
    """

    val_fraction: float = 0.2
    split_seed: int = 0
    train: str | None = None
    val: str | None = None
    path_column: str = "path"
    image_column: str | None = None
    label_column: str = "label"
    hub_config: str | None = None
    cache: CachePolicy = field(default_factory=CachePolicy)
    shard_cache: FileCache | None = None
