"""The strategies: how ranks share the work. `docs/running.md` says what each is for, `parallel/wrap.py` does it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

ScheduleName = Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"]
HALVING: tuple[ScheduleName, ...] = ("interleaved_zero_bubble", "zbv")
"""Those that halve backward passes: first gradients of inputs, later those of weights."""
Name = Literal["auto", "single", "ddp", "fsdp", "hsdp", "fairscale_fsdp", "fairscale_sharded_ddp"]


@dataclass(frozen=True)
class Strategy:
    """The facts of one value of `parallel.name`.

    Attributes:
        shards: what the ranks divide among themselves: "nothing", the optimizer's "state" (each parameter has one
            owner), or the "weights" with their gradients and state.
        flattens: weights lose their shapes.
        replicates: torch's DDP exchanges the gradients, with its compression.
        has_groups: ranks are in groups (`parallel.shard_degree`, `parallel.replicate_degree`).
        freezes: a part of the network may be frozen (`optim.trainable`).
        needs_cuda: it does not run on a CPU.
    """

    name: Name
    shards: Literal["nothing", "state", "weights"] = "nothing"
    flattens: bool = False
    replicates: bool = False
    has_groups: bool = False
    freezes: bool = True
    needs_cuda: bool = False

    @property
    def shards_weights(self) -> bool:
        """Whether a rank holds only a part of the weights; such a network is built on the meta device."""
        return self.shards == "weights"

    @property
    def has_dtensors(self) -> bool:
        """Whether weights are torch's DTensors, gathered unit by unit."""
        return self.shards_weights and not self.flattens

    @property
    def has_mesh(self) -> bool:
        """Whether it needs a process group and a mesh of ranks even for one rank."""
        return self.shards != "nothing"


_STRATEGIES = (
    Strategy("single"),
    Strategy("ddp", replicates=True),
    Strategy("fsdp", shards="weights"),
    Strategy("hsdp", shards="weights", has_groups=True),
    Strategy("fairscale_fsdp", shards="weights", flattens=True, freezes=False, needs_cuda=True),
    Strategy("fairscale_sharded_ddp", shards="state", freezes=False),
)
STRATEGIES: Mapping[str, Strategy] = {strategy.name: strategy for strategy in _STRATEGIES}


def strategy_of(name: str) -> Strategy:
    """The strategy of a value of `parallel.name`; for "auto" it is ddp, which that is with several ranks."""
    return STRATEGIES["ddp" if name == "auto" else name]
