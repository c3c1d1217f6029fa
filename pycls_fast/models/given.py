"""Modules that others made, with the interface of our models: the user's own here, timm's in `timm_network`.

The repeated blocks are found from timm's own grouping of a model's layers (`group_matcher`, which its layer-wise
learning rates use), else from the module tree. All of them are `layers()`; `units()` are those that take and return one
tensor, because recomputation and compilation by blocks can handle no others.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pycls_fast.errors import refusing
from pycls_fast.models.complexity import meta_copy
from pycls_fast.network import Network, Units
from pycls_fast.values import Size


class WrappedNetwork(Network):
    """A network around a module, `network`: names are the module's with the prefix `network.`."""

    network: Any
    _layer_names: Sequence[str]
    _unit_names: Sequence[str]

    def values(self) -> dict[str, Tensor]:
        """The initial values of the module's parameters and buffers by their names."""
        raise NotImplementedError

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Images (B, 3, H, W) -> logits_BK."""
        return self.network(images_BCHW)

    def units(self) -> Units:
        """The repeated blocks with their qualified names, in forward order; none if they take several arguments."""
        return [(f"network.{name}", self.network.get_submodule(name)) for name in self._unit_names]

    def layers(self) -> Units:
        """All repeated blocks, whatever arguments they take."""
        return [(f"network.{name}", self.network.get_submodule(name)) for name in self._layer_names]

    def initialisers(self) -> Iterator[tuple[nn.Module, Callable[[Any], None]]]:
        """Every module with tensors of its own, without its children, filled with `values`.

        They are made when the first module is filled. Each is freed when it was copied.
        """
        values: dict[str, Tensor] = {}
        for name, module in self.network.named_modules():
            if named_tensors(module, recurse=False):
                yield without_children(module), partial(self._fill, values, f"{name}." if name else "")

    @torch.no_grad()
    def _fill(self, values: dict[str, Tensor], prefix: str, module: nn.Module) -> None:
        if not values:
            values.update(self.values())
        for key, tensor in named_tensors(module):
            tensor.copy_(values.pop(prefix + key))


class GivenNetwork(WrappedNetwork):
    """A copy of a user's module, which begins with the module's values.

    Args:
        module: images (B, 3, H, W) to logits (B, K); K are the outputs of its last linear layer.

    Raises:
        UserError: it does not take the images, or gives other outputs.
    """

    def __init__(self, module: nn.Module, classes: int, image_size: Size) -> None:
        super().__init__()
        self._given = dict(named_tensors(module))
        self.network = copy.deepcopy(module).to(torch.get_default_device(), torch.get_default_dtype())
        what = f"does not classify {classes} classes of {image_size} px images by a last linear layer"
        with refusing(f"model: the given {type(module).__name__} {what}", Exception):
            self._layer_names, self._unit_names = find_blocks(self.network, classes, image_size)
            self.last_layer()

    def values(self) -> dict[str, Tensor]:
        """The module's."""
        return self._given


def named_tensors(module: nn.Module, *, recurse: bool = True) -> list[tuple[str, Tensor]]:
    """Parameters and buffers, each under all of its names."""
    return [
        *module.named_parameters(recurse=recurse, remove_duplicate=False),
        *module.named_buffers(recurse=recurse, remove_duplicate=False),
    ]


def without_children(module: nn.Module) -> nn.Module:
    """A module that shares the tables of this one's own parameters and buffers: what is replaced in one is in both."""
    own = nn.Module()
    own._parameters, own._buffers = module._parameters, module._buffers
    return own


def find_blocks(network: Any, num_classes: int, image_size: Size) -> tuple[list[str], list[str]]:
    """The repeated blocks of a model, and those that take one tensor, once, and return one.

    Both in the order of a forward pass on the meta device.

    Raises:
        ValueError: the output is not one logit per class. Layers that the images do not fit raise other errors.
    """
    candidates = _outermost(_matched(network) or _repeated(network))
    meta = meta_copy(network).eval()
    is_unit: dict[str, bool] = {}

    def note(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            single = len(args) == 1 and isinstance(args[0], Tensor) and isinstance(output, Tensor)
            is_unit[name] = single and not kwargs and name not in is_unit

        return hook

    for name in candidates:
        meta.get_submodule(name).register_forward_hook(note(name), with_kwargs=True)
    logits = run_without_memory(meta, image_size)
    if logits.shape[1:] != (num_classes,):
        raise ValueError(f"the output of an image has shape {tuple(logits.shape[1:])}, not ({num_classes},)")
    return list(is_unit), [name for name, usable in is_unit.items() if usable]


def run_without_memory(meta: nn.Module, image_size: Size) -> Tensor:
    """The output of a `meta_copy` for two images, on the meta device."""
    dtype = next(meta.parameters()).dtype
    with torch.no_grad():
        return meta(torch.empty(2, 3, *image_size, device="meta", dtype=dtype))


def _matched(network: Any) -> list[str]:
    """Modules that timm's own patterns name as layers of the trunk."""
    matcher = network.group_matcher(coarse=False) if hasattr(network, "group_matcher") else None
    if not isinstance(matcher, dict):
        return []
    # CoaT has stem1 to stem4.
    specs: list[Any] = [spec for group, spec in matcher.items() if not group.startswith("stem")]
    pairs = [pair for spec in specs for pair in ([(spec, None)] if isinstance(spec, str) else spec)]
    # A pattern with a rank stands for layers between or after the blocks.
    patterns = [re.compile(pattern) for pattern, rank in pairs if rank is None]
    return [
        name
        for name, module in network.named_modules()
        if any(pattern.fullmatch(name) for pattern in patterns) and any(True for _ in module.parameters())
    ]


def _repeated(network: nn.Module) -> list[str]:
    """Children of sequential containers that have several children of the same class."""
    found = []
    for name, chain in network.named_modules():
        if not isinstance(chain, nn.Sequential | nn.ModuleList):
            continue
        kinds = [type(child) for child in chain.children()]
        found += [
            f"{name}.{key}" if name else key
            for key, child in chain.named_children()
            if kinds.count(type(child)) > 1 and any(True for _ in child.parameters())
        ]
    return found


def _outermost(names: Sequence[str]) -> list[str]:
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
