"""A device whose memory does not suffice is told in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from pycls_fast.config.command_line import OUT_OF_MEMORY
from pycls_fast.config.schema import RunConfig
from pycls_fast.errors import UserError
from pycls_fast.parallel import World
from pycls_fast.train.environment import device_name


@contextmanager
def enough_memory(mistake: str) -> Iterator[None]:
    """Work that may need more memory than the device has; then `mistake` says so, with the words `OUT_OF_MEMORY`.

    Raises:
        UserError: `mistake`, in place of torch's error.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(mistake) from error


def enough_to_score(config: RunConfig, world: World) -> AbstractContextManager[None]:
    """The same for a network that is scored (`config` is that of `build.for_scoring`)."""
    return enough_memory(
        f"data.eval_batch_size: {device_name(world.device)} is {OUT_OF_MEMORY} with {config.data.eval_batch_size} "
        "images at a time; use a smaller one, or runtime.device=cpu"
    )
