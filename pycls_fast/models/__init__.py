"""Networks as pure mathematics: they know nothing of ranks, casts, meshes or compilation.

Each is a `pycls_fast.network.Network`, the only interface for code that shards, compiles or loads them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pycls_fast.models.drop_path import DropPath as DropPath
    from pycls_fast.models.resnet import ResNet as ResNet
    from pycls_fast.models.timm_network import TimmNetwork as TimmNetwork
    from pycls_fast.models.vit import VisionTransformer as VisionTransformer

_FILES = {
    "drop_path": ("DropPath",),
    "resnet": ("ResNet",),
    "timm_network": ("TimmNetwork",),
    "vit": ("VisionTransformer",),
}


def __getattr__(name: str) -> object:
    # When it is asked for: `choices` must not wait for torch.
    for file, names in _FILES.items():
        if name in names:
            return getattr(importlib.import_module(f"pycls_fast.models.{file}"), name)
    raise AttributeError(f"module pycls_fast.models has no attribute {name}")
