"""Freezing parts of a network: no gradients, no optimizer state, and modules in evaluation mode."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn

from pycls_fast.errors import UserError
from pycls_fast.network import HEAD, Network, is_inside, named_parts, unknown_part
from pycls_fast.optim.groups import BATCH_NORM


def freeze(network: Network, trainable: Sequence[str], *, adapted: bool = False) -> set[str]:
    """Freeze everything that is not named, in place, before the optimizer is made and the network is wrapped.

    Every module whose parameters are all frozen stays in evaluation mode, whatever `train()` says: batch norm uses its
    statistics and does not update them, dropout and drop-path drop nothing.

    Args:
        network: any network.
        trainable: "all", "head", and names of modules or parameters, with * for any part of a name. A module stands for
            everything in it.
        adapted: matrices and convolutions of the blocks that are not named get gradients, too, but not depthwise ones.

    Returns:
        the names of the adapted ones.

    Raises:
        UserError: the network does not have a name, or nothing to adapt.
    """
    if "all" in trainable:
        return set()
    parameters = dict(network.named_parameters())
    kept: set[str] = set()
    for pattern in trainable:
        parts = named_parts(network, pattern, head=network.head_name)
        found = {name for name in parameters if is_inside(name, parts)}
        if not found:
            what = "nothing in this network that can be trained"
            raise unknown_part("optim.trainable", pattern, network, what=what, words=("all", HEAD))
        kept |= found
    units = [name for name, _ in network.units()] if adapted else []
    matrices = {
        name
        for name, parameter in parameters.items()
        if is_inside(name, units) and parameter.ndim in (2, 4) and min(parameter.shape[:2]) > 1
    }
    if adapted and not matrices - kept:
        raise UserError("optim.lora_rank: this network has no blocks with matrices to adapt; use optim.lora_rank=null")
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in kept or name in matrices)
    for module in list(network.modules()):
        inside = list(module.parameters())
        if inside and not any(parameter.requires_grad for parameter in inside):
            _keep_evaluating(module)
    return matrices - kept


def keep_statistics(network: nn.Module) -> None:
    """Let batch norm normalise with its running statistics in training, too, and keep them, in place.

    Its scales and shifts are trained like everything else.
    """
    for module in network.modules():
        if isinstance(module, BATCH_NORM):
            _keep_evaluating(module)


def _keep_evaluating(module: nn.Module) -> None:
    module.eval()
    # Set on the object: the network's `train()` calls that of each of its modules.
    module.train = partial(_stay, module)  # type: ignore[method-assign]


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    return module
