"""The initial values of a vision transformer's parts, by scheme; `VisionTransformer.initialisers` names the sources."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import nn

from pycls_fast.models.init import lecun_normal_
from pycls_fast.models.layers import ClassToken
from pycls_fast.models.positions import LearnedPositions
from pycls_fast.models.vit_parts import MapPooling

Init = Literal["jax", "trunc_normal"]
_Fill = Callable[[Any], None]


def _reset(module: Any) -> None:
    module.reset_parameters()


def _lecun_normal(linear: nn.Linear) -> None:
    lecun_normal_(linear.weight)
    nn.init.zeros_(linear.bias)


def _zero(head: nn.Linear) -> None:
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)


def _trunc_normal(module: nn.Module) -> None:
    part: Any
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.02)
            nn.init.zeros_(part.bias)
        elif isinstance(part, ClassToken | LearnedPositions):
            nn.init.normal_(part.value, std=0.02)
        elif isinstance(part, MapPooling):
            part.reset_probe()
        elif hasattr(part, "reset_parameters") and not list(part.children()):
            # A parent's would draw its children's values.
            part.reset_parameters()


FILLS: dict[Init, tuple[_Fill, _Fill, _Fill]] = {
    "jax": (_reset, _lecun_normal, _zero),
    "trunc_normal": (_trunc_normal, _trunc_normal, _trunc_normal),
}
"""The initialisers of the body, `pre_logits` and the head."""
