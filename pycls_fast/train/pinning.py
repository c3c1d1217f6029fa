"""Pins weights of the Hugging Face hub to a commit, so that a run records which ones it began with."""

from __future__ import annotations

from pycls_fast.config.schema import RunConfig
from pycls_fast.models import foreign
from pycls_fast.parallel import World
from pycls_fast.train.checkpoint import Checkpoint


def pin_weights(config: RunConfig, world: World, resumed_from: Checkpoint | None = None) -> RunConfig:
    """The configuration with `weights=hf:ORG/NAME@COMMIT` for weights of the Hugging Face hub; all ranks call this.

    Rank 0 asks the hub for the commit. The first rank of each other node then asks for that commit's list of files,
    which the remaining ranks find in the cache.

    Args:
        resumed_from: the checkpoint from which a run resumes, which does not load `weights`; it has the commit.

    Raises:
        UserError: no such repository or revision.
    """
    source = config.weights
    if source is None or not source.startswith(foreign.HUGGING_FACE):
        return config
    if resumed_from is not None:
        saved = str(resumed_from.plain["config"]["weights"])
        pinned = saved if saved.partition("@")[0] == source.partition("@")[0] else source
    else:
        pinned = world.from_main(foreign.pinned(source) if world.is_main else source)
        if world.local_rank == 0 and not world.is_main:
            foreign.pinned(pinned)
        world.barrier()
    return config.model_copy(update={"weights": pinned})
