"""Sources of encoded images and their labels: one file per layout, all a `Source`."""

from pycls_fast.data.sources.base import Relabelled, Source, Subset, match_classes
from pycls_fast.data.sources.eval_sets import EvalSet, open_eval_set
from pycls_fast.data.sources.files import EXTENSIONS, FileSource
from pycls_fast.data.sources.folders import scan_classes
from pycls_fast.data.sources.index import CachePolicy
from pycls_fast.data.sources.opening import open_splits
from pycls_fast.data.sources.shards import ShardCache
from pycls_fast.data.sources.splits import OpenOptions
from pycls_fast.data.sources.synthetic import SyntheticSource, write_digits

__all__ = [
    "EXTENSIONS",
    "CachePolicy",
    "EvalSet",
    "FileSource",
    "OpenOptions",
    "Relabelled",
    "ShardCache",
    "Source",
    "Subset",
    "SyntheticSource",
    "match_classes",
    "open_eval_set",
    "open_splits",
    "scan_classes",
    "write_digits",
]
