"""The catalogue of optimizers: what switches, strategies and tables need to know of each.

The optimizers themselves are the functions of `optim/optimizers.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Optimizer:
    """The properties of one optimizer (`optim.name`).

    Attributes:
        implementations: the values of `speed.optimizer` that it has, the plain one first.
        state_copies: from its own keys (`_Optim.own`) to the size of its state, in float32 copies of the weights.
        compilable: the implementations that can be compiled; none if it compiles itself.
        shardable: the implementations that update sharded weights; none if it needs whole matrices.
        elementwise: it computes the same on flattened weights and on a rank's part of each, element by element.
        capturable: the implementations that read the learning rate on the device, as a CUDA graph requires.
        needs_units: it treats hidden matrices differently (`parameter_groups`, `split_hidden`).
        trust_ratio: its steps are in proportion to the weights, so that weights of zero hardly change.
        sends_state: its state can be sent from rank to rank.
        state_keys: its own keys that the shapes of its state depend on; a run cannot change them when it resumes.
    """

    implementations: tuple[str, ...]
    state_copies: Callable[[Mapping[str, Any]], float]
    compilable: tuple[str, ...] = ()
    shardable: tuple[str, ...] = ()
    elementwise: bool = False
    capturable: tuple[str, ...] = ()
    needs_units: bool = False
    trust_ratio: bool = False
    sends_state: bool = True
    state_keys: tuple[str, ...] = ()

    @property
    def compiles_itself(self) -> bool:
        """Whether its step cannot be compiled because it compiles its own parts, which needs a compiler."""
        return not self.compilable


OPTIMIZERS: Mapping[str, Optimizer] = {
    "adamw": Optimizer(
        implementations=("loop", "foreach", "fused"),
        state_copies=lambda _: 2.0,
        compilable=("loop", "foreach"),
        shardable=("loop", "foreach", "fused"),
        elementwise=True,
        capturable=("fused",),
    ),
    "sgd": Optimizer(
        implementations=("loop", "foreach", "fused"),
        state_copies=lambda own: 1.0 if own["momentum"] else 0.0,
        compilable=("loop", "foreach"),
        shardable=("loop", "foreach", "fused"),
        elementwise=True,
        capturable=("fused",),
    ),
    "lamb": Optimizer(
        implementations=("loop", "foreach"),
        state_copies=lambda _: 2.0,
        compilable=("loop", "foreach"),
        shardable=("loop", "foreach"),
        trust_ratio=True,
    ),
    "lion": Optimizer(
        implementations=("loop", "foreach"),
        state_copies=lambda _: 1.0,
        compilable=("loop",),
        shardable=("loop", "foreach"),
        elementwise=True,
    ),
    "adafactor": Optimizer(
        implementations=("loop",),
        # The rows and columns of its second moments are next to nothing.
        state_copies=lambda own: 0.5 if own["momentum_dtype"] == "bfloat16" else 1.0,
        compilable=("loop",),
        state_keys=("min_factored",),
    ),
    "muon": Optimizer(
        implementations=("loop",),
        # Two for the parameters that it leaves to AdamW.
        state_copies=lambda _: 1.0,
        compilable=("loop",),
        needs_units=True,
    ),
    "adamw8bit": Optimizer(
        implementations=("loop",),
        state_copies=lambda _: 0.5,
        # torchao compiles each update itself, and has no DTensors of its 8-bit state.
        sends_state=False,
    ),
}


def optimizers_with(fact: Callable[[Optimizer], object]) -> str:
    """The names of the optimizers that have a property, for a message: "adamw, sgd or lion"."""
    *others, last = (name for name, optimizer in OPTIMIZERS.items() if fact(optimizer))
    return f"{', '.join(others)} or {last}" if others else last
