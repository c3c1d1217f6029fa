"""Settings of what is switched off, which nothing reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pycls_fast.config.checks.helpers import default_of
from pycls_fast.config.quoting import as_typed
from pycls_fast.config.schema import Precision, RunConfig, Section
from pycls_fast.precision import LEVELS


@dataclass(frozen=True)
class Unused:
    """A key with a value other than its default, which has no effect because of another key."""

    key: str
    because_of: str
    message: str


def unused(config: RunConfig) -> Iterator[Unused]:
    """Yield the keys without effect.

    An experiment's file may set them for what a user then switches off, so that is for the caller to judge.
    """
    loss, optim, precision, level = config.loss, config.optim, config.precision, LEVELS[config.precision.name]
    keys = Precision.model_fields
    if not level.scaled:
        scaled = ", ".join(name for name, other in LEVELS.items() if other.scaled)
        ours = [key for key in keys if key.startswith("loss_scale")]
        yield from _changed(precision, "precision", ours, "name", f"is for levels that scale the loss ({scaled})")
    if not level.float8:
        yield from _changed(
            precision, "precision", [key for key in keys if key.startswith("fp8_")], "name", "is for precision=fp8"
        )
    if loss.name != "bce":
        yield from _changed(loss, "loss", ["bce_reduction"], "name", "is for loss=bce")
    if optim.ema_decay is None:
        yield from _changed(optim, "optim", ["ema_warmup", "ema_every_steps"], "ema_decay", "needs optim.ema_decay")
    if optim.layer_decay is None:
        yield from _changed(optim, "optim", ["layer_decay_groups"], "layer_decay", "needs optim.layer_decay")


def _changed(section: Section, name: str, keys: list[str], switch: str, what: str) -> Iterator[Unused]:
    now = as_typed(getattr(section, switch))
    with_it = f"{name}={now}" if switch == "name" else f"{name}.{switch}={now}"
    for key in keys:
        default = default_of(section, key)
        if getattr(section, key) != default:
            way_out = f"use {name}.{key}={as_typed(default)} with {with_it}"
            yield Unused(f"{name}.{key}", f"{name}.{switch}", f"{what}; {way_out}")
