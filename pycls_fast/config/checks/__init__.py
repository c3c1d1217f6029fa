"""Checks that involve several keys: combinations that cannot run, found before anything is built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pycls_fast.config.checks import data, execution, network, optimization
from pycls_fast.config.schema import RunConfig
from pycls_fast.data.choices import Source


@dataclass(frozen=True)
class Purpose:
    """What a configuration is used for, on which depends what it must and must not contain."""

    needs_data: bool = True
    """False if no image is read, so that `data.root` may be missing."""
    trains: bool = False
    """Whether the network is trained, so that its initial weights matter: fine-tuning needs `weights`."""
    scores_sets: bool = False
    """Whether `data.eval_set` is read; it is refused otherwise."""


def problems(config: RunConfig, purpose: Purpose) -> Iterator[tuple[str, str]]:
    """Yield (key, what is wrong and what to do) for every impossible combination."""
    # A resumed run has its weights in its checkpoint.
    if purpose.trains and config.weights is None and config.resume in ("auto", "never") and _fine_tunes(config):
        yield "weights", "not set; give what to fine-tune as weights=SOURCE"
    if not purpose.scores_sets and config.data.eval_set is not None:
        yield "data.eval_set", "only pycls-fast test scores it; use data.eval_set=null"
    # Every evaluation set except ReaL has its own images.
    needs_root = purpose.needs_data and (purpose.trains or config.data.eval_set in (None, "real"))
    if needs_root and Source.members[config.data.source].needs_root and config.data.root is None:
        yield (
            "data.root",
            "not set; give the folder that holds train/ and val/ (or one folder per class) as data.root=PATH",
        )
    if purpose.trains:
        yield from optimization.trust_ratio_problems(config)
    yield from data.source_problems(config)
    yield from network.model_problems(config)
    yield from data.image_problems(config)
    yield from optimization.schedule_problems(config)
    yield from optimization.optimizer_problems(config)
    yield from execution.precision_problems(config)
    yield from execution.switch_problems(config)
    yield from execution.strategy_problems(config)
    yield from execution.fairscale_problems(config)


def _fine_tunes(config: RunConfig) -> bool:
    """Whether the settings only make sense with pretrained weights."""
    return config.needs_weights or config.data.normalization == "weights" or config.optim.trainable != ("all",)
