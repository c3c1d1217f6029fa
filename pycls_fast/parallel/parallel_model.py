"""A model under a parallel strategy: everything that the step, the loop and checkpoints need to know about ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from pycls_fast.optim.groups import Group
from pycls_fast.optim.owned_weights import OwnedWeights, local
from pycls_fast.parallel.pipeline import Pipeline
from pycls_fast.speed import Speed
from pycls_fast.strategies import Parallel


@dataclass(frozen=True)
class StrategySettings:
    """The settings of a strategy: two sections of the configuration, and what follows from other sections."""

    parallel: Parallel = field(default_factory=Parallel)
    speed: Speed = field(default_factory=Speed)
    # For sharded strategies: the format of gathered weights (None: that of the shards), whether norms stay float32, and
    # the format of autocast.
    compute: torch.dtype | None = None
    autocast: torch.dtype | None = None
    wide_norms: bool = False
    # This rank's stages, if the network is divided into stages.
    pipeline: Pipeline | None = None
    # The optimizer's groups; their `params` are names, because some strategies replace the parameters.
    groups: Sequence[Group] = ()
    # For strategies that make the optimizer themselves: makes one from groups of parameters.
    make_optimizer: Callable[[list[Group]], Optimizer] | None = None


@dataclass(frozen=True)
class ParallelModel:
    """A model under a strategy.

    Attributes:
        forward: what the training step calls.
        evaluated: what evaluation calls, equally often on all ranks, which may exchange weights or features.
        device: the run's device.
        exchange: returns the context of a microbatch's forward and backward pass; the argument says whether it is the
            step's last one.
        taken_every_microbatch: the optimizer's weights take the network's gradients after every microbatch; otherwise
            the network accumulates them, and they are taken after the last one.
        shard_groups: the ranks that share one copy of the gradients, one group for each dimension of their mesh; none
            if each rank has all of them.
        counted: for each trainable parameter, whether this rank counts its gradient in the norm (other ranks may have
            the same gradient); None if it counts all.
        free_gathered: call after forward passes without a backward pass: frees the gathered weights, so that later
            changes of the shards take effect.
        weights, groups: what the optimizer updates and checkpoints hold, if not the network's own parameters.
        optimizer: the optimizer, if it is a part of the strategy.
        pipeline: runs all microbatches of a step in place of `forward`, if the network is divided into stages.
    """

    forward: nn.Module
    evaluated: nn.Module
    device: torch.device
    exchange: Callable[[bool], AbstractContextManager[None]] = lambda is_last: nullcontext()
    taken_every_microbatch: bool = True
    shard_groups: Sequence[dist.ProcessGroup] = ()
    counted: Sequence[bool] | None = None
    free_gathered: Callable[[], None] = lambda: None
    weights: OwnedWeights | None = None
    groups: list[Group] | None = None
    optimizer: Optimizer | None = None
    pipeline: Pipeline | None = None

    @torch.no_grad()
    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float | None, *, foreach: bool) -> Tensor:
        """Clip the gradients of all ranks to `max_norm` (None: only measure), by multi-tensor operations if `foreach`;
        returns their norm before clipping, the same on all ranks."""
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        counted = gradients
        if self.counted is not None:
            own = zip(parameters, self.counted, strict=True)
            counted = [local(p.grad) for p, counts in own if counts and p.grad is not None]
        norm = torch.nn.utils.get_total_norm(counted, foreach=foreach)
        if self.shard_groups:
            # The optimizer's shards may be on the host, which the ranks' backend cannot access.
            square = norm.to(self.device).square_()
            for group in self.shard_groups:
                dist.all_reduce(square, group=group)
            norm = square.sqrt_()
        if max_norm is not None and gradients:
            factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0).to(gradients[0].device)
            if foreach:
                torch._foreach_mul_(gradients, factor)
            else:
                for gradient in gradients:
                    gradient.mul_(factor)
        return norm
