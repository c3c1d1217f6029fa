"""The weights that an optimizer updates, in the form in which checkpoints hold them; a rank's parts of sharded ones."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

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
    """Copy a whole tensor, the same on every rank, into one that may be sharded; only the rank's part is read."""
    local(target).copy_(whole[local_slices(target)])


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """The slices of the logical shape that this rank holds."""
    if not isinstance(tensor, DTensor):
        return (slice(None),) * tensor.ndim
    sharded: Any = tensor  # the placements' type changed between versions of torch
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, sharded.device_mesh, sharded.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


class OwnedWeights:
    """The weights that the optimizer updates: the network's own parameters, sharded or not; in subclasses other tensors
    in their place.

    Checkpoints always hold the network's own names and shapes: `state_dict`, `optimizer_state` and `split` convert to
    that form, and `load_state_dict`, `load_optimizer_state` and `join` from it.

    Args:
        model: has to keep its tensors in place.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._in_place_of: dict[int, dict[str, Any]] = {}
        """By the id of a parameter of the network: what is owned in its place, by how its name goes on."""

    def _owned(self, parameter: Any) -> Mapping[str, Any]:
        return self._in_place_of.get(id(parameter), {"": parameter})

    def owned_groups(self, groups: Sequence[Group]) -> list[Group]:
        """Optimizer groups of the network's parameters, with what is owned in their place."""
        return [{**g, "params": [own for p in g["params"] for own in self._owned(p).values()]} for g in groups]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable ones."""
        return [parameter for _, parameter in self.named_parameters() if parameter.requires_grad]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All that are owned, by their names in `live`."""
        for name, parameter in self._model.named_parameters():
            for end, own in self._owned(parameter).items():
                yield f"{name}{end}", own

    def live(self) -> dict[str, Tensor]:
        """Weights and buffers by name: tensors that training changes in place."""
        state: dict[str, Tensor] = self._model.state_dict(keep_vars=True)
        return state

    def refresh_model(self) -> None:
        """Update the network after tensors of `live` were changed by hand."""

    def take_gradients(self) -> None:
        """If the owned weights are other tensors, add the network's gradients to theirs and clear the network's."""

    def copy_to_model(self) -> None:
        """Update the network after the optimizer's step."""

    def state_dict(self) -> dict[str, Tensor]:
        """Weights and buffers under the network's names and in its shapes."""
        state: dict[str, Tensor] = self._model.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned, in place.

        Raises:
            KeyError, RuntimeError, ValueError: names or shapes are not the network's.
        """
        self._model.load_state_dict(state)

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


class LocalShards(OwnedWeights):
    """A sharded network's parameters as plain tensors: each rank's own part, in the same memory.

    For optimizers that work element by element. On DTensors, the host determines the layout of each operation's result
    (of a fused one, for each tensor), which takes longer than the update takes the device
    (`benchmarks/optimizers.py --sharded`). The model is sharded by `fully_shard`, and has memory.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._sharded = dict(model.named_parameters())
        self._local = {
            name: nn.Parameter(local(p.detach()), requires_grad=p.requires_grad) for name, p in self._sharded.items()
        }
        self._in_place_of = {id(p): {"": self._local[name]} for name, p in self._sharded.items()}
        self._trained = [(p, self._local[name]) for name, p in self._sharded.items() if p.requires_grad]

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
        # A user's optimizer may keep a list of averages.
        return {name: tree_map_only(Tensor, partial(self._like, name), values) for name, values in state.items()}

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, dict[str, Any]]) -> None:
        super().load_optimizer_state(optimizer, tree_map_only(Tensor, local, dict(state)))

    def _like(self, name: str, value: Tensor) -> Tensor:
        """A value with the shape of a parameter's local part, as a DTensor that is sharded like the parameter."""
        if value.shape != self._local[name].shape:
            return value
        whole: Any = self._sharded[name]
        return DTensor.from_local(
            value, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )


# Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022, section 4.1. The product of the two narrow
# matrices is multiplied by this, divided by the rank.
_ALPHA = 16.0


class _Adapted:
    """A weight W (O, ...) = base + scale * up (O, R) x down (R, I), of which only the two factors are trained."""

    def __init__(self, weight: nn.Parameter, rank: int, generator: torch.Generator) -> None:
        self.weight = weight
        self.base = weight.detach().flatten(1).clone()
        outputs, inputs = self.base.shape
        down = torch.empty(rank, inputs).uniform_(-(inputs**-0.5), inputs**-0.5, generator=generator)
        # With zeros in one factor, training begins with the network as it is.
        self.factors = {
            "down": nn.Parameter(down.to(self.base)),
            "up": nn.Parameter(self.base.new_zeros(outputs, rank)),
        }
        self.scale = _ALPHA / rank

    @torch.no_grad()
    def take_gradient(self, weight: Tensor) -> None:
        """Turn the weight's gradient, which is freed, into those of the factors."""
        assert weight.grad is not None
        gradient = weight.grad.flatten(1)
        down, up = self.factors["down"], self.factors["up"]
        for factor, added in ((down, up.t() @ gradient), (up, gradient @ down.t())):
            added *= self.scale
            factor.grad = added if factor.grad is None else factor.grad.add_(added)
        weight.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds besides the weight, from which the base could not be restored to the bit."""
        return {"base": self.base, **self.factors}


class LowRank(OwnedWeights):
    """A network some of whose weights are adapted: it keeps its layers, with the sum as their weight.

    Names, kernels, averages, checkpoints and exports are those of any network.

    Args:
        model: on its device; the weights to adapt require gradients.
        names: those of the weights to adapt.
        rank: R.
        seed: for the initial values, the same on every rank.
        at_once: take each gradient as soon as it is computed; otherwise ranks exchange gradients first.
    """

    def __init__(self, model: nn.Module, names: Collection[str], rank: int, *, seed: int, at_once: bool) -> None:
        super().__init__(model)
        generator = torch.Generator().manual_seed(seed)
        self._adapted = {
            name: _Adapted(parameter, rank, generator) for name, parameter in model.named_parameters() if name in names
        }
        for adapted in self._adapted.values():
            self._in_place_of[id(adapted.weight)] = {f".{name}": factor for name, factor in adapted.factors.items()}
            if at_once:
                adapted.weight.register_post_accumulate_grad_hook(adapted.take_gradient)

    def take_gradients(self) -> None:
        for adapted in self._adapted.values():
            if adapted.weight.grad is not None:
                adapted.take_gradient(adapted.weight)

    @torch.no_grad()
    def copy_to_model(self) -> None:
        for adapted in self._adapted.values():
            down, up = adapted.factors["down"], adapted.factors["up"]
            whole = torch.addmm(adapted.base, up, down, alpha=adapted.scale)
            adapted.weight.copy_(whole.view(adapted.weight.shape))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        state = super().optimizer_state(optimizer)
        for name, adapted in self._adapted.items():
            state[name] = {key: value.detach() for key, value in adapted.tensors().items()}
            for factor in adapted.factors:
                values = state.pop(f"{name}.{factor}", {})
                state[name] |= {f"{factor}.{key}": value for key, value in values.items()}
        return state

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, dict[str, Any]]) -> None:
        plain = {name: values for name, values in state.items() if name not in self._adapted}
        for name, adapted in self._adapted.items():
            for key, tensor in adapted.tensors().items():
                tensor.data.copy_(state[name][key])
            for factor in adapted.factors:
                own = {
                    key.removeprefix(f"{factor}."): v for key, v in state[name].items() if key.startswith(f"{factor}.")
                }
                if own:
                    plain[f"{name}.{factor}"] = own
        super().load_optimizer_state(optimizer, plain)
