"""Features: what a network's last linear layer gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pycls_fast import build
from pycls_fast.config.run import RunConfig
from pycls_fast.data.sources.base import Images
from pycls_fast.errors import UserError
from pycls_fast.network import Network
from pycls_fast.parallel import ParallelModel, World, uncompiled
from pycls_fast.speed import Speed
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
    config: RunConfig,
    network: Network,
    wrapped: ParallelModel,
    source: Images,
    split: str,
    world: World,
    switches: Speed,
    display: Display,
    after_batch: Callable[[], None] = lambda: None,
) -> tuple[Tensor, Tensor]:
    """The head's input for every readable image, float32 (N, D) on the CPU, and the labels; the same on all ranks.

    All ranks call this.

    Args:
        network: the one in `wrapped`, whose train/eval mode is restored.
        split: the images' name, which is shown.
        after_batch: called after each batch; may raise to stop.

    Raises:
        UserError: more damaged images than `data.max_damaged`, or no other.
    """
    model = wrapped.evaluated
    prepare, autocast = build.prepare(config, world.device, switches), build.autocast(config, world.device)
    labels: list[Tensor] = []
    damaged: dict[str, str] = {}
    doing = f"features of {split}"
    display.begin_evaluation(doing, len(source))
    batches = noting_damage(build.eval_batches(config, source, world, switches), damaged)
    was_training = model.training
    model.eval()
    try:
        with head_inputs(network) as seen:
            for batch in with_progress(batches, doing, world, display, after_batch):
                empty = not len(batch.labels_B)
                if empty and not wrapped.forward_is_collective:
                    continue
                images_BCHW = prepare(batch)
                with uncompiled(model), autocast():
                    # A rank whose batch is empty must take part.
                    model(images_BCHW.new_zeros(1, *images_BCHW.shape[1:]) if empty else images_BCHW)
                if empty:
                    del seen[-1]
                else:
                    labels.append(batch.labels_B.cpu())
    finally:
        wrapped.free_gathered()
        model.train(was_training)
    display.end_features()
    report_damage(damaged, config.data.max_damaged, world, display, outcome="not counted")
    # Gathered in host memory, which is larger.
    mine = (torch.cat(seen), torch.cat(labels)) if seen and world.counts else None
    found = [part for part in world.gather(mine) if part is not None]
    if not found:
        raise UserError(f"split: {split} has no image that can be read")
    features_ND, labels_N = (torch.cat(tensors) for tensors in zip(*found, strict=True))
    return features_ND, labels_N
