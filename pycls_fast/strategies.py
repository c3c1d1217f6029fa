"""The catalogue of strategies: how ranks share the work, with the card of each (`tools/switch_cards.py` writes them).

The implementations are in `parallel.wrap.IMPLEMENTATIONS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Strategy:
    """One value of `parallel.name`; the texts are full sentences that end with a full stop.

    Attributes:
        shards: what the ranks divide among themselves: "nothing", the optimizer's "state" (each parameter has one
            owner), or the "weights" with their gradients and state.
        flattens: weights lose their shapes.
        replicates: torch's DDP exchanges the gradients, with its compression and its static graph.
        has_groups: ranks are in groups (`parallel.shard_degree`, `parallel.replicate_degree`).
        freezes: a part of the network may be frozen (`optim.trainable`).
        needs_cuda: it does not run on a CPU.
        numerics: how closely it must match `single`, like a switch its reference; "reference" for `single`.
        note: what it does.
        holds: what a rank holds of weights, gradients and optimizer state.
        mathematics: what changes in the numbers, exactly.
        helps: when it is faster or smaller, with the figures measured so far and where.
        hurts: when it costs something, and what it cannot be combined with.
        source: the paper, documentation or code that it comes from.
        ran: where it has been run, and where not.
    """

    name: str
    numerics: Literal["reference", "rounding"]
    note: str
    holds: str
    mathematics: str
    helps: str
    hurts: str
    source: str
    ran: str
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
    Strategy(
        name="single",
        numerics="reference",
        note="One process.",
        holds="Everything.",
        mathematics="The reference.",
        helps="One device.",
        hurts="Nothing known.",
        source="Ours.",
        ran="CPU (torch 2.11 and 2.15). CUDA: not run.",
    ),
    Strategy(
        name="ddp",
        numerics="rounding",
        note="Every rank holds the whole model and gets its part of the batch; gradients are averaged over the ranks "
        "during the backward pass.",
        holds="Everything.",
        mathematics="None: the average is summed in a different order. Batch norm takes its statistics from a rank's "
        "own images, unless parallel.sync_batchnorm=true; mixing and drop-path are drawn for each rank. "
        "parallel.compression does change the numbers: fp16 (only with a scaled loss) and bf16 round the gradients for "
        "the exchange, powersgd sends low-rank matrices; accuracy must be measured.",
        helps="Models that fit on one device: only gradients are exchanged.",
        hurts="Memory does not shrink with the number of ranks (4,866 MB of ViT-L with AdamW in float32, on each).",
        source="Li et al., PyTorch Distributed, VLDB 2020, arXiv 2006.15704; Vogels et al., PowerSGD, 2019, arXiv "
        "1905.13727.",
        ran="CPU with gloo (torch 2.15), 2 and 4 ranks: the weights change over 10 steps as in one process, within "
        "1e-5 of the change in float32. CUDA: not run.",
        replicates=True,
    ),
    Strategy(
        name="fsdp",
        numerics="rounding",
        note="torch's fully_shard, block by block: weights are gathered when a block computes, and (all but "
        "the last block's) gathered again for the backward pass (ZeRO-3) or, with "
        "parallel.reshard_after_forward=false, kept until then (ZeRO-2).",
        holds="Its share of weights, gradients, optimizer state and average; gathered, one block and the next at a "
        "time (ZeRO-3) or all weights (ZeRO-2).",
        mathematics="None: gradients are summed in a different order, after every microbatch, in float32. Under "
        "autocast what it would cast is gathered in its format, with the same rounding; norms, scales, tokens and "
        "positions travel in float32.",
        helps="Models that do not fit on one device. ViT-L with AdamW in float32, four ranks: 1,217 MB of weights, "
        "gradients and optimizer state a rank instead of ddp's 4,866, and 1,442 MB at the peak of a step instead of "
        "4,922.",
        hurts="Weights (all but the last block's) travel twice a step (ZeRO-3), and gradients after every "
        "microbatch. Optimizers: adamw, sgd, lamb and lion.",
        source="Rajbhandari et al., ZeRO, SC 2020, arXiv 1910.02054; Zhao et al., PyTorch FSDP, 2023, arXiv "
        "2304.11277; torch.distributed.fsdp.fully_shard.",
        ran="CPU with gloo (torch 2.15), 2 and 4 ranks: the weights change over 10 steps as in one process, within "
        "1e-5 of the change in float32. CUDA: not run.",
        shards="weights",
    ),
    Strategy(
        name="hsdp",
        numerics="rounding",
        note="fsdp within groups of parallel.shard_degree ranks (left out: those of a node), which "
        "parallel.replicate_degree groups repeat.",
        holds="Its group's share of what fsdp shards.",
        mathematics="None: as fsdp; the groups add up their gradients once a step.",
        helps="Several nodes with slow links between them: weights are gathered only within a group. ViT-L with AdamW "
        "in float32, 2 x 2 ranks: 2,433 MB a rank, ddp 4,866, fsdp 1,217.",
        hurts="As fsdp, and more memory.",
        source="Zhao et al., PyTorch FSDP, 2023, arXiv 2304.11277 (hybrid sharding).",
        ran="CPU with gloo (torch 2.15), 2 x 2 ranks: the weights change over 10 steps as in one process, within 1e-5 "
        "of the change in float32. CUDA: not run.",
        shards="weights",
        has_groups=True,
    ),
    Strategy(
        name="fairscale_fsdp",
        numerics="rounding",
        note="FairScale's FullyShardedDataParallel (0.4.13, its last release): a flat parameter for each block and "
        "optimizer group; for runs that come from it.",
        holds="As fsdp.",
        mathematics="None: gradients are summed in a different order.",
        helps="Runs that come from FairScale; fsdp does the same.",
        hurts="CUDA only. Optimizers: sgd, adamw and lion. Not with precision=fp8, fp16 or bf16.",
        source="FairScale, facebookresearch/fairscale; Rajbhandari et al., ZeRO, SC 2020, arXiv 1910.02054.",
        ran="CPU with gloo (torch 2.15), with stand-ins for CUDA's streams that only the tests have: the weights "
        "change over 10 steps as in one process, within 1e-5 of the change in float32. CUDA: not run.",
        shards="weights",
        needs_cuda=True,
        flattens=True,
        freezes=False,
    ),
    Strategy(
        name="fairscale_sharded_ddp",
        numerics="rounding",
        note="FairScale's OSS and ShardedDataParallel (ZeRO-2): each parameter has an owner, to which its gradient is "
        "reduced and which is the only rank to update it; for runs that come from it.",
        holds="All weights; optimizer state of the parameters that it owns, and their gradients; with "
        "optim.accumulation_steps above 1 all gradients.",
        mathematics="None: gradients are summed in a different order.",
        helps="Runs that come from FairScale; fsdp with parallel.reshard_after_forward=false shards the weights, too.",
        hurts="One message per parameter: FairScale's gradient buckets are off, because with them training is silently "
        "wrong once gradients are set to None. Only float32 weights; any optimizer except adamw8bit.",
        source="FairScale, facebookresearch/fairscale; Rajbhandari et al., ZeRO, SC 2020, arXiv 1910.02054.",
        ran="CPU with gloo (torch 2.15), 2 and 4 ranks: the weights change over 10 steps as in one process, within "
        "1e-5 of the change in float32. CUDA: not run.",
        shards="state",
        freezes=False,
    ),
)
STRATEGIES: Mapping[str, Strategy] = {strategy.name: strategy for strategy in _STRATEGIES}


def strategy_of(name: str) -> Strategy:
    """The strategy of a value of `parallel.name`; for "auto" it is ddp, which that is with several ranks."""
    return STRATEGIES["ddp" if name == "auto" else name]
