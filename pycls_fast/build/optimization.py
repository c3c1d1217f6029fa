"""From the configuration to loss, schedule, optimizer, weight average and loss scaler."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim import Optimizer

from pycls_fast.build.device import level
from pycls_fast.build.switch_values import need_compiler
from pycls_fast.config.run import RunConfig
from pycls_fast.errors import UserError
from pycls_fast.losses import ClassWeighted, FusedLoss, LossFunction, PerImage, balanced_weights
from pycls_fast.models import ClassToken, LayerScale, LearnedPositions, MapPooling, RegisterTokens
from pycls_fast.network import Network
from pycls_fast.optim import groups as grouping
from pycls_fast.optim import scaling
from pycls_fast.optim.ema import Ema
from pycls_fast.optim.groups import Decay, Group, Kinds
from pycls_fast.optim.masters import MasterWeights
from pycls_fast.optim.offload import HostOptimizer
from pycls_fast.optim.optimizers import (
    compile_step,
    make_capturable,
)
from pycls_fast.optim.schedule import LrSchedule
from pycls_fast.optim.weights import LocalShards, OwnedWeights
from pycls_fast.speed import Speed


def loss(
    config: RunConfig, chosen: Speed, device: torch.device, classes: int, class_counts: np.ndarray | None = None
) -> LossFunction:
    """The training loss.

    Args:
        classes: number of the network's outputs, K.
        class_counts: int64, training images of each class, for `loss.class_weights`; without them, as when timing
            random images, all classes have the same weight.

    Raises:
        UserError: it cannot be compiled on this machine, or its settings do not fit the classes.
    """
    plain = config.loss.build(classes)
    if config.loss.class_weights == "balanced" and class_counts is not None:
        if not isinstance(plain, PerImage):
            raise UserError(f"loss.class_weights: loss={config.loss.name} has no loss of each image; use none")
        weights_K = balanced_weights(torch.from_numpy(class_counts)).to(device)
        # Outputs beyond the data's classes get the weight 1.
        spare = max((config.model.num_classes or 0) - len(weights_K), 0)
        plain = ClassWeighted(plain, F.pad(weights_K, (0, spare), value=1.0))
    if chosen.cross_entropy == "plain":
        return plain
    need_compiler(device, "speed.cross_entropy: fused", "speed.cross_entropy=plain")
    return FusedLoss(plain)


def schedule(config: RunConfig, steps_per_epoch: int) -> LrSchedule:
    """The learning rates of a run."""
    return LrSchedule(config.schedule, config.optim.scaled(config.data.global_batch_size).lr, steps_per_epoch)


def optimizer(
    config: RunConfig,
    network: Network,
    chosen: Speed,
    masters: MasterWeights | LocalShards | None = None,
    *,
    sharded: bool = False,
    groups: list[Group] | None = None,
) -> Optimizer:
    """The optimizer over the network's parameter groups, over what owns their values instead, or over `groups`.

    The shards of a `sharded` network are updated where they are, even if they are offloaded to the host.
    """
    settings = config.optim.scaled(config.data.global_batch_size)
    if groups is None:
        groups = parameter_groups(config, network)
    if masters is not None:
        groups = masters.groups(groups)

    def make(groups: list[Group]) -> Optimizer:
        # Under fairscale_sharded_ddp a rank may own no parameter of a group.
        device = next((p.device for group in groups for p in group["params"]), next(network.parameters()).device)
        if settings.compiles_itself:
            need_compiler(device, f"optim.name: {settings.name}", "optim=adamw")
        made = settings.build(groups, chosen.optimizer)
        if chosen.optimizer_compile == "on":
            need_compiler(device, "speed.optimizer_compile: on", "speed.optimizer_compile=off")
            compile_step(made)
        if chosen.cuda_graphs == "on":
            make_capturable(made, device)
        return made

    if chosen.param_offload == "none" or sharded:
        return make(groups)
    if masters is not None:
        raise UserError(
            f"speed.param_offload: cpu keeps its own float32 weights, and precision={config.precision.name} other "
            "ones; use speed.param_offload=none or a precision with float32 weights, such as amp_bf16"
        )
    return HostOptimizer(groups, make)


def parameter_groups(config: RunConfig, network: Network) -> list[Group]:
    """The optimizer's groups of the network's parameters."""
    settings = config.optim
    # `resolve_auto` has replaced it.
    assert settings.layer_decay != "auto"
    kinds = Kinds(
        embeddings=(ClassToken, RegisterTokens, LearnedPositions, MapPooling),
        embedding_names=network.embedding_names(),
        scales=(LayerScale,),
        scale_names=network.scale_names(),
    )
    return grouping.parameter_groups(
        network,
        Decay(
            settings.weight_decay,
            norms=settings.decay_norms,
            biases=settings.decay_biases,
            embeddings=settings.decay_embeddings,
        ),
        kinds,
        units=network.layers(),
        layer_decay=settings.layer_decay,
        layer_decay_groups=settings.layer_decay_groups,
        split_hidden=settings.needs_units,
        first_conv_name=network.first_conv_name,
    )


def ema(config: RunConfig, weights: OwnedWeights, chosen: Speed) -> Ema | None:
    """The exponential moving average of the weights, or None without `optim.ema_decay`."""
    settings = config.optim
    if settings.ema_decay is None:
        return None
    return Ema(
        weights,
        decay=settings.ema_decay,
        warmup=settings.ema_warmup,
        implementation=chosen.ema,
        every=settings.ema_every_steps,
    )


def loss_scaler(
    config: RunConfig, device: torch.device, ranks: Sequence[dist.ProcessGroup] = ()
) -> torch.amp.GradScaler:
    """Loss scaling for the float16 levels, agreed on by `ranks` (`RanksScaler`); does nothing at other levels."""
    settings = config.precision
    return scaling.loss_scaler(
        device.type,
        enabled=level(config).scaled,
        constant=None if settings.loss_scale == "dynamic" else settings.loss_scale,
        start=settings.loss_scale_start,
        growth=settings.loss_scale_growth,
        backoff=settings.loss_scale_backoff,
        interval=settings.loss_scale_interval,
        ranks=ranks,
    )
