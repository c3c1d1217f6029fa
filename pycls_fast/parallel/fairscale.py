"""FairScale's two strategies (0.4.13, its last release), for runs that come from it.

FullyShardedDataParallel (`shard_weights`): parameters, gradients and optimizer state are sharded over the ranks, as in
ZeRO-3 (Rajbhandari et al. 2020), with one wrapper for each repeated unit and one for everything around the units.
FairScale flattens a whole wrapper into one tensor, which can have only one weight decay; here a wrapper has one flat
tensor for each optimizer group in it: a FlattenParamsWrapper inside a wrapper that flattens nothing.

OSS and ShardedDataParallel (`shard_state`): weights on every rank, each gradient and optimizer state on one rank, as in
ZeRO-2 with whole parameters. Each parameter has an owner, to which its gradient is reduced; only the owner updates it,
and broadcasts it after the step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from pycls_fast.network import Network
from pycls_fast.optim.groups import BATCH_NORM, NORMS, Group
from pycls_fast.optim.masters import cast_buffers, cast_inputs, cast_output
from pycls_fast.optim.owned_weights import OwnedWeights
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
    wrappers = _Wrappers(world, settings)
    waiting = dict(network.units())
    # In the order of their random draws.
    for module, fill in list(network.initialisers()) if is_empty(network) else []:
        module.to_empty(device="cpu")
        fill(module)
        module.to(world.device)
        for name in [name for name, unit in waiting.items() if not is_empty(unit)]:
            network.set_submodule(name, wrappers.wrap(name, waiting.pop(name)))
    for name, unit in waiting.items():
        network.set_submodule(name, wrappers.wrap(name, unit))
    root: Any = wrappers.wrap("", network)
    # FairScale would cast float32 images to float16, whatever the compute format.
    root.register_forward_pre_hook(partial(cast_inputs, settings.compute or torch.float32))
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
        shard_groups=[world.mesh.get_group()],
        free_gathered=free_gathered,
        weights=weights,
        groups=weights.groups,
    )


class _Wrappers:
    """Makes FairScale's wrappers, from the inside out."""

    def __init__(self, world: World, settings: StrategySettings) -> None:
        from fairscale.nn.data_parallel import FullyShardedDataParallel
        from fairscale.nn.misc import FlattenParamsWrapper

        _ignore_warnings()
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

    def wrap(self, name: str, module: nn.Module) -> nn.Module:
        """Wrap the network's module `name` ("": the network itself); norms that stay float32 get their own wrappers."""
        if self._compute is not None:
            for inner_name, inner in list(module.named_modules()):
                # Skip what is inside a wrapper already.
                if isinstance(inner, NORMS) and plain_name(f"{inner_name}.") == f"{inner_name}.":
                    path = f"{name}.{inner_name}".strip(".")
                    if isinstance(inner, BATCH_NORM):
                        # Takes half-precision maps as they are, with float32 weights and statistics.
                        module.set_submodule(inner_name, self._wrap(path, inner, self._wide))
                    elif self._wide_norms:
                        inner.register_forward_pre_hook(partial(cast_inputs, torch.float32))
                        norm = self._wrap(path, inner, self._wide)
                        norm.register_forward_hook(partial(cast_output, self._compute))
                        module.set_submodule(inner_name, norm)
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


def _ignore_warnings() -> None:
    # No user can change the deprecated names that FairScale calls.
    for text in ("TypedStorage is deprecated", r".*torch\.distributed\._.*_base"):
        warnings.filterwarnings("ignore", message=text, module=r"(fairscale|torch)\..*")
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

    `make` gets the parameters that this rank owns, in the same number of groups, some of which may be empty.
    """
    from fairscale.optim import OSS

    assert world.mesh is not None
    mesh: DeviceMesh = world.mesh

    class ShardedOptimizer(OSS):
        """OSS's own `state_dict` collects everything on one rank."""

        def state_dict(self) -> dict[str, Any]:
            """A copy in torch's form without groups, in which tensors of a parameter's shape are DTensors sharded along
            the first axis. One parameter is broadcast at a time, through the host. All ranks call this."""
            own = self.optim.state_dict()["state"]
            local_of = self._owned()
            state: dict[int, dict[str, Any]] = {}
            for index, (owner, parameter) in enumerate(self._owners()):
                values = own.get(local_of.get(index), {})
                told = [{key: v.cpu() if isinstance(v, Tensor) else v for key, v in values.items()}]
                dist.broadcast_object_list(told, src=owner, group=world.host_group)
                for key, value in told[0].items():
                    is_sharded = isinstance(value, Tensor) and value.ndim > 0 and value.shape == parameter.shape
                    state.setdefault(index, {})[key] = (
                        shard_first_axis(value.to(world.device), mesh) if is_sharded else value
                    )
            return {"state": state}

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


@dataclass(frozen=True)
class Flat:
    """One flat parameter: the parameters `names` concatenated and cut into equal shards, the last ones padded.

    Attributes:
        shard: this rank's shard, one-dimensional; training changes it in place.
        names, shapes: of the network's parameters in it, in order.
    """

    shard: nn.Parameter
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @property
    def name(self) -> str:
        """The first parameter's name and "+", so that it is the same on any number of ranks."""
        return f"{self.names[0]}+"


class FlatShards(OwnedWeights):
    """A network's flat parameters: as shards for the optimizer, as the network's tensors for checkpoints.

    Optimizer, average and gradient norm work on the shards, which is correct for element-wise operations. Checkpoints
    hold the network's own names and shapes, as DTensors; to build them, one flat parameter is gathered at a time.

    Args:
        flats: all flat parameters, in the network's order.
        buffers: the network's persistent buffers by name; every rank has them whole.
        groups: the optimizer's groups; their `params` are names of the network's parameters. A flat parameter is
            within one of them.
        mesh: one-dimensional, over all ranks.
        free_gathered: frees gathered weights, after the shards were changed other than by the optimizer.
    """

    def __init__(
        self,
        flats: Sequence[Flat],
        buffers: Mapping[str, Tensor],
        groups: Sequence[Group],
        mesh: DeviceMesh,
        free_gathered: Callable[[], None],
    ) -> None:
        self.flats = tuple(flats)
        trained = {flat.names[0]: flat.shard for flat in self.flats if flat.shard.requires_grad}
        self.groups: list[Group] = [
            {**group, "params": [shard for name, shard in trained.items() if name in group["params"]]}
            for group in groups
        ]
        """The optimizer's groups of shards."""
        self._buffers = dict(buffers)
        self._mesh = mesh
        self._free_gathered = free_gathered
        # During a pass the parameters point to whole weights; the shards keep their memory.
        self._shards = {flat.name: flat.shard.detach() for flat in self.flats}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for flat in self.flats:
            yield flat.name, flat.shard

    def live(self) -> dict[str, Tensor]:
        return {**self._shards, **self._buffers}

    def refresh_model(self) -> None:
        # The next forward pass gathers again.
        self._free_gathered()

    def state_dict(self) -> dict[str, Tensor]:
        """Buffers are shared, parameters are copies."""
        return self.split(self.live())

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        joined = self.join(state)
        for name, value in self.live().items():
            value.copy_(joined[name])
        self.refresh_model()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        """A tensor of a shard's shape is split as the shard is; anything else (a step count) is repeated."""
        state: dict[str, dict[str, Any]] = {}
        found = super().optimizer_state(optimizer)
        for flat in self.flats:
            leaves, spec = tree_flatten(found.get(flat.name, {}))
            parts = [
                self._split(flat, leaf) if _is_like(leaf, flat.shard.shape) else dict.fromkeys(flat.names, leaf)
                for leaf in leaves
            ]
            state |= {name: tree_unflatten([part[name] for part in parts], spec) for name in flat.names if parts}
        return state

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, dict[str, Any]]) -> None:
        found: dict[str, dict[str, Any]] = {}
        for flat in self.flats:
            if any(name in state for name in flat.names):
                found[flat.name] = tree_map(partial(self._join_like, flat), *(state[name] for name in flat.names))
        super().load_optimizer_state(optimizer, found)

    def split(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Shards as DTensors, sharded along the first axis; other values are unchanged."""
        out = {name: value for name, value in values.items() if name not in self._shards}
        for flat in self.flats:
            if flat.name in values:
                out.update(self._split(flat, values[flat.name]))
        return out

    def join(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """It takes whole tensors too."""
        parts = {name for flat in self.flats for name in flat.names}
        out = {name: value for name, value in values.items() if name not in parts}
        return out | {flat.name: self._join(flat, [values[name] for name in flat.names]) for flat in self.flats}

    @torch.no_grad()
    def _split(self, flat: Flat, shard: Tensor) -> dict[str, Tensor]:
        device = flat.shard.device
        # An optimizer's state may be on the host, which the ranks' backend cannot access.
        own = shard.to(device)
        whole = own.new_empty(self._mesh.size() * own.numel())
        dist.all_gather_into_tensor(whole, own, group=self._mesh.get_group())
        sizes = [shape.numel() for shape in flat.shapes]
        parts = whole[: sum(sizes)].split(sizes)
        return {
            name: shard_first_axis(part.view(shape), self._mesh)
            for name, shape, part in zip(flat.names, flat.shapes, parts, strict=True)
        }

    @torch.no_grad()
    def _join(self, flat: Flat, values: Sequence[Tensor]) -> Tensor:
        for name, shape, value in zip(flat.names, flat.shapes, values, strict=True):
            if value.shape != shape:
                raise ValueError(f"{name}: a tensor of {tuple(value.shape)} for a parameter of {tuple(shape)}")
        wholes = [value.full_tensor() if isinstance(value, DTensor) else value for value in values]
        flattened = torch.cat([whole.reshape(-1) for whole in wholes])
        each = flat.shard.numel()
        own = flattened[self._mesh.get_local_rank() * each :][:each]
        return F.pad(own, (0, each - own.numel()))

    def _join_like(self, flat: Flat, *values: Any) -> Any:
        return self._join(flat, values) if _is_like(values[0], flat.shapes[0]) else values[0]


def _is_like(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and value.shape == shape and value.ndim > 0


def shard_first_axis(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """Shard a tensor that all ranks of a one-dimensional mesh have, along its first axis; copies this rank's part."""
    if whole.ndim == 0:
        return DTensor.from_local(whole.clone(), mesh, [Replicate()], run_check=False)
    rows = -(-whole.shape[0] // mesh.size())
    own = whole[mesh.get_local_rank() * rows :][:rows].clone()
    return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
