"""Converts other projects' checkpoints to our names, and ours to theirs."""

from pycls_fast.models.foreign.files import own_metadata
from pycls_fast.models.foreign.fit import Fitted, Mismatch, UnknownKind, fit
from pycls_fast.models.foreign.hubs import HUGGING_FACE, download, is_hub, local_file, pinned
from pycls_fast.models.foreign.preprocessing import Preprocessing, described
from pycls_fast.models.foreign.read import OURS, NormPlace, ReadWeights, read_weights
from pycls_fast.models.foreign.timm import to_timm_vit
from pycls_fast.models.foreign.torchvision import to_timm_resnet

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
