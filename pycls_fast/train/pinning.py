"""Asks for weights first: those of the Hugging Face hub are pinned to a commit, so that a run records which it had."""

from __future__ import annotations

from pycls_fast.config.run import RunConfig
from pycls_fast.errors import UserError
from pycls_fast.models import pretrained
from pycls_fast.parallel import World
from pycls_fast.train.checkpoint import Checkpoint


def pin_weights(config: RunConfig, world: World, resumed_from: Checkpoint | None = None) -> RunConfig:
    """The configuration with `weights=hf:ORG/NAME@COMMIT` for weights of the Hugging Face hub; all ranks call this.

    Rank 0 asks the hub for the commit. The first rank of each other node then asks for that commit's list of files,
    which the remaining ranks find in the cache.

    Args:
        resumed_from: the checkpoint from which a run resumes, which does not load `weights`; it has the commit.

    Raises:
        UserError: on all ranks: no such repository or revision, or no network and no copy of the weights.
    """
    source = config.weights
    if source is None or not (source.startswith(pretrained.HUGGING_FACE) or pretrained.is_hub(source)):
        return config
    if pretrained.is_hub(source) and (resumed_from is not None or pretrained.local_file(source) is not None):
        return config
    if resumed_from is not None:
        saved = str(resumed_from.plain["config"]["weights"])
        pinned = saved if saved.partition("@")[0] == source.partition("@")[0] else source
    else:
        pinned = _pinned_by_all(source, world)
    return config.model_copy(update={"weights": pinned})


def _pinned_by_all(source: str, world: World) -> str:
    pinned, mistakes = world.from_main(_asked(source) if world.is_main else (source, ()))
    if not mistakes and world.local_rank == 0 and not world.is_main:
        _, mistakes = _asked(pinned)
    # A rank that raised its own error would leave the others waiting for it.
    for found in world.gather(mistakes):
        if found:
            raise UserError(*found)
    return pinned


def _asked(source: str) -> tuple[str, tuple[str, ...]]:
    """The pinned source, or the source as it is and what is wrong."""
    try:
        return pretrained.pinned(source), ()
    except UserError as error:
        return source, tuple(error.lines)
