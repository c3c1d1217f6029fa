"""The weights that an optimizer owns, wherever they are, in the form that checkpoints hold; parts of sharded ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from pycls_fast.optim.groups import Group
from pycls_fast.optim.optimizers import load_named_state, named_state


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory: the tensor itself if it is not sharded.

    Element-wise arithmetic gives the same result on the parts and is cheaper: a DTensor determines the layout of the
    result again for every operation.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def assign(target: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor of the logical shape into a tensor that may be sharded; only the rank's part is read.

    Args:
        target: a plain tensor or a DTensor, changed in place.
        whole: the same values on every rank, in any format and on any device; it may be mapped from a file.
    """
    local(target).copy_(whole[local_slices(target)])


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """The slices of the logical shape that this rank holds."""
    if not isinstance(tensor, DTensor):
        return (slice(None),) * tensor.ndim
    sharded: Any = tensor  # the placements' type changed between versions of torch
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, sharded.device_mesh, sharded.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


class OwnedWeights:
    """What the optimizer owns: a network's parameters (`ModelWeights`), or what stands for them.

    Checkpoints hold the network's own names and shapes, whatever is owned: `state_dict`, `optimizer_state` and `split`
    convert to that form, and `load_state_dict`, `load_optimizer_state` and `join` from it.
    """

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable ones."""
        return [parameter for _, parameter in self.named_parameters() if parameter.requires_grad]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All that are owned, by their names in `live`."""
        raise NotImplementedError

    def live(self) -> dict[str, Tensor]:
        """Weights and buffers by name: tensors that training changes in place."""
        raise NotImplementedError

    def refresh_model(self) -> None:
        """Update the network after tensors of `live` were changed by hand."""

    def take_gradients(self) -> None:
        """Add the network's gradients to those of the owned weights, if these are other tensors, and clear them."""

    def copy_to_model(self) -> None:
        """Update the network after the optimizer's step."""

    def state_dict(self) -> dict[str, Tensor]:
        """Weights and buffers under the network's names and in its shapes."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned, in place."""
        raise NotImplementedError

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        """The optimizer's state by the names of the network's parameters."""
        return named_state(optimizer, self.named_parameters())

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, dict[str, Any]]) -> None:
        """Restore what `optimizer_state` returned; the groups keep their settings."""
        load_named_state(optimizer, self.named_parameters(), state)

    def split(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Values with the names and shapes of `live`, such as an average, under the network's names and shapes."""
        return dict(values)

    def join(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `split`."""
        return dict(values)


class ModelWeights(OwnedWeights):
    """The network's own parameters and buffers, sharded or not.

    Args:
        model: has to keep its tensors in place.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self._model.named_parameters()

    def live(self) -> dict[str, Tensor]:
        # It shares memory with the model.
        state: dict[str, Tensor] = self._model.state_dict(keep_vars=True)
        return state

    def state_dict(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self._model.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._model.load_state_dict(state)


class LocalShards(ModelWeights):
    """A sharded network's parameters as plain tensors: each rank's own part, in the same memory.

    For optimizers that work element by element. On DTensors every operation, and every tensor of a fused one, first
    finds the layout of its result, which takes the host longer than the update takes the device
    (`benchmarks/optimizers.py --sharded`).

    Args:
        model: sharded by `fully_shard`, and with memory.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._sharded = dict(model.named_parameters())
        self._local = {
            name: nn.Parameter(local(p.detach()), requires_grad=p.requires_grad) for name, p in self._sharded.items()
        }
        self._trained = [(p, self._local[name]) for name, p in self._sharded.items() if p.requires_grad]

    def groups(self, groups: Sequence[Group]) -> list[Group]:
        """Optimizer groups with the network's parameters replaced by their local parts."""
        local_of = {parameter: self._local[name] for name, parameter in self._sharded.items()}
        return [{**group, "params": [local_of[p] for p in group["params"]]} for group in groups]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._local.items()

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Hand the network's gradients over to the local parts, without a copy."""
        for parameter, part in self._trained:
            gradient: Any = parameter.grad
            # Not `local`: a microsecond a tensor is as much as a fused update takes.
            part.grad = None if gradient is None else gradient._local_tensor
            parameter.grad = None

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        state = super().optimizer_state(optimizer)
        return {name: self._like(name, values) for name, values in state.items()}

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, dict[str, Any]]) -> None:
        parts = {
            name: {key: local(value) if isinstance(value, Tensor) else value for key, value in values.items()}
            for name, values in state.items()
        }
        super().load_optimizer_state(optimizer, parts)

    def _like(self, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """What has the shape of a parameter's local part, as a DTensor that is sharded like the parameter."""
        whole: Any = self._sharded[name]
        part = self._local[name]

        def sharded(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.shape != part.shape:
                return value
            return DTensor.from_local(
                value,
                whole.device_mesh,
                whole.placements,
                run_check=False,
                shape=whole.shape,
                stride=whole.stride(),
            )

        return {key: sharded(value) for key, value in values.items()}
