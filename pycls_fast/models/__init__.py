"""Networks as pure mathematics: they know nothing of ranks, casts, meshes or compilation.

Each is a `pycls_fast.network.Network`, the only interface for code that shards, compiles or loads them.
"""

from __future__ import annotations

from pycls_fast.models.complexity import Complexity, complexity
from pycls_fast.models.drop_path import DropPath
from pycls_fast.models.layers import ClassToken
from pycls_fast.models.positions import LearnedPositions
from pycls_fast.models.resnet import ResNet
from pycls_fast.models.timm_network import TimmNetwork
from pycls_fast.models.vit import VisionTransformer
from pycls_fast.models.vit_parts import LayerScale, MapPooling, RegisterTokens

__all__ = [
    "ClassToken",
    "Complexity",
    "DropPath",
    "LayerScale",
    "LearnedPositions",
    "MapPooling",
    "RegisterTokens",
    "ResNet",
    "TimmNetwork",
    "VisionTransformer",
    "complexity",
]
