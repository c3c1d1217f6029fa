"""Notes on settings of what is switched off, which nothing reads."""

from __future__ import annotations

from collections.abc import Iterator

from pycls_fast.config.checks.helpers import default_of
from pycls_fast.config.compose import Composed
from pycls_fast.config.quoting import as_typed, key_of
from pycls_fast.config.schema import Augment, Precision, RunConfig, Section
from pycls_fast.precision import LEVELS


def in_vain(config: RunConfig, composed: Composed) -> Iterator[str]:
    """Yield a line for each key that was typed with a value other than its default and has no effect.

    Not an error: one run of a sweep, or one variant of a ladder, may switch off what the others use.
    """
    typed = {key_of(override) for override in composed.overrides}
    loss, optim, precision, level = config.loss, config.optim, config.precision, LEVELS[config.precision.name]
    keys = Precision.model_fields
    if not level.scaled:
        scaled = ", ".join(name for name, other in LEVELS.items() if other.scaled)
        scales = [key for key in keys if key.startswith("loss_scale")]
        yield from _changed(precision, "precision", scales, typed, f"precision={precision.name}: it is for {scaled}")
    if not level.float8:
        ours = [key for key in keys if key.startswith("fp8_")]
        yield from _changed(precision, "precision", ours, typed, f"precision={precision.name}: it is for fp8")
    if loss.name != "bce":
        yield from _changed(loss, "loss", ["bce_reduction"], typed, f"loss={loss.name}: it is for bce")
    if optim.ema_decay is None:
        yield from _changed(optim, "optim", ["ema_warmup", "ema_every_steps"], typed, "optim.ema_decay=null")
    if optim.layer_decay is None:
        yield from _changed(optim, "optim", ["layer_decay_groups"], typed, "optim.layer_decay=null")
    if config.augment.policy != "rand_augment":
        yield from _rand_augment(config.augment, composed, typed)


def _rand_augment(augment: Augment, composed: Composed, typed: set[str]) -> Iterator[str]:
    """A line if RandAugment's settings were typed, or are in a file and `augment.policy` is set nowhere.

    Whoever writes only the settings into a file may think that they turn it on.
    """
    given = composed.values.get("augment", {})
    forgotten = "rand_augment" in given and "policy" not in given
    if forgotten or any(key.startswith("augment.rand_augment") for key in typed):
        policy = as_typed(augment.policy)
        yield f"augment.rand_augment has no effect with augment.policy={policy}: it is for augment.policy=rand_augment"


def _changed(section: Section, name: str, keys: list[str], typed: set[str], without: str) -> Iterator[str]:
    for key in keys:
        value = getattr(section, key)
        if f"{name}.{key}" in typed and value != default_of(section, key):
            yield f"{name}.{key}={as_typed(value)} has no effect with {without}"
