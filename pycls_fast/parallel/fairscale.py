"""FairScale's two strategies (0.4.13, its last release), for runs that come from it.

FullyShardedDataParallel (`shard_weights`): parameters, gradients and optimizer state are sharded over the ranks, as in
ZeRO-3 (Rajbhandari et al. 2020), in one wrapper for each repeated unit and one for the rest around them. FairScale's
own flattening makes one tensor of a whole wrapper, which can have only one weight decay; here a wrapper has one flat
tensor for each optimizer group in it: a FlattenParamsWrapper inside a wrapper that flattens nothing.

OSS and ShardedDataParallel (`shard_state`): weights on every rank, each gradient and optimizer state on one rank, as in
ZeRO-2 with whole parameters. Each parameter has an owner, to which its gradient is reduced; only the owner updates it,
and broadcasts it after the step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from pycls_fast.network import Network
from pycls_fast.optim.groups import BATCH_NORM, NORMS, Group
from pycls_fast.optim.masters import CastInputs, CastOutput, cast_buffers
from pycls_fast.parallel.flat import Flat, FlatShards, cut
from pycls_fast.parallel.fsdp import is_empty
from pycls_fast.parallel.parallel_model import ParallelModel, StrategySettings
from pycls_fast.parallel.world import World


def shard_weights(network: Network, world: World, settings: StrategySettings) -> ParallelModel:
    """Wrap the network unit by unit; afterwards a rank holds its shard of each flat parameter, in float32.

    Weights are gathered in `settings.compute`; gradients are reduced in float32. Under a half format, batch norms (with
    `settings.wide_norms`: all norms) get their own wrappers, which stay float32.

    Args:
        network: on the device, or on the meta device: then each unit, before it is sharded, gets the values of a direct
            build on the CPU with torch's current seed, and no rank ever holds more than one whole unit and the rest
            around the units.
    """
    wrap = _Wrapping(world, settings)
    waiting = dict(network.units())
    # In the order of their random draws.
    for module, fill in list(network.initialisers()) if is_empty(network) else []:
        module.to_empty(device="cpu")
        fill(module)
        module.to(world.device)
        for name in [name for name, unit in waiting.items() if not is_empty(unit)]:
            _replace(network, name, wrap(name, waiting.pop(name)))
    for name, unit in waiting.items():
        _replace(network, name, wrap(name, unit))
    root: Any = wrap("", network)
    # FairScale would cast float32 images to float16, whatever the compute format.
    root.register_forward_pre_hook(CastInputs(settings.compute or torch.float32))
    free_gathered = partial(_free, root)
    assert world.mesh is not None
    weights = FlatShards(list(_flats(root)), _buffers(network), settings.groups, world.mesh, free_gathered)

    def exchange(is_last: bool) -> AbstractContextManager[None]:
        # ZeRO-3 reduces after every microbatch, so that no rank holds whole gradients, and accumulates in float32.
        return nullcontext() if is_last or settings.parallel.reshard_after_forward else root.no_sync()

    return ParallelModel(
        forward=root,
        evaluated=root,
        device=world.device,
        exchange=exchange,
        taken_every_microbatch=settings.parallel.reshard_after_forward,
        forward_is_collective=True,
        shard_groups=[world.mesh.get_group()],
        free_gathered=free_gathered,
        weights=weights,
    )


class _Wrapping:
    """Makes FairScale's wrappers, from the inside out."""

    def __init__(self, world: World, settings: StrategySettings) -> None:
        from fairscale.nn.data_parallel import FullyShardedDataParallel
        from fairscale.nn.misc import FlattenParamsWrapper

        _accept_old_names()
        self._fsdp, self._flatten = FullyShardedDataParallel, FlattenParamsWrapper
        self._group_of = {name: index for index, group in enumerate(settings.groups) for name in group["params"]}
        self._compute, self._wide_norms = settings.compute, settings.wide_norms
        narrow = settings.compute is not None
        compute = settings.compute or torch.float32
        self._common: dict[str, Any] = {
            "process_group": dist.group.WORLD,
            # A separate group, so that gradients are reduced while weights are gathered.
            "process_group_reduce_scatter": dist.new_group(timeout=world.timeout),
            "compute_device": world.device,
            "flatten_parameters": False,
            "reshard_after_forward": settings.parallel.reshard_after_forward,
            "mixed_precision": narrow,
            "fp32_reduce_scatter": narrow,
            "compute_dtype": compute,
            "buffer_dtype": compute,
        }
        self._wide: dict[str, Any] = self._common | {
            # Small enough to keep; and a wrapper inside a recomputed unit must not gather again.
            "reshard_after_forward": False,
            "mixed_precision": False,
            "fp32_reduce_scatter": False,
            "compute_dtype": torch.float32,
            "buffer_dtype": torch.float32,
        }

    def __call__(self, name: str, module: nn.Module) -> nn.Module:
        """Wrap the module that is called `name` in the network; norms that stay float32 get their own wrappers."""
        if self._compute is not None:
            for inner_name, inner in list(module.named_modules()):
                # Skip what is inside a wrapper already.
                if isinstance(inner, NORMS) and plain_name(f"{inner_name}.") == f"{inner_name}.":
                    path = f"{name}.{inner_name}".strip(".")
                    if isinstance(inner, BATCH_NORM):
                        # Takes half-precision maps as they are, with float32 weights and statistics.
                        _replace(module, inner_name, self._wrap(path, inner, self._wide))
                    elif self._wide_norms:
                        inner.register_forward_pre_hook(CastInputs(torch.float32))
                        norm = self._wrap(path, inner, self._wide)
                        norm.register_forward_hook(CastOutput(self._compute))
                        _replace(module, inner_name, norm)
            # FairScale would do this in the first forward pass; done here, buffers stay the same tensors from now on.
            cast_buffers(module, self._compute)
        return self._wrap(name, module, self._common)

    def _wrap(self, name: str, module: nn.Module, settings: Mapping[str, Any]) -> nn.Module:
        found: dict[int, list[nn.Parameter]] = {}
        for inner, parameter in module.named_parameters(prefix=name):
            # Skip the parameters of inner wrappers.
            if plain_name(inner) == inner:
                found.setdefault(self._group_of.get(inner, -1), []).append(parameter)
        if found:
            module = self._flatten(module, param_list=[found[group] for group in sorted(found)])
        made: nn.Module = self._fsdp(module, **settings)
        return made


def _flats(root: nn.Module) -> Iterator[Flat]:
    from fairscale.nn.misc import FlattenParamsWrapper

    for path, module in root.named_modules():
        for flat in module.flat_params if isinstance(module, FlattenParamsWrapper) else ():
            names, shapes, _ = flat.metadata()
            prefix = plain_name(f"{path}.")
            yield Flat(flat, tuple(prefix + plain_name(name) for name in names), tuple(shapes))


def _buffers(network: nn.Module) -> dict[str, Tensor]:
    """The persistent buffers, under the network's own names."""
    return {
        plain_name(f"{path}.{name}" if path else name): buffer
        for path, module in network.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def _free(root: nn.Module) -> None:
    """Free all gathered weights, as FairScale itself does after loading shards."""
    from fairscale.nn.data_parallel import FullyShardedDataParallel

    for module in root.modules():
        if isinstance(module, FullyShardedDataParallel) and any(hasattr(p, "_fp32_shard") for p in module.params):
            module._free_full_params()


def plain_name(name: str) -> str:
    """A wrapped network's qualified name without the wrappers."""
    return name.replace("_fsdp_wrapped_module.", "").replace("_fpw_module.", "")


def _replace(network: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(network.get_submodule(parent), child, module)


def _accept_old_names() -> None:
    """Silence torch's warnings about deprecated names in FairScale, which no user can change."""
    for text in ("TypedStorage is deprecated", r".*torch\.distributed\._.*_base"):
        warnings.filterwarnings("ignore", message=text, module=r"fairscale\..*")
    # Compiled units read weights that are views of a flat parameter.
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf", module="torch.*")


def shard_state(network: nn.Module, world: World, settings: StrategySettings) -> ParallelModel:
    """Wrap the network, with an optimizer in which each rank holds the state of the parameters that it owns."""
    from fairscale.nn.data_parallel import ShardedDataParallel

    assert settings.make_optimizer is not None
    assert world.mesh is not None
    # FairScale's communication buffers will make the weights contiguous. The optimizer creates its state before that,
    # and fused steps pair weights and momentum in memory order. Convolutions follow the format of the images.
    network.to(memory_format=torch.contiguous_format)
    parameters = dict(network.named_parameters())
    groups = [{**group, "params": [parameters[name] for name in group["params"]]} for group in settings.groups]
    optimizer: Any = sharded_optimizer(groups, settings.make_optimizer, world)
    model: Any = ShardedDataParallel(
        network,
        optimizer,
        # BatchNorm's statistics stay local during training and are averaged before they are read.
        broadcast_buffers=False,
        sync_models_at_startup=False,
        # FairScale's buckets are long-lived buffers that gradients are views of: after `zero_grad(set_to_none=True)`
        # the gradients are new tensors, the old buffers are still reduced, and training is silently wrong. Without
        # buckets that cannot happen, and no rank keeps gradients that it does not own after the exchange.
        reduce_buffer_size=0,
        auto_refresh_trainable=False,
    )
    # Otherwise the first forward pass does it and gives every parameter new memory: a weight average created before
    # that would keep following the old memory.
    model.refresh_trainable()

    def exchange(is_last: bool) -> AbstractContextManager[None]:
        return nullcontext() if is_last else model.no_sync()

    return ParallelModel(
        forward=model,
        evaluated=network,
        device=world.device,
        exchange=exchange,
        taken_every_microbatch=False,
        # After the exchange only the owner has a gradient.
        shard_groups=[world.mesh.get_group()],
        optimizer=optimizer,
    )


def sharded_optimizer(groups: list[Group], make: Callable[[list[Group]], Optimizer], world: World) -> Optimizer:
    """FairScale's OSS, with a state that can be saved and loaded on any number of ranks.

    `make` gets the parameters that this rank owns, in as many groups, some of them perhaps empty.
    """
    from fairscale.optim import OSS

    assert world.mesh is not None
    mesh: DeviceMesh = world.mesh

    class ShardedOptimizer(OSS):
        """OSS's own `state_dict` collects everything on one rank."""

        def state_dict(self) -> dict[str, Any]:
            """A copy in torch's form, in which tensors of a parameter's shape are DTensors sharded along the first
            axis. One parameter is broadcast at a time, through the host. All ranks call this."""
            own = self.optim.state_dict()["state"]
            local_of = self._owned()
            state: dict[int, dict[str, Any]] = {}
            for index, (owner, parameter) in enumerate(self._owners()):
                values = own.get(local_of.get(index), {})
                told = [{key: v.cpu() if isinstance(v, Tensor) else v for key, v in values.items()}]
                dist.broadcast_object_list(told, src=owner, group=world.host_group)
                for key, value in told[0].items():
                    is_cut = isinstance(value, Tensor) and value.ndim > 0 and value.shape == parameter.shape
                    state.setdefault(index, {})[key] = cut(value.to(world.device), mesh) if is_cut else value
            return {"state": state, "param_groups": Optimizer.state_dict(self)["param_groups"]}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """It takes whole tensors, too; the groups keep their settings. All ranks call this."""
            local_of = self._owned()
            own: dict[int, dict[str, Any]] = {}
            for index, values in sorted(state_dict["state"].items()):
                whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in values.items()}
                if index in local_of:
                    own[local_of[index]] = whole
            self.optim.load_state_dict({**self.optim.state_dict(), "state": own})

        def _owners(self) -> Iterator[tuple[int, Tensor]]:
            """Owner and parameter, in the order in which torch numbers parameters."""
            for group in self.param_groups:
                for parameter in group["params"]:
                    yield self._param_to_rank[parameter], parameter

        def _owned(self) -> dict[int, int]:
            """This rank's parameters: index among all parameters to index in its own optimizer."""
            mine = [index for index, (owner, _) in enumerate(self._owners()) if owner == world.rank]
            return {index: local for local, index in enumerate(mine)}

    made: Optimizer = ShardedOptimizer(groups, optim=make, group=dist.group.WORLD)
    return made
