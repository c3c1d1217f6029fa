"""Pipeline parallelism: each rank computes some of a network's blocks, and features are sent from rank to rank.

Huang et al., GPipe, 2019; Narayanan et al., PTD-P, 2021, section 2.2 (1F1B and interleaved); Qi et al., Zero Bubble
Pipeline Parallelism, 2024. torch's engine orders the microbatches and sends the features; here are the stages that it
runs, with the same numbers as in one process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pycls_fast.network import Network
from pycls_fast.parallel.world import World
from pycls_fast.strategies import TURNS, ScheduleName

# torch's names.
_SCHEDULES: dict[ScheduleName, str] = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
}
GeneratorStates = Sequence[Sequence[tuple[torch.Generator, Tensor]]]


def stage_ranks(schedule: ScheduleName, ranks: int) -> list[int]:
    """The rank of each stage, counted within the pipeline: ranks take turns, in zbv forwards and then backwards."""
    back = schedule == "zbv"
    return [
        rank for turn in range(TURNS[schedule]) for rank in (reversed(range(ranks)) if back and turn else range(ranks))
    ]


@cache
def partition_blocks(schedule: ScheduleName, ranks: int, costs: tuple[int, ...]) -> list[tuple[int, range]]:
    """Each stage's rank and its blocks, at least one, such that the stage with the most work has as little as possible.

    `costs`: the work before the first block, of each block, and after the last one.
    """
    found, (before, *blocks, after) = stage_ranks(schedule, ranks), costs
    sums = [0, *(before + each for each in accumulate(blocks))]
    sums[-1] += after
    # For the first blocks, by their number: the most work of a stage; the sum of the stages' squared work, which is
    # least if they are alike; and where stages begin.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for _ in found:
        tried: defaultdict[int, list[tuple[int, int, tuple[int, ...]]]] = defaultdict(list)
        for begin, (most, squares, begins) in best.items():
            for end in range(begin + 1, len(sums)):
                work = sums[end] - sums[begin]
                tried[end].append((max(most, work), squares + work**2, (*begins, begin)))
        best = {end: min(ways) for end, ways in tried.items()}
    bounds = [*best[len(sums) - 1][2], len(sums) - 1]
    return [(owner, range(*own)) for owner, own in zip(found, pairwise(bounds), strict=True)]


def orders(schedule: ScheduleName, group: dist.ProcessGroup, microbatches: int) -> Mapping[int, Sequence[Any]]:
    """The actions of each rank in a step by torch's schedules, in order, without exchanges."""
    rank, found = dist.get_rank(group), stage_ranks(schedule, group.size())
    mine = {index: nn.Identity() for index, owner in enumerate(found) if owner == rank}
    order: Mapping[int, Sequence[Any]] = _engine(
        schedule, mine, torch.device("cpu"), group, microbatches
    ).pipeline_order
    return order


def _engine(
    schedule: ScheduleName,
    mine: Mapping[int, nn.Module],
    device: torch.device,
    group: dist.ProcessGroup,
    microbatches: int,
    loss_of: Any = None,
) -> Any:
    """torch's, for this rank's stages by their numbers."""
    # Imports torch's compiler, which takes a second.
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    count = len(stage_ranks(schedule, group.size()))
    stages = [PipelineStage(stage, index, count, device, group=group) for index, stage in mine.items()]
    make: Any = get_schedule_class(_SCHEDULES[schedule])
    # Not scaled: the loss is that of a microbatch's share of the batch.
    return make(stages if TURNS[schedule] > 1 else stages[0], microbatches, loss_fn=loss_of, scale_grads=False)


# The time of each part of a microbatch's passes through a stage; the backward pass takes twice the forward one's.
_SLOTS = {"FORWARD": 1, "FULL_BACKWARD": 2, "BACKWARD_INPUT": 1, "BACKWARD_WEIGHT": 1}


def bubble(orders: Mapping[int, Sequence[Any]], stages: int) -> float:
    """A rank's idle time in a step as a share of its work, without the time of exchanges.

    (p-1)/m with one stage a rank, (p-1)/(v m) interleaved: Narayanan et al., section 2.2.
    """
    # A stage takes its microbatches in order. (torch 2.15 numbers those of 1F1B wrongly.)
    waiting = {
        rank: [(a.computation_type.name, a.stage_index) for a in order if a and a.computation_type.name in _SLOTS]
        for rank, order in orders.items()
    }
    work = sum(_SLOTS[kind] for kind, _ in waiting[0])
    free = dict.fromkeys(orders, 0)
    ends: dict[tuple[str, int], list[int]] = defaultdict(list)
    while any(waiting.values()):
        for rank, actions in waiting.items():
            while actions:
                kind, stage = actions[0]
                direction, neighbour = ("forward", stage - 1) if kind == "FORWARD" else ("backward", stage + 1)
                start = free[rank]
                if kind != "BACKWARD_WEIGHT" and 0 <= neighbour < stages:
                    done, count = ends[direction, neighbour], len(ends[direction, stage])
                    if len(done) <= count:
                        break
                    start = max(start, done[count])
                free[rank] = start + _SLOTS[kind]
                if kind != "BACKWARD_WEIGHT":
                    ends[direction, stage].append(free[rank])
                del actions[0]
    return max(free.values()) / work - 1


class MissingBlock(nn.Module):
    """Stands in for a block that another rank computes."""


class Stage(nn.Module):
    """Neighbouring blocks of a network; the first stage also has what comes before the blocks, the last one what comes
    after them.

    Only these are its submodules; the network keeps all names. When a network with experts is trained, the routers'
    losses are sent with the features, and each stage adds its own.
    """

    def __init__(self, network: Network, units: Sequence[nn.Module], draws_before: int, *, first: bool, last: bool):
        super().__init__()
        self.units = nn.ModuleList(units)
        before, after = network.ends()
        ends = (before if first else []) + (after if last else [])
        self.ends = nn.ModuleList(network.get_submodule(name) for name in ends)
        # In a tuple, so that it does not become a submodule.
        self._network = (network,)
        self._draws_before, self._first, self._last = draws_before, first, last
        self._routes = bool(network.experts())
        self.autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        # For each microbatch the generators, in the states in which one process would begin its forward pass.
        self.generator_states: GeneratorStates = ()

    def forward(
        self, features: Tensor, auxiliary: Tensor | None = None, *, position: int = 0
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Images (first stage) or features (B, N, D) -> features or (last stage) logits (B, K)."""
        (network,) = self._network
        if self.training and self.generator_states:
            # Compiled blocks draw from the device's generator as many numbers as others from the host's.
            for generator, state in self.generator_states[position]:
                generator.set_state(state)
                count, device = features.shape[network.batch_dim], generator.device
                for _ in range(self._draws_before):
                    torch.rand(count, generator=generator, device=device, dtype=torch.float32)
        if features.requires_grad:
            # It is sent, and in the layout batch_second it comes transposed.
            features.register_hook(Tensor.contiguous)
        with self.autocast():
            if self._first:
                features = network.enter(features)
            for unit in self.units:
                features = unit(features)
            features = network.leave(features) if self._last else features
        if not (self._routes and self.training):
            return features
        losses = [auxiliary, network.auxiliary_loss(self.units)]
        # The sum can then have a gradient even if no router's loss does.
        nothing = torch.zeros((), device=features.device, requires_grad=True)
        return features, torch.stack([nothing, *(loss for loss in losses if loss is not None)]).sum()


def split_into_stages(
    network: Network, world: World, schedule: ScheduleName, costs: Sequence[int], *, averages: bool
) -> Pipeline:
    """Leave only this rank's blocks in the network, in place; returns its stages, connected with those of other ranks.

    Args:
        costs: see `partition_blocks`.
        averages: whether ranks with the same blocks average their gradients after a step's backward passes.
    """
    assert world.mesh is not None
    units, draws, classes = network.units(), network.draws(), network.last_layer().out_features
    parts = partition_blocks(schedule, world.pipeline, tuple(costs))
    stages = []
    for index, (owner, own) in enumerate(parts):
        if owner == world.stage:
            modules = [units[place][1] for place in own]
            before = sum(draws[: own.start])
            stages.append(Stage(network, modules, before, first=index == 0, last=index == len(parts) - 1))
    kept = {module for stage in stages for module in (*stage.units, *stage.ends)}
    first, last = network.ends()
    for name in [*first, *last, *(name for name, _ in units)]:
        if network.get_submodule(name) not in kept:
            network.set_submodule(name, MissingBlock())
    replicas = world.mesh.get_group("replicate") if averages and world.data_size > 1 else None
    return Pipeline(stages, world, schedule, classes, replicas)


class Pipeline(nn.Module):
    """The stages of this rank, connected with those of other ranks; evaluation calls it in place of the network.

    `replicas` are the ranks with the same stages and other images, if gradients are to be averaged here.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        world: World,
        schedule: ScheduleName,
        classes: int,
        replicas: dist.ProcessGroup | None,
    ) -> None:
        super().__init__()
        assert world.mesh is not None
        self.stages: Any = nn.ModuleList(stages)
        self.group = world.mesh.get_group("pipeline")
        self._world, self._schedule, self._classes, self._replicas = world, schedule, classes, replicas
        self._owners = stage_ranks(schedule, world.pipeline)
        self._mine = [index for index, owner in enumerate(self._owners) if owner == world.stage]
        self._engines: dict[tuple[torch.Size, int], Any] = {}
        # The current step's, which holds its images.
        self._loss_of: Callable[[Tensor, Tensor | None, int], Tensor] | None = None

    @property
    def takes_images(self) -> bool:
        return 0 in self._mine

    def run(
        self,
        images: Sequence[Tensor],
        loss_of: Callable[[Tensor, Tensor | None, int], Tensor],
        states: GeneratorStates,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> bool:
        """Run the forward and backward passes of all microbatches in the schedule's order.

        Args:
            images: of each microbatch, all of one shape, on every rank.
            loss_of: a microbatch's loss from its logits, the routers' losses and its position; called by the last
                stage.
            states: those of the generators before each forward pass.
            autocast: the context of forward passes.

        Returns:
            whether torch has first run the stages on uninitialised memory, to learn the shapes.
        """
        self._loss_of = loss_of
        for stage in self.stages:
            stage.generator_states, stage.autocast = states, autocast
        is_new = (images[0].shape, len(images)) not in self._engines
        engine = self._engine(images[0].shape, len(images))
        positions = list(range(len(images)))
        engine.step(
            arg_mbs=[(each,) for each in images] if self.takes_images else [()] * len(images),
            kwarg_mbs=[{"position": position} for position in positions],
            target_mbs=[torch.tensor(position) for position in positions],
            return_outputs=False,
        )
        self._loss_of = None
        for stage in self.stages:
            stage.generator_states, stage.autocast = (), nullcontext
            for parameter in stage.parameters():
                # Halved backward passes leave any layout, and fused optimizers read gradients in that of the weights.
                if parameter.grad is not None and parameter.grad.stride() != parameter.stride():
                    parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
        if self._replicas is not None:
            self._average()
        return is_new

    def _engine(self, shape: torch.Size, count: int) -> Any:
        def loss_of(outputs: Tensor | tuple[Tensor, Tensor], position: Tensor) -> Tensor:
            logits, auxiliary = outputs if isinstance(outputs, tuple) else (outputs, None)
            assert self._loss_of is not None
            return self._loss_of(logits, auxiliary, int(position))

        # Each engine has memory for features of one shape.
        if (shape, count) not in self._engines:
            mine = dict(zip(self._mine, self.stages, strict=True))
            self._engines[shape, count] = _engine(self._schedule, mine, self._world.device, self.group, count, loss_of)
        return self._engines[shape, count]

    def _average(self) -> None:
        gradients = [p.grad for stage in self.stages for p in stage.parameters() if p.grad is not None]
        work = [dist.all_reduce(each, group=self._replicas, async_op=True) for each in gradients]
        for each in work:
            if each is not None:
                each.wait()
        if gradients:
            torch._foreach_div_(gradients, dist.get_world_size(self._replicas))

    def from_last(self, values: Tensor) -> Tensor:
        """Broadcast the last stage's values, in place, to all ranks of the pipeline."""
        dist.broadcast(values, group=self.group, group_src=self._owners[-1])
        return values

    def sum(self, value: Tensor) -> Tensor:
        """Add the stages' numbers, in place."""
        dist.all_reduce(value, group=self.group)
        return value

    @torch.no_grad()
    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Logits (B, K) in float64, on every rank of the pipeline; all of them call this with the same images."""
        features = images_BCHW
        logits_BK = torch.empty(len(images_BCHW), self._classes, dtype=torch.float64, device=images_BCHW.device)
        for index, owner in enumerate(self._owners):
            if index > 0 and owner != self._owners[index - 1]:
                features = self._transfer(features, self._owners[index - 1], owner)
            if owner == self._world.stage:
                features = self.stages[self._mine.index(index)](features)
        if self._owners[-1] == self._world.stage:
            logits_BK.copy_(features)
        return self.from_last(logits_BK)

    def _transfer(self, features: Tensor, source: int, target: int) -> Tensor:
        """Send features from one rank of the pipeline to another; returns what this rank received, else `features`."""
        ranks = dist.get_process_group_ranks(self.group)
        host = self._world.host_group
        if self._world.stage == source:
            dist.send_object_list([(features.shape, features.dtype)], dst=ranks[target], group=host)
            dist.send(features.contiguous(), group=self.group, group_dst=target)
        elif self._world.stage == target:
            described: list[Any] = [None]
            dist.recv_object_list(described, src=ranks[source], group=host)
            shape, dtype = described[0]
            features = torch.empty(shape, dtype=dtype, device=features.device)
            dist.recv(features, group=self.group, group_src=source)
        return features
