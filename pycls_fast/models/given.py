"""Any module of the user's that gives logits, with the interface of our models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pycls_fast.errors import UserError, first_line
from pycls_fast.models.timm_network import find_blocks, named_tensors, without_children
from pycls_fast.network import Network, Units


class GivenNetwork(Network):
    """A copy of a module, `network`, which begins with the module's values.

    Args:
        module: images (B, 3, H, W) to logits (B, K); K are the outputs of its last linear layer.

    Raises:
        UserError: it does not take the images, or gives other outputs.
    """

    def __init__(self, module: nn.Module, classes: int, image_size: int) -> None:
        super().__init__()
        self._values = dict(named_tensors(module))
        self.network = copy.deepcopy(module).to(torch.get_default_device())
        try:
            self._layer_names, self._unit_names = find_blocks(self.network, classes, image_size, 3)
            self.last_layer()
        except Exception as error:
            told = f"{type(error).__name__}: {first_line(error)}"
            what = f"does not classify {classes} classes of {image_size} px images by a last linear layer"
            raise UserError(f"model: the given {type(module).__name__} {what} ({told})") from error

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Images (B, 3, H, W) -> logits_BK."""
        return self.network(images_BCHW)

    def units(self) -> Units:
        """Children of its sequential containers, if several are of one class and take one tensor."""
        return [(f"network.{name}", self.network.get_submodule(name)) for name in self._unit_names]

    def layers(self) -> Units:
        """The same, whatever they take."""
        return [(f"network.{name}", self.network.get_submodule(name)) for name in self._layer_names]

    def initialisers(self) -> Iterator[tuple[nn.Module, Callable[[Any], None]]]:
        """Every module with tensors of its own, filled with the given values."""
        for name, module in self.network.named_modules():
            if named_tensors(module, recurse=False):
                yield without_children(module), partial(self._fill, f"{name}." if name else "")

    @torch.no_grad()
    def _fill(self, prefix: str, module: nn.Module) -> None:
        for key, tensor in named_tensors(module):
            tensor.copy_(self._values[prefix + key])
