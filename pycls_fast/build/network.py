"""From the model's configuration to the network: built, frozen, in its precision, wrapped for the ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch

from pycls_fast import parallel
from pycls_fast.build.device import DTYPES, level, strategy
from pycls_fast.build.optimization import optimizer, parameter_groups
from pycls_fast.build.switch_values import need_compiler
from pycls_fast.config.run import RunConfig
from pycls_fast.data.sources.base import Images
from pycls_fast.errors import UserError
from pycls_fast.models import DropPath, TimmNetwork
from pycls_fast.network import Network
from pycls_fast.optim import freeze as freezing
from pycls_fast.optim.groups import by_name
from pycls_fast.optim.masters import MasterWeights
from pycls_fast.parallel import FlatShards, ParallelModel, StrategySettings, World, use_float8, wrap_model
from pycls_fast.seeds import counter_seed
from pycls_fast.speed import Speed
from pycls_fast.strategies import STRATEGIES

# The random stream of the initial weights; those of synthetic images are in `sources.py`.
_INITIALISATION = 1


def num_classes(config: RunConfig, source: Images) -> int:
    """Number of the model's outputs: as configured, else the number of classes in the data.

    Raises:
        UserError: there are fewer outputs than classes, or only one class.
    """
    found = len(source.classes)
    chosen = config.model.num_classes
    if chosen is None and found < 2:
        raise UserError(
            f"data.root: only one class ({', '.join(source.classes)}) leaves nothing to distinguish; there must be at "
            "least 2 class folders"
        )
    if chosen is not None and chosen < found:
        raise UserError(
            f"model.num_classes: {chosen} outputs for data with {found} classes; use model.num_classes=null to take "
            f"{found}"
        )
    return chosen or found


def model(config: RunConfig, classes: int, chosen: Speed, *, empty: bool = False) -> Network:
    """The network with its initial weights, the same on every rank, on the CPU in float32; if `empty`, on meta."""
    with torch.device("meta") if empty else nullcontext():
        torch.manual_seed(_initial_seed(config))
        return _model(config, classes, chosen)


def _initial_seed(config: RunConfig) -> int:
    return counter_seed(config.seed, _INITIALISATION)


def _model(config: RunConfig, classes: int, chosen: Speed) -> Network:
    build: Callable[..., Network] = config.model.build
    switches = {name: getattr(chosen, name) for name in config.model.switches}
    if config.parallel.tensor_degree > 1:
        switches["token_parts"] = config.parallel.tensor_degree
    network = build(classes, config.data.image_size, **switches)
    if isinstance(network, TimmNetwork):
        _check_timm(config, network)
    return network


def _check_timm(config: RunConfig, network: TimmNetwork) -> None:
    """Raises UserError: settings that this model of timm, known only now, does not take."""
    wrong = []
    if "attention" in config.speed.by_hand and not network.has_fused_attention:
        wrong.append(f"speed.attention: timm's {network.name} has no attention to choose; use speed.attention=null")
    wrong += _without_blocks(config, network)
    refused = sorted({size for _, size in config.data.image_size_schedule if not network.takes(size)})
    if refused:
        wrong.append(
            f"data.image_size_schedule: timm's {network.name} at data.image_size={config.data.image_size} does not "
            f"take {', '.join(map(str, refused))}; use "
            "data.image_size_schedule=[], or a network for all sizes (model=resnet50)"
        )
    if wrong:
        raise UserError(*wrong)


def _without_blocks(config: RunConfig, network: TimmNetwork) -> list[str]:
    """A line for each setting that works on repeated blocks which the network does not have."""
    by_hand = config.speed.by_hand
    recompute = by_hand.get("recompute", "off")
    has_none = f"and timm's {network.name} has none; use"
    lines = []
    if not network.units():
        works = f"works on repeated blocks that take one tensor, {has_none}"
        if recompute != "off":
            lines.append(f"speed.recompute: {recompute} {works} speed.recompute=off")
        if by_hand.get("compile") == "blocks":
            lines.append(f"speed.compile: blocks {works} speed.compile=model")
    if not network.layers():
        works = f"works on repeated blocks, {has_none}"
        if isinstance(config.optim.layer_decay, float):
            # A rate for the last of many layers is too large for all of them.
            way_out = "optim.layer_decay=null with a smaller optim.lr (5e-5, say)"
            lines.append(f"optim.layer_decay: {config.optim.layer_decay:g} {works} {way_out}")
        if config.optim.needs_units:
            lines.append(f"optim.name: {config.optim.name} {works} optim=adamw")
    return lines


def counted_model(config: RunConfig, classes: int) -> Network:
    """The network on the meta device, for counting operations and activations: the same with all switches.

    With a switch that computes the same by other operations, different counts would say that work was saved.
    """
    return model(config, classes, Speed(), empty=True)


def freeze(config: RunConfig, network: Network) -> None:
    """Freeze everything that `optim.trainable` does not name, and batch norm's statistics if configured, in place.

    Raises:
        UserError: the network does not have a name.
    """
    freezing.freeze(network, config.optim.trainable, head=network.head_name)
    if config.optim.batch_norm == "frozen":
        freezing.keep_statistics(network)


def draw_on_device(network: Network) -> None:
    """Make drop-path draw from the device's generator, in place: a replayed CUDA graph cannot draw on the host."""
    for module in network.modules():
        if isinstance(module, DropPath):
            module.draws_on_device = True


def apply_precision(
    config: RunConfig, network: Network, device: torch.device, *, sharded: bool = False
) -> MasterWeights | None:
    """Cast a network that is on its device to the precision's format, in place; returns its masters, if any.

    If it is `sharded`, the strategy casts what it gathers, and the shards are the masters.

    Raises:
        UserError: this device does not have the format.
    """
    chosen = level(config)
    if chosen.float8:
        settings = config.precision
        use_float8(
            network,
            device,
            recipe=settings.fp8_recipe,
            skip=settings.fp8_skip,
            emulate=settings.fp8_emulate,
            head=network.head_name,
        )
    if chosen.weights == "float32" or sharded:
        return None
    return MasterWeights(
        network, dtype=DTYPES[chosen.weights], wide_norms=chosen.wide_norms, kept=chosen.masters == "kept"
    )


def save_activation_memory(config: RunConfig, network: Network, chosen: Speed) -> None:
    """Apply the activation-memory switches to a network in its final number and memory formats, in place."""
    parallel.save_activation_memory(
        network,
        network.units(),
        recompute=chosen.recompute,
        recompute_every=config.parallel.recompute_every,
        activation_offload=chosen.activation_offload,
        activation_compression=chosen.activation_compression,
    )


def wrap(
    config: RunConfig,
    network: Network,
    world: World,
    chosen: Speed,
    initialise: Callable[[FlatShards | None], None] | None = None,
) -> ParallelModel:
    """Wrap the network for the resolved strategy, compiled if configured; one on the meta device is initialised.

    Args:
        initialise: loads other values than the initial ones into a network from the meta device; see `wrap_model`.

    Raises:
        UserError: it is to be compiled, and there is no compiler.
    """
    settings, precision = config.parallel, level(config)
    if chosen.compile != "off":
        need_compiler(world.device, f"speed.compile: {chosen.compile}", "speed.compile=off")
    torch.manual_seed(_initial_seed(config))
    return wrap_model(
        network,
        world,
        strategy=strategy(config, world),
        settings=StrategySettings(
            compression=settings.compression,
            powersgd_rank=settings.powersgd_rank,
            powersgd_start_step=settings.powersgd_start_step,
            static_graph=settings.static_graph,
            reshard_after_forward=settings.reshard_after_forward,
            prefetch_units=settings.prefetch_units,
            sync_batchnorm=settings.sync_batchnorm,
            compute=None if precision.weights == "float32" else DTYPES[precision.weights],
            autocast=None if precision.autocast is None else DTYPES[precision.autocast],
            wide_norms=precision.wide_norms,
            param_offload=chosen.param_offload == "cpu",
            groups=by_name(network, parameter_groups(config, network)),
            make_optimizer=lambda groups: optimizer(config, network, chosen, groups=groups),
        ),
        compiled=chosen.compile,
        compile_mode=chosen.compile_mode,
        compile_budget=settings.recompute_budget if chosen.recompute == "budget" else 1.0,
        initialise=initialise,
    )


def is_sharded(config: RunConfig, world: World) -> bool:
    """Whether each rank holds only a part of the weights; such a network is built on the meta device."""
    return STRATEGIES[strategy(config, world)].shards_weights
