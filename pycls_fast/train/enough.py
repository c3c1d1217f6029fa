"""Too little memory, or too few images for batch norm, as one-line messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from pycls_fast import build
from pycls_fast.config.schema import RunConfig
from pycls_fast.errors import OUT_OF_MEMORY, UserError, is_out_of_memory
from pycls_fast.parallel import World
from pycls_fast.train.environment import device_name


@contextmanager
def enough_memory(mistake: str | Callable[[], str]) -> Iterator[None]:
    """Turn torch's out-of-memory error into a `UserError`.

    Args:
        mistake: the message, which must contain `OUT_OF_MEMORY`, or a function that makes it.

    Raises:
        UserError: out of memory.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(mistake if isinstance(mistake, str) else mistake()) from error


@contextmanager
def enough_to_train(config: RunConfig, world: World) -> Iterator[None]:
    """`enough_memory` for training, and enough images for batch norm.

    Raises:
        UserError: out of memory, or batch norm gets a single value per channel.
    """

    def mistake() -> str:
        return (
            f"data.global_batch_size: {world.size} x {device_name(world.device)} is {OUT_OF_MEMORY} with "
            f"{config.data.global_batch_size}{_way_out(config, world)}; earlier checkpoints are kept"
        )

    with enough_memory(mistake), enough_images():
        yield


def _way_out(config: RunConfig, world: World) -> str:
    """What the memory plan says of a step that did not fit, and the smaller microbatches to try."""
    made = build.MemoryPlan(config, world.device, world.size)
    try:
        needs = f" (a step needs {build.gigabytes(made.peak(config.optim.microbatches))} on each by the plan)"
    except UserError:
        # Whatever is computed can run out of memory, also what cannot be planned.
        needs = ""
    steps = next((n for n in reversed(made.parts()) if n > config.optim.microbatches), None)
    smaller = "" if steps is None else f"use optim.accumulation_steps={steps} (the same result in smaller parts), or "
    return f"{needs}; {smaller}use parallel=fsdp on more ranks, speed.recompute=full, a smaller batch or model"


@contextmanager
def enough_images() -> Iterator[None]:
    """Turn torch's error about batch norm with a single value per channel into a `UserError`.

    Raises:
        UserError: training with too few images per rank and microbatch.
    """
    try:
        yield
    except ValueError as error:
        # Whether one image is too few depends on the size of the network's smallest maps.
        if "Expected more than 1 value per channel when training" not in str(error):
            raise
        raise UserError(
            "data.global_batch_size: batch norm cannot train on one image whose maps shrink to one pixel; use at least "
            "2 images per rank and microbatch (optim.accumulation_steps), or a larger data.image_size"
        ) from error


def enough_to_score(config: RunConfig, world: World) -> AbstractContextManager[None]:
    """`enough_memory` for scoring a network (`config` comes from `build.for_scoring`)."""
    return enough_memory(
        f"data.eval_batch_size: {device_name(world.device)} is {OUT_OF_MEMORY} with {config.data.eval_batch_size} "
        f"images at a time; use a smaller one{or_cpu(world.device, 'runtime.device')}"
    )


def or_cpu(device: torch.device, key: str) -> str:
    """The end of an advice against too little memory: the CPU, which `key` chooses, unless it is the device."""
    return "" if device.type == "cpu" else f", or {key}=cpu"
