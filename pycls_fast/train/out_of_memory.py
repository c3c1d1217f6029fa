"""Too little memory ends a run with a one-line message that says what would fit; so does too small a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

import torch

from pycls_fast.config.run import RunConfig
from pycls_fast.errors import OUT_OF_MEMORY, UserError, is_out_of_memory
from pycls_fast.parallel.world import World
from pycls_fast.plan.memory_plan import MemoryPlan, device_memory
from pycls_fast.train.environment import device_name


@contextmanager
def enough_memory(key: str, device: torch.device, images: int) -> Iterator[None]:
    """Turn torch's out-of-memory error with so many images at a time into a `UserError` of one line; `key` is to be
    changed."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"{key}: {device_name(device)} is {OUT_OF_MEMORY} with {images} images at a time; use a smaller one"
        ) from error


@contextmanager
def enough_to_train(config: RunConfig, world: World, classes: int) -> Iterator[None]:
    """`enough_memory` for training: the message says what would fit according to the memory plan. Also refuses batches
    that are too small for batch norm."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"data.global_batch_size: {world.size} x {device_name(world.device)} is {OUT_OF_MEMORY} with "
            f"{config.data.global_batch_size}; {_what_fits(MemoryPlan(config, world, classes))}use a smaller batch or "
            "model; earlier checkpoints are kept"
        ) from error
    except ValueError as error:
        # Whether one image is too few depends on the size of the network's smallest maps.
        if "Expected more than 1 value per channel when training" not in str(error):
            raise
        raise UserError(
            "data.global_batch_size: batch norm cannot train on one image whose maps shrink to one pixel; use at least "
            "2 images per rank and microbatch (optim.accumulation_steps), or a larger data.image_size"
        ) from error


def _what_fits(made: MemoryPlan) -> str:
    """How a step that did not fit would fit; without asking other ranks, which may be waiting for this one
    elsewhere."""
    fewest = made.config.optim.microbatches
    steps = min((parts for parts in made.microbatch_counts() if parts > fewest), default=None)
    memory = device_memory(made.config, World(0, 1, made.world.device))
    # If the plan cannot measure the network, any more microbatches are a try.
    with suppress(UserError):
        if memory is not None:
            steps = made.fewest_microbatches(memory, more_than=fewest)
            if steps is None:
                other = made.way_out(memory)
                return f"it {other}, or " if other else ""
    if steps is None:
        return "use parallel=fsdp on more ranks, speed.recompute=full, or "
    return f"use optim.accumulation_steps={steps} (the same result in smaller parts), or "


def enough_to_score(config: RunConfig, world: World) -> AbstractContextManager[None]:
    """`enough_memory` for scoring a network; nothing without an `eval_batch_size`: a run then takes training's batches,
    about which `enough_to_train` speaks."""
    size = config.data.eval_batch_size
    return nullcontext() if size is None else enough_memory("data.eval_batch_size", world.device, size)
