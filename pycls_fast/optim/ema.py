"""Exponential moving average of the weights (Polyak and Juditsky, 1992), kept beside the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from pycls_fast.optim.owned_weights import OwnedWeights, local


class Ema:
    """The average `e <- d e + (1 - d) w` of parameters and floating buffers; integer buffers are copied.

    It follows masters if they are kept, and is float32 even if the weights are in a half format, which would round most
    of its updates away.

    With `warmup` the decay of update t is `min(decay, (1 + t) / (10 + t))`, so that the initial weights are forgotten.

    Args:
        weights: their `live` tensors are read at every update.
        decay: `d`, per optimizer step.
        warmup: raise the decay to its value over the first updates.
        implementation: "loop" or "foreach".
        every: update once in this many steps, with decay `d ** every`, which keeps the average's time span in steps
            (Busbridge et al., How to Scale Your EMA, 2023). Cheaper, and up to `every - 1` steps behind when read.
    """

    def __init__(
        self, weights: OwnedWeights, *, decay: float, warmup: bool, implementation: str, every: int = 1
    ) -> None:
        self.decay = decay
        self.warmup = warmup
        self.implementation = implementation
        self.every = every
        self._owned = weights
        named = weights.live()
        # A shared tensor has several names and one average; swapping it twice would undo the swap.
        first = {id(value): name for name, value in reversed(named.items())}
        self._live = {name: value.detach() for name, value in named.items() if first[id(value)] == name}
        averages = {name: _wide(value).clone() for name, value in self._live.items()}
        self.values: dict[str, Tensor] = {name: averages[first[id(value)]] for name, value in named.items()}
        floating = [name for name, value in self._live.items() if value.is_floating_point()]
        # Each rank of a sharded model averages its own part: nothing is gathered.
        self._averages = [local(self.values[name]) for name in floating]
        self._weights = [local(self._live[name]) for name in floating]
        counts = [name for name in self._live if name not in set(floating)]
        self._copies, self._counts = [self.values[name] for name in counts], [self._live[name] for name in counts]

    def share(self, step: int) -> float:
        """Share of the weights after `step` (from 0) in the new average; 0 if the step is skipped."""
        if (step + 1) % self.every:
            return 0.0
        return 1.0 - (min(self.decay, (1 + step) / (10 + step)) if self.warmup else self.decay) ** self.every

    def update(self, step: int) -> None:
        """Update the average with the weights after optimizer step `step`, counted from 0."""
        share = self.share(step)
        if share:
            self.update_by(share)

    @torch.no_grad()
    def update_by(self, share: float | Tensor) -> None:
        """Update with this share of the weights, positive or in a 0-d tensor: then with the same operations in every
        step, and a share of 0 changes nothing."""
        weights = [_wide(weight) for weight in self._weights]
        if self.implementation != "foreach":
            for average, weight in zip(self._averages, weights, strict=True):
                average.lerp_(weight, share.to(average.dtype) if isinstance(share, Tensor) else share)
        elif isinstance(share, Tensor):
            # Not lerp with a list of shares, which is a kernel for each tensor.
            changes = torch._foreach_sub(weights, self._averages)
            torch._foreach_mul_(changes, share)
            torch._foreach_add_(self._averages, changes)
        else:
            torch._foreach_lerp_(self._averages, weights, share)
        counts = self._counts
        if isinstance(share, Tensor):
            counts = [torch.where(share > 0, count, copy) for count, copy in zip(counts, self._copies, strict=True)]
        if counts:
            torch._foreach_copy_(self._copies, counts)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """A context in which the model computes with the averages; its own weights are restored on exit."""
        averages = self._swap()
        try:
            yield
        finally:
            self._swap()
            for name, average in averages.items():
                self.values[name].copy_(average)

    @torch.no_grad()
    def _swap(self) -> dict[str, Tensor]:
        """Swap weights and averages; returns copies of the averages that the model's format cannot hold."""
        averages = {}
        for name, live in self._live.items():
            kept = live.clone()
            if live.dtype != self.values[name].dtype:
                averages[name] = self.values[name].clone()
            live.copy_(self.values[name])
            self.values[name].copy_(kept)
        self._owned.refresh_model()
        return averages

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Restore the averages in place; a `KeyError` if one is missing."""
        for name, average in self.values.items():
            average.copy_(values[name])


def _wide(value: Tensor) -> Tensor:
    """Convert half formats to float32; anything else is unchanged."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
