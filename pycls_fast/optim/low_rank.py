"""Low-rank adaptation: matrices that change by a product of two narrow ones, which the optimizer owns.

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022, section 4.1. The network keeps its layers,
with the sum as their weight: names, kernels, averages, checkpoints and exports are those of any network.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pycls_fast.optim.groups import Group
from pycls_fast.optim.weights import ModelWeights

# The product is multiplied by this, divided by the rank.
_ALPHA = 16.0


class _Adapted:
    """A weight W (O, ...) = base + scale * up (O, R) x down (R, I), of which only the two factors are trained."""

    def __init__(self, weight: nn.Parameter, rank: int, generator: torch.Generator) -> None:
        self.weight = weight
        self.base = weight.detach().flatten(1).clone()
        outputs, inputs = self.base.shape
        down = torch.empty(rank, inputs).uniform_(-(inputs**-0.5), inputs**-0.5, generator=generator)
        # With zeros on one side training begins with the network as it is.
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
        """What a checkpoint has besides the weight itself, from which the base would not come back to the bit."""
        return {"base": self.base, **self.factors}


class LowRank(ModelWeights):
    """A network some of whose weights are adapted.

    Args:
        model: on its device; the weights to adapt require gradients.
        names: theirs.
        rank: R.
        seed: for the initial values, the same on every rank.
        at_once: gradients are taken as soon as they are there; otherwise ranks exchange them first.
    """

    def __init__(self, model: nn.Module, names: Collection[str], rank: int, *, seed: int, at_once: bool) -> None:
        super().__init__(model)
        generator = torch.Generator().manual_seed(seed)
        self._adapted = {
            name: _Adapted(parameter, rank, generator) for name, parameter in model.named_parameters() if name in names
        }
        for adapted in self._adapted.values() if at_once else ():
            adapted.weight.register_post_accumulate_grad_hook(adapted.take_gradient)

    def groups(self, groups: Sequence[Group]) -> list[Group]:
        """Optimizer groups with the adapted weights replaced by their factors."""
        factors = {id(each.weight): list(each.factors.values()) for each in self._adapted.values()}
        return [{**g, "params": [own for p in g["params"] for own in factors.get(id(p), [p])]} for g in groups]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in super().named_parameters():
            if name in self._adapted:
                for factor, value in self._adapted[name].factors.items():
                    yield f"{name}.{factor}", value
            else:
                yield name, parameter

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
        """The optimizer's state by the names of the network's parameters; with an adapted weight's own values."""
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
