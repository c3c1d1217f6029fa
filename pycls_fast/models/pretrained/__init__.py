"""Converts other projects' checkpoints to our names, and ours to theirs."""

from pycls_fast.models.pretrained.files import own_metadata
from pycls_fast.models.pretrained.fit import Fitted, Mismatch, UnknownKind, fit
from pycls_fast.models.pretrained.hubs import HUGGING_FACE, download, is_hub, local_file, pinned
from pycls_fast.models.pretrained.preprocessing import Preprocessing, described
from pycls_fast.models.pretrained.read import OURS, NormPlace, ReadWeights, read_weights
from pycls_fast.models.pretrained.timm import to_timm_vit
from pycls_fast.models.pretrained.torchvision import to_timm_resnet

__all__ = [
    "HUGGING_FACE",
    "OURS",
    "Fitted",
    "Mismatch",
    "NormPlace",
    "Preprocessing",
    "ReadWeights",
    "UnknownKind",
    "described",
    "download",
    "fit",
    "is_hub",
    "local_file",
    "own_metadata",
    "pinned",
    "read_weights",
    "to_timm_resnet",
    "to_timm_vit",
]
