"""Images from disk to the device: sources, decoding, augmentation, sampling, loading, copy, mixing."""

from pycls_fast.data.augment import Augmented, EvalTransform, TrainTransform, Transform, TransformByEpoch
from pycls_fast.data.class_sampling import class_order
from pycls_fast.data.decode import DEFAULT_MAX_PIXELS, DamagedImage, as_rgb, decode
from pycls_fast.data.digits import write_digits
from pycls_fast.data.loading import Batch, HostStage, ImageDataset, ImageLoader, Sample, collate, make_loader
from pycls_fast.data.mix import Mixed, Mixer
from pycls_fast.data.mix_elements import ElementMixer, MixedElements
from pycls_fast.data.prepare import IMAGENET_MEAN, IMAGENET_STD, Prepare, PrepareOnHost
from pycls_fast.data.sampling import EvalSampler, Key, Keys, Order, TrainSampler, block_order, epoch_order
from pycls_fast.data.sources import (
    EXTENSIONS,
    CachePolicy,
    EvalSet,
    FileCache,
    FileSource,
    Opening,
    Source,
    SyntheticSource,
    block_ends,
    open_eval_set,
    open_folder,
    open_splits,
    prefers_blocks,
)
from pycls_fast.data.transfer import to_device

__all__ = [
    "DEFAULT_MAX_PIXELS",
    "EXTENSIONS",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "Augmented",
    "Batch",
    "CachePolicy",
    "DamagedImage",
    "ElementMixer",
    "EvalSampler",
    "EvalSet",
    "EvalTransform",
    "FileCache",
    "FileSource",
    "HostStage",
    "ImageDataset",
    "ImageLoader",
    "Key",
    "Keys",
    "Mixed",
    "MixedElements",
    "Mixer",
    "Opening",
    "Order",
    "Prepare",
    "PrepareOnHost",
    "Sample",
    "Source",
    "SyntheticSource",
    "TrainSampler",
    "TrainTransform",
    "Transform",
    "TransformByEpoch",
    "as_rgb",
    "block_ends",
    "block_order",
    "class_order",
    "collate",
    "decode",
    "epoch_order",
    "make_loader",
    "open_eval_set",
    "open_folder",
    "open_splits",
    "prefers_blocks",
    "to_device",
    "write_digits",
]
