"""Features: what a network's last linear layer gets."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pycls_fast.data.batch import Batch
from pycls_fast.errors import UserError
from pycls_fast.network import Network
from pycls_fast.parallel import World
from pycls_fast.train.display import Display
from pycls_fast.train.evaluate import with_progress
from pycls_fast.train.health import noting_damage, report_damage


@contextmanager
def head_inputs(network: Network) -> Iterator[list[Tensor]]:
    """A list that receives the last layer's input of each forward pass in the context, float32 (B, D), on the CPU."""
    seen: list[Tensor] = []
    handle = network.last_layer().register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].float().cpu()))
    try:
        yield seen
    finally:
        handle.remove()


@torch.no_grad()
def collect_features(
    network: Network,
    forward: Callable[[Batch], None],
    batches: Generator[Batch, None, None],
    world: World,
    display: Display,
    *,
    split: str,
    images: int,
    max_damaged: int,
    after_batch: Callable[[], None] = lambda: None,
) -> tuple[Tensor, Tensor]:
    """The head's input for every readable image, float32 (N, D) on the CPU, and the labels; the same on all ranks.

    Args:
        forward: a forward pass of a batch on this rank; may do nothing with an empty one.
        after_batch: called after each batch; may raise to stop.

    Raises:
        UserError: more damaged images than `max_damaged`, or no other.
    """
    labels: list[Tensor] = []
    damaged: dict[str, str] = {}
    doing = f"features of {split}"
    display.begin_evaluation(doing, images)
    with head_inputs(network) as seen:
        for batch in with_progress(noting_damage(batches, damaged), doing, world, display, after_batch):
            before = len(seen)
            forward(batch)
            if len(batch.labels_B):
                labels.append(batch.labels_B.cpu())
            else:
                # Some strategies run an image of zeros instead.
                del seen[before:]
    display.end_features()
    report_damage(damaged, max_damaged, world, display, outcome="not counted")
    # Gathered in host memory, which is larger.
    mine = (torch.cat(seen), torch.cat(labels)) if seen and world.counts else None
    found = [part for part in world.gather(mine) if part is not None]
    if not found:
        raise UserError(f"split: {split} has no image that can be read")
    features_ND, labels_N = (torch.cat(tensors) for tensors in zip(*found, strict=True))
    return features_ND, labels_N
