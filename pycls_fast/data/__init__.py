"""Images from disk to the device: sources, decoding, augmentation, sampling, loading, copy, mixing."""

from pycls_fast.data.batch import Batch, HostStage
from pycls_fast.data.dataset import ImageDataset
from pycls_fast.data.decode import DamagedImage, as_rgb, decode
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
    OpenOptions,
    ShardCache,
    Source,
    Subset,
    SyntheticSource,
    match_classes,
    open_eval_set,
    open_splits,
    write_digits,
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
    "Mixer",
    "OpenOptions",
    "Order",
    "Prepare",
    "PrepareOnHost",
    "ShardCache",
    "Source",
    "Subset",
    "SyntheticSource",
    "TrainSampler",
    "TrainTransform",
    "TransformByEpoch",
    "as_rgb",
    "block_order",
    "class_order",
    "decode",
    "epoch_order",
    "make_loader",
    "match_classes",
    "open_eval_set",
    "open_splits",
    "seed_generators",
    "to_device",
    "write_digits",
]
