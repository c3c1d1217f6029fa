"""Images from disk to the device: sources, decoding, augmentation, sampling, loading, copy, mixing."""

from pycls_fast.data.batch import Batch, HostStage
from pycls_fast.data.dataset import ImageDataset
from pycls_fast.data.decode import DamagedImage, as_rgb, decode
from pycls_fast.data.digits import write_digits
from pycls_fast.data.draws import seed_generators
from pycls_fast.data.loader import ImageLoader, make_loader
from pycls_fast.data.mix import ElementMixer, Mixer
from pycls_fast.data.prepare import IN_FLIGHT, Prepare, PrepareOnHost, to_device
from pycls_fast.data.sampling import EvalSampler, Keys, Order, TrainSampler, block_order, class_order, epoch_order
from pycls_fast.data.sources import (
    EXTENSIONS,
    CachePolicy,
    EvalSet,
    FileSource,
    LabelledSource,
    OpenOptions,
    ShardCache,
    Source,
    SyntheticSource,
    block_ends,
    is_drawn,
    match_classes,
    name_hashes,
    open_eval_set,
    open_folder,
    open_splits,
    prefers_blocks,
)
from pycls_fast.data.transforms import EvalTransform, TrainTransform, TransformByEpoch

__all__ = [
    "EXTENSIONS",
    "IN_FLIGHT",
    "Batch",
    "CachePolicy",
    "DamagedImage",
    "ElementMixer",
    "EvalSampler",
    "EvalSet",
    "EvalTransform",
    "FileSource",
    "HostStage",
    "ImageDataset",
    "ImageLoader",
    "Keys",
    "LabelledSource",
    "Mixer",
    "OpenOptions",
    "Order",
    "Prepare",
    "PrepareOnHost",
    "ShardCache",
    "Source",
    "SyntheticSource",
    "TrainSampler",
    "TrainTransform",
    "TransformByEpoch",
    "as_rgb",
    "block_ends",
    "block_order",
    "class_order",
    "decode",
    "epoch_order",
    "is_drawn",
    "make_loader",
    "match_classes",
    "name_hashes",
    "open_eval_set",
    "open_folder",
    "open_splits",
    "prefers_blocks",
    "seed_generators",
    "to_device",
    "write_digits",
]
