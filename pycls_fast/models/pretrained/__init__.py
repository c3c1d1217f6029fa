"""Converts other projects' checkpoints to our names, and ours to theirs."""

from pycls_fast.models.pretrained.fit import Fitted, Mismatch, UnknownKind, fit
from pycls_fast.models.pretrained.hubs import HUGGING_FACE, download, is_hub, local_file, pinned
from pycls_fast.models.pretrained.names import OURS, to_resnet, to_timm_vit
from pycls_fast.models.pretrained.preprocessing import Preprocessing, described
from pycls_fast.models.pretrained.read import NormPlace, ReadWeights, own_metadata, read_weights

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
    "to_resnet",
    "to_timm_vit",
]
