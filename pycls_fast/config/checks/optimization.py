"""Checks of what the training does: schedule and optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from pycls_fast.config.schema import RunConfig, ViTModel
from pycls_fast.strategies import strategy_of
from pycls_fast.values import AUTO


def schedule_problems(config: RunConfig) -> Iterator[tuple[str, str]]:
    """A warm-up that is too long."""
    schedule = config.schedule
    if schedule.epochs != AUTO and schedule.warmup_epochs > schedule.epochs:
        yield (
            "schedule.warmup_epochs",
            f"{schedule.warmup_epochs:g} is longer than the training of schedule.epochs={schedule.epochs}; "
            f"use schedule.warmup_epochs={schedule.epochs} or less",
        )


def optimizer_problems(config: RunConfig) -> Iterator[tuple[str, str]]:
    """What is frozen."""
    trainable = config.optim.trainable
    if "all" in trainable and len(trainable) > 1:
        yield "optim.trainable", f"all includes everything; remove {trainable[trainable.index('all') - 1]} or all"
    if trainable == ("all",):
        return
    if not strategy_of(config.parallel.name).freezes:
        yield (
            "optim.trainable",
            f"frozen parts do not work with parallel={config.parallel.name}, which flattens or exchanges all weights "
            "alike; use parallel=ddp or fsdp",
        )
    if config.parallel.sync_batchnorm:
        yield (
            "parallel.sync_batchnorm",
            "would replace the batch norms whose statistics optim.trainable freezes; use parallel.sync_batchnorm=false",
        )


def trust_ratio_problems(config: RunConfig) -> Iterator[tuple[str, str]]:
    """LAMB's step has the norm of the weights times lr, or Adam's without weight decay (`optim.lamb`)."""
    model, settings = config.model, config.optim
    # Weights from elsewhere are rarely zero; `train/building.py` looks at the head.
    if not settings.trust_ratio or not settings.weight_decay or config.weights is not None:
        return
    for key in ("decay_norms", "decay_biases"):
        if getattr(settings, key):
            yield (
                f"optim.{key}",
                f"puts parameters that begin with zeros under the trust ratio of optim={settings.name}, which hardly "
                f"changes them; use optim.{key}=false",
            )
    if isinstance(model, ViTModel) and model.init == "jax":
        yield (
            "model.init",
            f"jax begins the head with zeros, which optim={settings.name} hardly changes: its steps are in proportion "
            "to the weights; use model.init=trunc_normal",
        )
