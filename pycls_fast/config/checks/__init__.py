"""Checks that involve several keys: combinations that cannot run, found before anything is built."""

from __future__ import annotations

from collections.abc import Iterator

from pycls_fast.config.checks import data, execution, network, optimization
from pycls_fast.config.schema import RunConfig

ONLY_SCORED = "only tools/test_net.py scores it; use data.eval_set=null"


def problems(config: RunConfig, *, needs_data: bool = True, trains: bool = False) -> Iterator[tuple[str, str]]:
    """Yield (key, what is wrong and what to do) for every impossible combination.

    Args:
        config: the configuration.
        needs_data: False if no image is read.
        trains: whether it is used for training, so that its initial weights matter.
    """
    # A resumed run has its weights in its checkpoint.
    if trains and config.weights is None and config.resume in ("auto", "never") and _fine_tunes(config):
        yield "weights", "not set; give what to fine-tune as weights=SOURCE"
    if trains and config.data.eval_set is not None:
        yield "data.eval_set", ONLY_SCORED
    # Every evaluation set except ReaL has its own images.
    needs_data &= trains or config.data.eval_set in (None, "real")
    if needs_data and config.data.source not in ("digits", "synthetic") and config.data.root is None:
        yield (
            "data.root",
            "not set; give the folder that holds train/ and val/ (or one folder per class) as data.root=PATH",
        )
    if trains:
        yield from optimization.trust_ratio_problems(config)
    yield from data.source_problems(config)
    yield from network.model_problems(config)
    yield from data.image_problems(config)
    yield from optimization.schedule_problems(config)
    yield from optimization.loss_problems(config)
    yield from optimization.optimizer_problems(config)
    yield from execution.precision_problems(config)
    yield from execution.switch_problems(config)
    yield from execution.strategy_problems(config)
    yield from execution.fairscale_problems(config)


def _fine_tunes(config: RunConfig) -> bool:
    """Whether the settings only make sense with pretrained weights."""
    return config.needs_weights or config.data.normalization == "weights" or config.optim.trainable != ("all",)
