"""Data parallelism: every rank holds the whole model (torch's DistributedDataParallel); batch norm over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from pycls_fast.network import Network
from pycls_fast.parallel.parallel_model import ParallelModel, StrategySettings
from pycls_fast.parallel.world import World


def _sum(value: Tensor) -> Tensor:
    """Over all ranks, with a gradient."""
    ranks = dist.group.WORLD
    assert ranks is not None
    return all_reduce(value, "sum", ranks)


class HostSyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """torch's SyncBatchNorm written out, because torch's does not run on a CPU."""

    def _check_input_dim(self, maps: Tensor) -> None:
        """Any number of dimensions."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        """Maps (B, C, ...) of any floating-point format; statistics and arithmetic are float32 or wider."""
        if not self.training:
            return super().forward(input)
        maps_BCM = input.reshape(*input.shape[:2], -1)
        maps_BCM = maps_BCM if input.dtype == torch.float64 else maps_BCM.float()
        # Every rank has a microbatch of the same size.
        count = maps_BCM.shape[0] * maps_BCM.shape[2] * dist.get_world_size()
        mean_C = _sum(maps_BCM.sum(dim=(0, 2))) / count
        centred_BCM = maps_BCM - mean_C[:, None]
        variance_C = _sum(centred_BCM.square().sum(dim=(0, 2))) / count
        self._follow(mean_C.detach(), variance_C.detach() * (count / (count - 1)))
        scale_C = torch.rsqrt(variance_C + self.eps)
        out_BCM = centred_BCM * (self.weight * scale_C if self.affine else scale_C)[:, None]
        if self.affine:
            out_BCM = out_BCM + self.bias[:, None]
        # The cast comes last, so that a half format is a copy: the in-place ReLU that follows must not get a view.
        return out_BCM.view_as(input).to(input.dtype)

    @torch.no_grad()
    def _follow(self, mean_C: Tensor, variance_C: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        share = 1.0 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean_C.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance_C.to(self.running_var.dtype), share)


def synchronise(network: nn.Module, device: torch.device) -> None:
    """Change the class of every batch norm of torch, in place; everything else stays, also that it is frozen."""
    kind: type[nn.Module] = nn.SyncBatchNorm if device.type == "cuda" else HostSyncBatchNorm
    for module in network.modules():
        if type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            module.__class__ = kind
            # All ranks, as by default.
            vars(module)["process_group"] = None


# torch's size of a bucket in MiB. One layer's weights in a ViT-H take 26. Larger buckets mean fewer messages, but there
# have to be several, or the exchange could not begin during the backward pass.
_BUCKET, _LARGEST_BUCKET, _FEWEST_BUCKETS = 25, 100, 16

# Gradients are cast for the exchange; the sum over the ranks is computed in that format.
_CASTS: dict[str, Callable[..., Any]] = {
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
}


def replicate(network: Network, world: World, settings: StrategySettings) -> ParallelModel:
    """Wrap the network in DDP: gradients are views of buckets, averaged over ranks during the backward pass.

    A pipeline averages them itself, after the last microbatch.
    """
    if (pipeline := settings.pipeline) is not None:
        return ParallelModel(
            forward=network,
            evaluated=pipeline,
            device=world.device,
            taken_every_microbatch=False,
            shard_groups=[pipeline.group],
            pipeline=pipeline,
        )
    megabytes = bucket_megabytes(sum(p.nbytes for p in network.parameters() if p.requires_grad))
    model = DistributedDataParallel(
        network,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        # BatchNorm's statistics stay local during training and are averaged before they are read
        # (World.average_buffers).
        forward_sync_buffers=False,
        gradient_as_bucket_view=True,
        # Else torch fills buckets in another order from the second step of a process on, and with three ranks or more
        # the order decides how a sum is rounded: a run that resumes would not be the same to the bit. There is no other
        # way (`static_graph` reorders them, too), and torch's C++ then prints on each rank that it searched in vain.
        find_unused_parameters=network.skips_parameters
        or (world.size > 2 and torch.are_deterministic_algorithms_enabled()),
        # By default torch also has a small first bucket, which is sent sooner.
        bucket_cap_mb=megabytes if megabytes > _BUCKET else None,
    )
    if settings.parallel.compression in _CASTS:
        model.register_comm_hook(None, _CASTS[settings.parallel.compression])

    def exchange(is_last: bool) -> AbstractContextManager[None]:
        return nullcontext() if is_last else model.no_sync()

    return ParallelModel(
        forward=model,
        evaluated=network,
        device=world.device,
        exchange=exchange,
        taken_every_microbatch=False,
    )


def bucket_megabytes(gradients: float) -> int:
    """MiB of a bucket, the gradients that DDP exchanges at once, given the bytes of all gradients."""
    return max(min(int(gradients / 2**20 / _FEWEST_BUCKETS), _LARGEST_BUCKET), _BUCKET)
