"""Data parallelism: every rank holds the whole model (torch's DistributedDataParallel)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from pycls_fast.parallel.parallel_model import ParallelModel, StrategySettings
from pycls_fast.parallel.pipeline import Evaluated
from pycls_fast.parallel.world import World

# One layer's weights in a ViT-H have 26 MB, more than torch's bucket of 25. Larger ones have fewer messages; but there
# have to be some, so that the exchange begins while the backward pass goes on.
_LARGEST_BUCKET, _FEWEST_BUCKETS = 100, 16

# Gradients are cast for the exchange; the sum over the ranks is computed in that format.
_CASTS: dict[str, Callable[..., Any]] = {
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
}


def replicate(network: nn.Module, world: World, settings: StrategySettings) -> ParallelModel:
    """Wrap the network in DDP: gradients are views of buckets, averaged over ranks during the backward pass.

    A pipeline averages them itself, after the last one.
    """
    if (pipeline := settings.pipeline) is not None:
        return ParallelModel(
            forward=network,
            evaluated=Evaluated(pipeline),
            device=world.device,
            taken_every_microbatch=False,
            forward_is_collective=True,
            shard_groups=[pipeline.group],
            pipeline=pipeline,
        )
    model = DistributedDataParallel(
        network,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        # BatchNorm's statistics stay local during training and are averaged before they are read
        # (World.average_buffers).
        forward_sync_buffers=False,
        gradient_as_bucket_view=True,
        bucket_cap_mb=_bucket_megabytes(network),
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


def _bucket_megabytes(network: nn.Module) -> int | None:
    """The size of a bucket of gradients; None for torch's choice (25, and a small first one)."""
    gradients = sum(p.numel() * p.element_size() for p in network.parameters() if p.requires_grad) / 2**20
    size = min(int(gradients / _FEWEST_BUCKETS), _LARGEST_BUCKET)
    return size if size > 25 else None
