"""Out-of-memory errors as one-line messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from pycls_fast.config.schema import RunConfig
from pycls_fast.errors import UserError
from pycls_fast.exit_status import OUT_OF_MEMORY
from pycls_fast.parallel import World
from pycls_fast.train.environment import device_name


@contextmanager
def enough_memory(mistake: str) -> Iterator[None]:
    """Turn torch's out-of-memory error into a `UserError`.

    Args:
        mistake: the message, which must contain `OUT_OF_MEMORY`.

    Raises:
        UserError: out of memory.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(mistake) from error


def enough_to_train(config: RunConfig, world: World) -> AbstractContextManager[None]:
    """`enough_memory` for training."""
    return enough_memory(
        f"data.global_batch_size: {world.size} x {device_name(world.device)} is {OUT_OF_MEMORY} with "
        f"{config.data.global_batch_size}; raise optim.accumulation_steps (the same result in smaller parts), or "
        "use a smaller batch or model; earlier checkpoints are kept"
    )


def enough_to_score(config: RunConfig, world: World) -> AbstractContextManager[None]:
    """`enough_memory` for scoring a network (`config` comes from `build.for_scoring`)."""
    return enough_memory(
        f"data.eval_batch_size: {device_name(world.device)} is {OUT_OF_MEMORY} with {config.data.eval_batch_size} "
        "images at a time; use a smaller one, or runtime.device=cpu"
    )
