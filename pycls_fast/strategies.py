"""The strategies: how ranks share the work. `docs/running.md` says what each is for, `parallel/wrap.py` does it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from pycls_fast.choice import Section
from pycls_fast.values import PositiveInt

ScheduleName = Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"]
TURNS: Mapping[ScheduleName, int] = {
    "gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "interleaved_zero_bubble": 2, "zbv": 2
}  # fmt: skip
"""How many stages each rank has."""
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


class Parallel(Section):
    """How the ranks share the work."""

    name: Name = "auto"
    """The strategy; auto: hsdp or fsdp if one of its degrees is set, else ddp, or single with one rank."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """The library that ranks communicate with; auto: nccl on CUDA, else gloo."""
    timeout_seconds: PositiveInt = 600
    """How long a rank may make no progress before the run ends."""
    compression: Literal["none", "fp16", "bf16"] = "none"
    """ddp: exchange gradients in 16 bits."""
    reshard_after_forward: bool = True
    """Sharded strategies: gather weights again in the backward pass (ZeRO-3) instead of keeping them (ZeRO-2)."""
    shard_degree: PositiveInt | None = None
    """hsdp: the number of ranks that share one copy of the weights; null: those of a node, or all ranks divided by
    replicate_degree."""
    replicate_degree: PositiveInt | None = None
    """hsdp: the number of such groups; null: all ranks divided by shard_degree."""
    tensor_degree: PositiveInt = 1
    """fsdp and hsdp: the number of neighbouring ranks that compute each block together, on the same images (tensor and
    sequence parallelism); it divides a ViT's heads."""
    expert_degree: PositiveInt = 1
    """fsdp and hsdp: the number of neighbouring ranks among which the experts of a model are divided (expert
    parallelism); they see different images, and each token goes to the ranks that have its experts."""
    pipeline_degree: PositiveInt = 1
    """ddp, fsdp and hsdp: the number of ranks among which the blocks of a ViT are divided (pipeline parallelism); the
    microbatches of optim.accumulation_steps travel from one to the next."""
    pipeline_schedule: ScheduleName = "1f1b"
    """The order in which a stage computes; the last three give each rank two stages."""
    sync_batchnorm: bool = False
    """Compute batch norm's statistics over all ranks."""
    recompute_budget: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.6
    """With speed.recompute=budget: the share of the activations that compiled code keeps."""

    @property
    def facts(self) -> Strategy:
        """Those of its strategy; of "auto", where no degree decides, those of ddp, which that is with several ranks."""
        by_degrees: Name = "fsdp" if self.tensor_degree * self.expert_degree > 1 else "ddp"
        if self.shard_degree is not None or self.replicate_degree is not None:
            by_degrees = "hsdp"
        return STRATEGIES[by_degrees if self.name == "auto" else self.name]

    def strategy(self, ranks: int) -> str:
        """The name of the strategy that so many ranks have, a key of `STRATEGIES`."""
        if self.facts.replicates:
            return "ddp" if ranks > 1 else "single"
        return self.facts.name
