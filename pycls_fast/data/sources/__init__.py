"""Sources of encoded images and their labels: one file per layout, all with the interface `Source`."""

from pycls_fast.data.sources.base import (
    LabelledSource,
    Source,
    block_ends,
    checksum_holds,
    copied_shards,
    is_drawn,
    name_hashes,
    prefers_blocks,
)
from pycls_fast.data.sources.cifar import SyntheticSource
from pycls_fast.data.sources.eval_sets import EvalSet, open_eval_set
from pycls_fast.data.sources.files import EXTENSIONS, FileSource
from pycls_fast.data.sources.folders import open_folder, scan_classes
from pycls_fast.data.sources.index import CachePolicy
from pycls_fast.data.sources.opening import open_splits
from pycls_fast.data.sources.shards import ShardCache
from pycls_fast.data.sources.splits import OpenOptions, match_classes

__all__ = [
    "EXTENSIONS",
    "CachePolicy",
    "EvalSet",
    "FileSource",
    "LabelledSource",
    "OpenOptions",
    "ShardCache",
    "Source",
    "SyntheticSource",
    "block_ends",
    "checksum_holds",
    "copied_shards",
    "is_drawn",
    "match_classes",
    "name_hashes",
    "open_eval_set",
    "open_folder",
    "open_splits",
    "prefers_blocks",
    "scan_classes",
]
