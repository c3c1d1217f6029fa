"""Freezing parts of a network: no gradients, no optimizer state, and modules in evaluation mode."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from pycls_fast.errors import UserError


def freeze(network: nn.Module, trainable: Sequence[str], *, head: str) -> None:
    """Freeze everything that is not named, in place, before the optimizer is made and the network is wrapped.

    Every module whose parameters are all frozen stays in evaluation mode, whatever `train()` says: batch norm uses its
    statistics and does not update them, dropout and drop-path drop nothing.

    Args:
        network: any network.
        trainable: "all", "head", and names of modules or parameters, with * for any part of a name. A module stands for
            everything in it.
        head: qualified name of the final linear layer.

    Raises:
        UserError: the network does not have a name.
    """
    if "all" in trainable:
        return
    parameters = dict(network.named_parameters())
    kept: set[str] = set()
    for pattern in trainable:
        kept |= _matched(network, parameters, head if pattern == "head" else pattern, pattern)
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in kept)
    for module in list(network.modules()):
        inside = list(module.parameters())
        if inside and not any(parameter.requires_grad for parameter in inside):
            module.eval()
            # Set on the object: the network's `train()` calls that of each of its modules.
            module.train = partial(_stay, module)  # type: ignore[method-assign]


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    return module


def _matched(network: nn.Module, parameters: dict[str, Any], wanted: str, pattern: str) -> set[str]:
    names = [name for name, _ in network.named_modules() if name]
    found = [name for name in (*names, *parameters) if fnmatch.fnmatchcase(name, wanted)]
    kept = {key for key in parameters for name in found if key == name or key.startswith(f"{name}.")}
    if kept:
        return kept
    near = difflib.get_close_matches(pattern, ["head", "all", *names], n=1, cutoff=0.5)
    top = ", ".join(name for name, _ in network.named_children())
    raise UserError(
        f"optim.trainable: {pattern} names nothing in this network that can be trained"
        f"{f'; did you mean {near[0]}?' if near else ''}; use all, head, or names of its parts ({top}), with * for any "
        "part of a name"
    )
