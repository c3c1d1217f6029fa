"""Images from disk to the device: sources, decoding, augmentation, sampling, loading, copy, mixing."""

from pycls_fast.data.augment import Augmented, EvalTransform, TrainTransform, Transform
from pycls_fast.data.decode import DEFAULT_MAX_PIXELS, DamagedImage, decode
from pycls_fast.data.digits import write_digits
from pycls_fast.data.folders import FolderSource, open_folder
from pycls_fast.data.loading import Batch, HostStage, ImageDataset, ImageLoader, Sample, collate, make_loader
from pycls_fast.data.mix import Mixed, Mixer
from pycls_fast.data.prepare import IMAGENET_MEAN, IMAGENET_STD, Prepare, PrepareOnHost
from pycls_fast.data.sampling import EvalSampler, Key, Keys, TrainSampler, epoch_order
from pycls_fast.data.sources import Source, SyntheticSource
from pycls_fast.data.transfer import to_device

__all__ = [
    "DEFAULT_MAX_PIXELS",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "Augmented",
    "Batch",
    "DamagedImage",
    "EvalSampler",
    "EvalTransform",
    "FolderSource",
    "HostStage",
    "ImageDataset",
    "ImageLoader",
    "Key",
    "Keys",
    "Mixed",
    "Mixer",
    "Prepare",
    "PrepareOnHost",
    "Sample",
    "Source",
    "SyntheticSource",
    "TrainSampler",
    "TrainTransform",
    "Transform",
    "collate",
    "decode",
    "epoch_order",
    "make_loader",
    "open_folder",
    "to_device",
    "write_digits",
]
