"""From the configuration to the network, wrapped for the ranks, and to loss, schedule, optimizer, average, scaler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim import Optimizer

from pycls_fast.build.device import DTYPES, level, need_compiler
from pycls_fast.config.run import RunConfig
from pycls_fast.data.sources.base import Images
from pycls_fast.errors import UserError, refuse
from pycls_fast.losses import (
    BinaryCrossEntropy,
    ClassWeighted,
    FusedLoss,
    LossFunction,
    PerImage,
    balanced_weights,
    positive_weights,
)
from pycls_fast.models.complexity import complexity
from pycls_fast.models.external import GivenNetwork, TimmNetwork, accepts_size
from pycls_fast.network import Network
from pycls_fast.optim import groups as grouping
from pycls_fast.optim.ema import Ema
from pycls_fast.optim.groups import Group, by_name, parameter_groups
from pycls_fast.optim.masters import MasterWeights
from pycls_fast.optim.optimizers import HostOptimizer, compile_step, make_capturable
from pycls_fast.optim.owned_weights import LowRank, OwnedWeights
from pycls_fast.optim.schedule import LrSchedule
from pycls_fast.parallel import pipeline as stages
from pycls_fast.parallel.parallel_model import ParallelModel, StrategySettings
from pycls_fast.parallel.pipeline import Pipeline
from pycls_fast.parallel.precision import ConstantScaler, RanksScaler, use_float8
from pycls_fast.parallel.world import World
from pycls_fast.parallel.wrap import place_model, wrap_model
from pycls_fast.seeds import counter_seed
from pycls_fast.speed import Speed

# The random stream of the initial weights; those of synthetic images are in `sources/arrays.py`.
_INITIALISATION, _ADAPTATION = 1, 2


def num_classes(config: RunConfig, source: Images) -> int:
    """Number of the model's outputs: as configured (not fewer than the classes), else the classes of the data."""
    found, chosen = len(source.classes), config.model.num_classes
    if chosen is None and found < 2:
        column = "; of zeros and ones, data.label_separator=null data.label_column=NAME makes two"
        use = ", as folders or in a table (data=TABLE.csv)" if source.label_sets is None else column
        raise UserError(f"data.root: only one class ({', '.join(source.classes)}); at least 2 are needed{use}")
    if chosen is not None and chosen < found:
        raise UserError(f"model.num_classes: {chosen} outputs for {found} classes; use model.num_classes=null")
    return chosen or found


def label_sets(config: RunConfig, source: Images, device: torch.device) -> torch.Tensor | None:
    """Where images have several labels: the classes that each label stands for, ones in float32 (L, K); else None."""
    if source.label_sets is None:
        return None
    spare = num_classes(config, source) - len(source.classes)
    return F.pad(torch.from_numpy(source.label_sets).to(device, torch.float32), (0, spare))


def model(config: RunConfig, classes: int, switches: Speed, *, empty: bool = False) -> Network:
    """The network with its initial weights, the same on every rank, on the CPU in float32; if `empty`, on meta."""
    build: Callable[..., Network] = config.model.build
    own = {name: getattr(switches, name) for name in config.model.switches}
    if config.parallel.tensor_degree > 1:
        own["token_parts"] = config.parallel.tensor_degree
    with torch.device("meta") if empty else nullcontext():
        torch.manual_seed(counter_seed(config.seed, _INITIALISATION))
        network = build(classes, config.data.image_size, **own)
    _check(config, network, classes)
    return network


def trained_model(config: RunConfig, classes: int, switches: Speed, world: World) -> Network:
    """The network as training begins with it: on the meta device if each rank will initialise its shards itself.

    What is cut into stages has memory until then, because each stage's shards are taken from whole values; so has a
    network whose constructor draws its values.
    """
    empty = config.parallel.facts.shards_weights and world.pipeline == 1
    network = model(config, classes, switches, empty=empty)
    if empty and type(network).initialisers is Network.initialisers:
        return model(config, classes, switches)
    if isinstance(network, GivenNetwork) and empty and network.tied:
        # Each module would get one of its own.
        what = f"{config.parallel.facts.name} cannot shard a parameter of several modules"
        refuse([f"parallel.name: {what} ({' and '.join(network.tied)}); use parallel=ddp"])
    if isinstance(network, GivenNetwork) and world.size > 1:
        # Its values come from the program of each rank, which may not have seeded them.
        values = {name: tensor.detach().cpu() for name, tensor in network.given.items()} if world.is_main else {}
        network.given = world.from_main(values)
        if not empty:
            network.initialise()
    return network


def place(config: RunConfig, network: Network, world: World, switches: Speed) -> Network:
    """Move a network to the device and memory format, in place (`place_model`). Shards are contiguous, and convolutions
    follow the format of the images."""
    sharded = config.parallel.facts.shards_weights
    return place_model(network, world, memory_format="contiguous" if sharded else switches.memory_format)


def _check(config: RunConfig, network: Network, classes: int) -> None:
    """Refuse a network without a head, and settings that the network, which is known only now, does not take."""
    by_hand, name, wrong = config.speed.by_hand, config.model.called, []
    head = network.get_submodule(network.head_name)
    # One that was given has been looked at, and may have more outputs.
    if not isinstance(network, GivenNetwork) and getattr(head, "out_features", None) != classes:
        wrong.append(
            f"model.kind: {name} needs a linear layer that gives its {classes} logits: the last one, or the one that "
            "its head_name names"
        )
    has_none = f"works on repeated blocks, and {name} has none (Network.units); use"
    recompute, decay = by_hand.get("recompute", "off"), config.optim.layer_decay
    if recompute != "off" and not network.units():
        wrong.append(f"speed.recompute: {recompute} {has_none} speed.recompute=off")
    if by_hand.get("compile") == "blocks" and not network.units():
        wrong.append(f"speed.compile: blocks {has_none} speed.compile=model")
    if isinstance(decay, float) and not network.layers():
        # A rate for the last of many layers is too large for all of them.
        wrong.append(
            f"optim.layer_decay: {decay:g} {has_none} optim.layer_decay=null with a smaller optim.lr (5e-5, say)"
        )
    if config.optim.needs_units and not network.layers():
        wrong.append(f"optim.name: {config.optim.name} {has_none} optim=adamw")
    if isinstance(network, TimmNetwork) and "attention" in by_hand and not network.has_fused_attention:
        wrong.append(f"speed.attention: {name} has no attention to choose; use speed.attention=null")
    refused = sorted({size for _, size in config.data.image_size_schedule if not accepts_size(network, size)})
    if refused:
        wrong.append(
            f"data.image_size_schedule: {name} at data.image_size={config.data.image_size} does not take "
            f"{', '.join(map(str, refused))}; use data.image_size_schedule=[], or a network for all sizes "
            "(model=resnet50)"
        )
    refuse(wrong)


def counted_model(config: RunConfig, classes: int) -> Network:
    """The network on the meta device, for counting operations and activations: the same with all switches.

    With a switch that computes the same by other operations, different counts would say that work was saved.
    """
    return model(config, classes, Speed(), empty=True)


def freeze(config: RunConfig, network: Network) -> set[str]:
    """Freeze everything that `optim.trainable` does not name, and batch norm's statistics if configured, in place;
    returns the names of what `optim.lora_rank` adapts.
    """
    adapted = grouping.freeze(network, config.optim.trainable, adapted=config.optim.lora_rank is not None)
    if config.optim.batch_norm == "frozen":
        grouping.keep_statistics(network)
    return adapted


def low_rank(config: RunConfig, network: Network, adapted: set[str], world: World) -> LowRank | None:
    if not adapted:
        return None
    assert config.optim.lora_rank is not None
    seed = counter_seed(config.seed, _ADAPTATION)
    return LowRank(network, adapted, config.optim.lora_rank, seed=seed, at_once=world.size == 1)


def apply_precision(
    config: RunConfig, network: Network, device: torch.device, *, sharded: bool = False
) -> MasterWeights | None:
    """Cast a network that is on its device to the precision's format, in place; returns its masters, if any.

    If it is `sharded`, the strategy casts what it gathers, and the shards are the masters.
    """
    precision = level(config)
    if precision.float8:
        settings = config.precision
        use_float8(
            network,
            device,
            recipe=settings.fp8_recipe,
            skip=settings.fp8_skip,
            emulate=settings.fp8_emulate,
            head=network.head_name,
        )
    if precision.weights == "float32" or sharded:
        return None
    return MasterWeights(
        network, dtype=DTYPES[precision.weights], wide_norms=precision.wide_norms, kept=precision.masters == "kept"
    )


def stage_costs(config: RunConfig, classes: int) -> list[int]:
    """Operations of an image's forward pass before the network's blocks, in each of them, and after them."""
    network = counted_model(config, classes)
    counted = complexity(network, image_size=config.data.image_size).flops_of
    before, after = (sum(counted.get(name, 0) for name in names) for names in network.ends())
    return [before, *(counted[name] for name, _ in network.units()), after]


def split_into_stages(config: RunConfig, network: Network, world: World) -> Pipeline | None:
    """Leave only this rank's stages of a pipeline in the network, in place; None without one."""
    if world.pipeline == 1:
        return None
    settings, costs = config.parallel, stage_costs(config, network.last_layer().out_features)
    return stages.split_into_stages(
        network, world, settings.pipeline_schedule, costs, averages=not settings.facts.shards_weights
    )


def wrap(
    config: RunConfig,
    network: Network,
    world: World,
    switches: Speed,
    initialise: Callable[[OwnedWeights | None], None] | None = None,
    pipeline: Pipeline | None = None,
) -> ParallelModel:
    """Wrap the network for the resolved strategy, compiled if configured; one on the meta device gets its initial
    values, or those of `initialise` (see `wrap_model`)."""
    precision = level(config)
    if switches.compile != "off":
        need_compiler(world.device, f"speed.compile: {switches.compile}", "speed.compile=off")
    torch.manual_seed(counter_seed(config.seed, _INITIALISATION))
    settings = StrategySettings(
        config.parallel,
        switches,
        compute=None if precision.weights == "float32" else DTYPES[precision.weights],
        autocast=None if precision.autocast is None else DTYPES[precision.autocast],
        wide_norms=precision.wide_norms,
        pipeline=pipeline,
        groups=by_name(network, parameter_groups(network, config.optim)),
        make_optimizer=lambda groups: optimizer(config, network, switches, groups=groups),
    )
    return wrap_model(network, world, settings, initialise)


def loss(
    config: RunConfig, switches: Speed, device: torch.device, classes: int, train: Images | None = None
) -> LossFunction:
    """The training loss for a network of so many outputs. Without the training images all classes have the same
    weight."""
    plain = config.loss.build(classes)
    if config.loss.class_weights == "auto" and train is not None:
        counts_K, several = torch.from_numpy(train.class_counts()), train.label_sets is not None
        weights_K = positive_weights(counts_K, len(train)) if several else balanced_weights(counts_K)
        # Outputs beyond the data's classes get the weight 1.
        weights_K = F.pad(weights_K, (0, classes - len(weights_K)), value=1.0).to(device)
        if several and isinstance(plain, BinaryCrossEntropy):
            plain = replace(plain, positive_K=weights_K)
        elif not several and isinstance(plain, PerImage):
            plain = ClassWeighted(plain, weights_K)
        else:
            raise UserError(f"loss.class_weights: loss={config.loss.name} has no weights for classes; use none")
    if switches.cross_entropy == "plain":
        return plain
    need_compiler(device, "speed.cross_entropy: fused", "speed.cross_entropy=plain")
    return FusedLoss(plain)


def schedule(config: RunConfig, steps_per_epoch: int) -> LrSchedule:
    return LrSchedule(config.schedule, config.optim.scaled(config.data.global_batch_size).lr, steps_per_epoch)


def optimizer(
    config: RunConfig,
    network: Network,
    switches: Speed,
    weights: OwnedWeights | None = None,
    *,
    sharded: bool = False,
    groups: list[Group] | None = None,
) -> Optimizer:
    """The optimizer over the network's parameter groups, with what `weights` owns in their place, or over `groups`.

    The shards of a `sharded` network are updated where they are, even if they are offloaded to the host.
    """
    settings = config.optim.scaled(config.data.global_batch_size)
    if groups is None:
        groups = (weights or OwnedWeights(network)).owned_groups(parameter_groups(network, config.optim))

    def make(groups: list[Group]) -> Optimizer:
        # Under fairscale_sharded_ddp a rank may own no parameter of a group.
        device = next((p.device for group in groups for p in group["params"]), next(network.parameters()).device)
        if settings.compiles_itself:
            need_compiler(device, f"optim.name: {settings.name}", "optim=adamw")
        made = settings.build(groups, switches.optimizer)
        if switches.optimizer_compile == "on":
            need_compiler(device, "speed.optimizer_compile: on", "speed.optimizer_compile=off")
            compile_step(made)
        if switches.cuda_graphs == "on":
            make_capturable(made, device)
        return made

    if switches.param_offload == "none" or sharded:
        return make(groups)
    return HostOptimizer(groups, make)


def ema(config: RunConfig, weights: OwnedWeights, switches: Speed) -> Ema | None:
    """The exponential moving average of the weights, or None without `optim.ema_decay`."""
    settings = config.optim
    if settings.ema_decay is None:
        return None
    return Ema(
        weights,
        decay=settings.ema_decay,
        warmup=settings.ema_warmup,
        implementation=switches.ema,
        every=settings.ema_every_steps,
    )


def loss_scaler(
    config: RunConfig, device: torch.device, ranks: Sequence[dist.ProcessGroup] = (), *, on_host: bool = False
) -> torch.amp.GradScaler:
    """Loss scaling for the float16 levels, agreed on by `ranks` (`RanksScaler`); does nothing at other levels.
    `on_host`: the gradients are on the host, whatever the device."""
    settings = config.precision
    if not level(config).scaled:
        return RanksScaler(device.type, enabled=False)
    if settings.loss_scale != "dynamic":
        scaler: RanksScaler = ConstantScaler(device.type, settings.loss_scale, ranks=ranks)
    else:
        scaler = RanksScaler(
            device.type,
            ranks=ranks,
            init_scale=settings.loss_scale_start,
            growth_factor=settings.loss_scale_growth,
            backoff_factor=settings.loss_scale_backoff,
            growth_interval=settings.loss_scale_interval,
        )
    if on_host:
        # The scale stays where its first loss was. What torch copies from a device to the host, it does not wait for.
        scaler.scale(torch.zeros(()))
    return scaler
