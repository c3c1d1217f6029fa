"""FairScale's OSS and ShardedDataParallel: weights on every rank, each gradient and optimizer state on one rank.

ZeRO-2 (Rajbhandari et al. 2020, arXiv 1910.02054) with whole parameters as the unit of sharding: each parameter has an
owner, to which its gradient is reduced; only the owner updates it, and broadcasts it after the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from pycls_fast.errors import UserError
from pycls_fast.optim import Group
from pycls_fast.parallel.flat import cut
from pycls_fast.parallel.world import World
from pycls_fast.parallel.wrapped import StrategySettings, Wrapped


def shard(network: nn.Module, world: World, settings: StrategySettings) -> Wrapped:
    """Wrap the network, with an optimizer in which each rank holds the state of the parameters that it owns.

    Args:
        network: on the device, the same on all ranks.
        world: the ranks, with their mesh.
        settings: with the optimizer's `groups` and `make_optimizer`.

    Raises:
        UserError: FairScale is not installed.
    """
    try:
        from fairscale.nn.data_parallel import ShardedDataParallel
    except ImportError as error:
        raise UserError(
            "parallel.name: fairscale_sharded_ddp needs FairScale, which is not installed; pip install fairscale, or "
            "use parallel=ddp"
        ) from error
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

    return Wrapped(
        forward=model,
        evaluated=network,
        device=world.device,
        exchange=exchange,
        taken_every_microbatch=False,
        # After the exchange only the owner has a gradient.
        shard_group=world.mesh.get_group(),
        optimizer=optimizer,
    )


def sharded_optimizer(groups: list[Group], make: Callable[[list[Group]], Optimizer], world: World) -> Optimizer:
    """FairScale's OSS, with a state that can be saved and loaded on any number of ranks.

    Args:
        groups: groups of all parameters.
        make: makes the optimizer of the parameters that this rank owns, in as many groups, some of them perhaps empty.
        world: the ranks, with their mesh.
    """
    from fairscale.optim import OSS

    assert world.mesh is not None
    mesh: DeviceMesh = world.mesh

    class ShardedOptimizer(OSS):
        """OSS with a sharded `state_dict`; OSS's own collects everything on one rank."""

        def state_dict(self) -> dict[str, Any]:
            """A copy in torch's form, in which tensors of a parameter's shape are DTensors sharded along the first
            axis. One parameter is broadcast at a time. All ranks call this."""
            mine = {index: self.optim.state_dict()["state"].get(local, {}) for local, index in self._owned()}
            told = world.gather({index: _outline(values) for index, values in mine.items()})
            state: dict[int, dict[str, Any]] = {}
            for index, (owner, parameter) in enumerate(self._owners()):
                for key, value in told[owner].get(index, {}).items():
                    if isinstance(value, _Sent):
                        whole = torch.empty(value.shape, dtype=value.dtype, device=world.device)
                        if owner == world.rank:
                            whole.copy_(mine[index][key])
                        dist.broadcast(whole, src=owner)
                        value = cut(whole, mesh) if whole.shape == parameter.shape else whole
                    state.setdefault(index, {})[key] = value
            return {"state": state, "param_groups": Optimizer.state_dict(self)["param_groups"]}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """Restore what `state_dict` returned, on any number of ranks, also from whole tensors; the groups keep
            their settings. All ranks call this."""
            local_of = {index: local for local, index in self._owned()}
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

        def _owned(self) -> Iterator[tuple[int, int]]:
            """This rank's parameters: index in its own optimizer, index among all parameters."""
            mine = [index for index, (owner, _) in enumerate(self._owners()) if owner == world.rank]
            yield from enumerate(mine)

    made: Optimizer = ShardedOptimizer(groups, optim=make, group=dist.group.WORLD)
    return made


class _Sent(NamedTuple):
    """Shape and dtype of a tensor that only the parameter's owner has."""

    shape: torch.Size
    dtype: torch.dtype


def _outline(values: dict[str, Any]) -> dict[str, Any]:
    """Numbers and 0-d tensors, moved to the host, and descriptions of all other tensors.

    A tensor is unpickled on the device it came from: every rank would open a context on every other rank's GPU.
    """

    def told(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return _Sent(value.shape, value.dtype) if value.ndim else value.cpu()

    return {key: told(value) for key, value in values.items()}
