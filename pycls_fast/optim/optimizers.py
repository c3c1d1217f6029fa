"""Optimizers: the mathematics by name, the implementation (`loop`, `foreach`, `fused`) by switch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from pycls_fast.optim.groups import Group


def _implementation(name: str) -> dict[str, bool]:
    # Both flags said outright: with None torch would choose by itself.
    return {"foreach": name == "foreach", "fused": name == "fused"}


def sgd(groups: Sequence[Group], *, lr: float, momentum: float, nesterov: bool, implementation: str) -> Optimizer:
    """SGD with momentum; `implementation` is loop, foreach or fused."""
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov, **_implementation(implementation))


def adamw(
    groups: Sequence[Group], *, lr: float, betas: tuple[float, float], eps: float, implementation: str
) -> Optimizer:
    """AdamW (Loshchilov and Hutter, 2019) with bias correction; `implementation` is loop, foreach or fused."""
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, **_implementation(implementation))


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of every group, times the group's own `lr_scale` where it has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
