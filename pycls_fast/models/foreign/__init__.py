"""Converts other projects' checkpoints to our names, and ours to theirs."""

from pycls_fast.models.foreign.fit import Fitted, fit
from pycls_fast.models.foreign.preprocessing import Preprocessing, described
from pycls_fast.models.foreign.read import OURS, NormPlace, ReadWeights, is_hub, read_weights
from pycls_fast.models.foreign.timm import from_timm_vit, to_timm_vit
from pycls_fast.models.foreign.torchvision import (
    from_torchvision_resnet,
    from_torchvision_vit,
    to_timm_resnet,
    to_torchvision_resnet,
    to_torchvision_vit,
)

__all__ = [
    "OURS",
    "Fitted",
    "NormPlace",
    "Preprocessing",
    "ReadWeights",
    "described",
    "fit",
    "from_timm_vit",
    "from_torchvision_resnet",
    "from_torchvision_vit",
    "is_hub",
    "read_weights",
    "to_timm_resnet",
    "to_timm_vit",
    "to_torchvision_resnet",
    "to_torchvision_vit",
]
