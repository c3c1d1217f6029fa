"""Flat parameters sharded over ranks, and their conversion from and to the network's parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from pycls_fast.optim.groups import Group
from pycls_fast.optim.weights import OwnedWeights


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
        state: dict[str, dict[str, Any]] = {name: {} for flat in self.flats for name in flat.names}
        found = super().optimizer_state(optimizer)
        for flat in self.flats:
            for key, value in found.get(flat.name, {}).items():
                has_shape = isinstance(value, Tensor) and value.shape == flat.shard.shape and value.ndim > 0
                parts = self._split(flat, value) if has_shape else dict.fromkeys(flat.names, value)
                for name, part in parts.items():
                    state[name][key] = part
        return {name: values for name, values in state.items() if values}

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, dict[str, Any]]) -> None:
        found: dict[str, dict[str, Any]] = {}
        for flat in self.flats:
            if not any(name in state for name in flat.names):
                continue
            found[flat.name] = {}
            for key, value in state[flat.names[0]].items():
                values = [state[name][key] for name in flat.names]
                has_shape = isinstance(value, Tensor) and value.shape == flat.shapes[0] and value.ndim > 0
                found[flat.name][key] = self._join(flat, values) if has_shape else value
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
            name: cut(part.view(shape), self._mesh)
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


def cut(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """Shard a tensor that all ranks of a one-dimensional mesh have, along its first axis; copies this rank's part."""
    if whole.ndim == 0:
        return DTensor.from_local(whole.clone(), mesh, [Replicate()], run_check=False)
    rows = -(-whole.shape[0] // mesh.size())
    own = whole[mesh.get_local_rank() * rows :][:rows].clone()
    return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
