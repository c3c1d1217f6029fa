"""Conversions of whole models to our names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from pycls_fast.models.foreign.timm import read_timm_vit
from pycls_fast.models.foreign.torchvision import read_resnet, read_torchvision_vit

State = Mapping[str, Tensor]
Convert = Callable[[State], dict[str, Tensor]]


def _whole(read: Callable[[State], tuple[dict[str, Tensor], list[str]]]) -> Convert:
    """A conversion in which every name must be known."""

    def convert(state: State) -> dict[str, Tensor]:
        found, rest = read(state)
        assert rest == []
        return found

    return convert


from_timm_vit = _whole(read_timm_vit)
from_torchvision_vit = _whole(read_torchvision_vit)
from_resnet = _whole(read_resnet)
