"""All layouts of a run on a cluster, each with the memory and the time that it would take.

Networks run on fake tensors only, once for each way of recomputing, with two numbers of images; the rest is arithmetic.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from pycls_fast.config.conflicts import Purpose, problems
from pycls_fast.config.run import RunConfig
from pycls_fast.errors import refuse, refusing
from pycls_fast.parallel.ddp import bucket_megabytes
from pycls_fast.parallel.pipeline import bubble, stage_ranks
from pycls_fast.plan.activations import Activations
from pycls_fast.plan.cluster import Cluster, Kernels
from pycls_fast.plan.layout import UNDIVIDED, Layout
from pycls_fast.plan.memory_plan import USABLE, MemoryPlan
from pycls_fast.plan.operators import EXCHANGES, CountWork
from pycls_fast.plan.peak import Peak
from pycls_fast.strategies import ScheduleName

# Images of the two measurements.
_FEW, _MANY = 8, 64
# The share of the arithmetic behind which an exchange hides: the rest is lost to kernels that share the device's memory
# with it. An assumption; not fitted.
_OVERLAP = 0.92
_DEGREES = (1, 2, 4, 8)
# The most microbatches for each stage of a pipeline: with as many, stages hardly wait.
_MOST = 8
_RECOMPUTE = ("off", "selective", "full")
# gpipe takes as long as 1f1b, with more memory; of the two that halve backward passes, zbv needs less of both.
_SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "interleaved_1f1b", "zbv")


@dataclass(frozen=True)
class Outcome:
    """What a layout needs and takes.

    Attributes:
        peak: bytes of the fullest rank; `state`: bytes of weights, gradients, optimizer state and average.
        compute, update, exchange: seconds of a step: kernels of the passes, the optimizer, exchanges that are not
            hidden.
        bubble: seconds in which a stage waits for others.
        step: their sum, with the jitter of many nodes, or longer if images come later.
        images: those of a step, on all ranks.
        flops: those of a step on all ranks, without recomputation; peak_flops: the most of all ranks in a second.
        loader: images/s that the hosts' cores prepare; None if nothing is decoded.
    """

    layout: Layout
    peak: Peak
    state: float
    compute: float
    update: float
    exchange: float
    bubble: float
    step: float
    images: int
    flops: float
    peak_flops: float
    loader: float | None
    fits: bool
    compiled: bool

    @property
    def memory(self) -> float:
        """Peak bytes of a rank."""
        return self.peak.total

    @property
    def busy(self) -> float:
        """Seconds of a step in which a rank does not wait for images."""
        return self.compute + self.update + self.exchange + self.bubble

    @property
    def images_per_second(self) -> float:
        """The speed of all ranks together."""
        return self.images / self.step

    @property
    def share_of_peak(self) -> float:
        """The share of the devices' arithmetic that is used."""
        return self.flops / self.step / self.peak_flops

    def loses_by(self, best: Outcome) -> str:
        """Why this is not the best layout."""
        if not self.fits:
            return "does not fit"
        if self.step <= best.step:
            # Both wait for images.
            return ""
        kernels = "smaller kernels"
        if self.layout.recompute != best.layout.recompute:
            kernels = "recomputation"
        elif self.layout.precision != best.layout.precision:
            kernels = "precision"
        elif self.compiled != best.compiled:
            kernels = "eager code"
        costs = {
            kernels: self.compute - best.compute,
            "exchange": self.exchange - best.exchange,
            "bubble": self.bubble - best.bubble,
            "optimizer": self.update - best.update,
        }
        most = max(costs, key=lambda name: costs[name])
        return f"{most} +{costs[most] / best.step:.1%}" if costs[most] > 1e-4 * best.step else ""


def _mean_pixels(config: RunConfig) -> float:
    """The mean over the epochs of the pixels of an image."""
    sizes, epochs = config.data.training_image_sizes, range(max(config.schedule.epochs, 1))
    return sum(math.prod(sizes[max(begin for begin in sizes if begin <= epoch)]) for epoch in epochs) / len(epochs)


class _Passes(NamedTuple):
    """A microbatch's passes."""

    activations: Activations
    tables: tuple[Kernels, ...]
    """Kernels of the blocks, forwards and backwards, and of everything around them, forwards and backwards."""
    exchanges: list[list[tuple[str, float]]]
    """The collectives of each block in both passes, with their bytes; the last entry is of what is around them."""

    @classmethod
    def of(cls, found: Activations) -> _Passes:
        """With the number of images that was measured."""
        forward = [work for block in found.blocks for work in block.kernels.forward]
        backward = [work for block in found.blocks for work in block.kernels.backward]
        lists = (forward, backward, *found.around)
        tables = tuple(Kernels.of([work for work in works if work.kind not in EXCHANGES]) for works in lists)
        each = [(*kernels.forward, *kernels.backward) for kernels in (*(b.kernels for b in found.blocks), found.around)]
        exchanges = [[(work.kind, work.bytes) for work in works if work.kind in EXCHANGES] for works in each]
        return cls(found, tables, exchanges)

    def between(self, other: _Passes, share: float) -> _Passes:
        """Interpolated to another number of images; share 0 is these, 1 the other ones."""
        tables = (few.between(many, share) for few, many in zip(self.tables, other.tables, strict=True))
        exchanges = [
            [(kind, few + share * (many - few)) for (kind, few), (_, many) in zip(*block, strict=True)]
            for block in zip(self.exchanges, other.exchanges, strict=True)
        ]
        return _Passes(self.activations.between(other.activations, share), tuple(tables), exchanges)


class Search:
    """The layouts of a configuration on a cluster.

    Args:
        config: with a global batch; the layout's own settings are replaced.
        classes: outputs, if `model.num_classes` does not say.
        precisions: to be tried; without any the configuration's own.
    """

    def __init__(
        self, config: RunConfig, cluster: Cluster, classes: int = 1000, precisions: Sequence[str] = ()
    ) -> None:
        self.config, self.cluster, self.classes = config.with_values(parallel=UNDIVIDED), cluster, classes
        self.device = torch.device(cluster.accelerator.device)
        self.batch = config.data.global_batch_size
        self.image_size = config.data.largest_image_size
        self.pixels = _mean_pixels(config) / math.prod(self.image_size)
        # `auto` begins with autocast on a GPU.
        automatic = "amp_bf16" if self.device.type == "cuda" else "fp32"
        self.precision = automatic if config.precision.name == "auto" else config.precision.name
        self.precisions = [automatic if name == "auto" else name for name in precisions] or [self.precision]
        # Problems that the configuration has already, such as missing data, do not refuse a layout.
        self._lacks = set(problems(self.config, Purpose()))
        for name in self.precisions:
            refuse(f"{key}: {text}" for key, text in self._refused(precision={"name": name}))
        self._measured: dict[tuple[object, ...], _Passes] = {}
        self._plans: dict[Layout, MemoryPlan] = {}
        self.one = self._plan(Layout(precision=self.precision))

    def _refused(self, **values: Any) -> set[tuple[str, str]]:
        """What these values add to the configuration's problems."""
        return set(problems(self.config.with_values(**values), Purpose())) - self._lacks

    def layouts(self) -> Iterator[Layout]:
        """All layouts that the configuration and the code allow, whether they fit or not."""
        blocks = self._measure(Layout(precision=self.precision), _FEW).activations.blocks
        for degrees in self._degrees():
            ways = _RECOMPUTE if blocks else _RECOMPUTE[:1]
            for parts, recompute, precision in product(self._plan(degrees).microbatch_counts(), ways, self.precisions):
                if degrees.pipeline > 1 and parts > _MOST * degrees.pipeline:
                    continue
                layout = replace(degrees, accumulation=parts, recompute=recompute, precision=precision)
                if not self._refused(**layout.values):
                    yield layout

    def _degrees(self) -> Iterator[Layout]:
        """How ranks can be divided, with as many microbatches as stages."""
        ranks, per_node, model = self.cluster.ranks, self.cluster.per_node, self.config.model
        heads, experts = getattr(model, "heads", 1), getattr(model, "experts", 0)
        stages: list[tuple[int, ScheduleName]] = [(1, "1f1b"), *product(_DEGREES[1:], _SCHEDULES)]
        for tensor, (pipeline, schedule), expert in product(_DEGREES, stages, _DEGREES):
            together = tensor * pipeline
            if ranks % together or heads % tensor or tensor > per_node:
                continue
            data = ranks // together
            shards = {1, data, max(per_node // tensor, 1)} if self.config.optim.shardable else {1}
            if tensor > 1:
                # Then FSDP makes the copies, and shards them.
                shards -= {1} - {data}
            for shard in sorted(shard for shard in shards if data % shard == 0):
                if self.batch % (data * pipeline) or (
                    expert > 1 and (shard % expert or experts % expert or not experts)
                ):
                    continue
                yield Layout(
                    data // shard, shard, tensor, expert, pipeline, schedule,
                    accumulation=pipeline, precision=self.precision,
                )  # fmt: skip

    def _plan(self, layout: Layout) -> MemoryPlan:
        if layout not in self._plans:
            config, ranks = self.config.with_values(**layout.values), layout.data * layout.tensor * layout.pipeline
            self._plans[layout] = MemoryPlan.imagined(config, self.device, ranks, self.classes)
        return self._plans[layout]

    def _measure(self, layout: Layout, images: int) -> _Passes:
        """A microbatch's passes on fake tensors."""
        key = (layout.recompute, layout.precision, layout.tensor, layout.expert, images)
        if key not in self._measured:
            # A rank whose gradients exist already needs less, but at most by the gradients of one block.
            with refusing("model: plan cannot measure this network without running it", RuntimeError, TypeError):
                found = self._plan(layout).activations(images, self.image_size, gradients_exist=False)
            self._measured[key] = _Passes.of(found)
        return self._measured[key]

    def _passes(self, layout: Layout, images: int) -> _Passes:
        """A microbatch's passes with any number of images."""
        few, many = self._measure(layout, _FEW), self._measure(layout, _MANY)
        tables = zip(few.tables, many.tables, strict=True)
        if all(np.array_equal(one.kinds, other.kinds) for one, other in tables):
            return few.between(many, (images - _FEW) / (_MANY - _FEW))
        # Code that chooses by the size of tensors (compression, a CPU's convolutions): nothing is affine in the images.
        return self._measure(layout, images)

    @cached_property
    def _update(self) -> float:
        """Bytes that the optimizer, clipping and the average move for each byte of a float32 parameter."""
        optim, side = self.config.optim, 64
        # Compiled code reads and writes weights and state once, and reads gradients: it cannot be counted.
        moved = 3.0 + 2.0 * optim.state_copies
        if not optim.compiles_itself:
            parameter = nn.Parameter(torch.zeros(side, side))
            optimizer = optim.build([{"params": [parameter], "hidden": True}], self.one.switches.optimizer)
            for _ in range(2):
                # The first step allocates the state.
                parameter.grad = torch.ones_like(parameter)
                with CountWork() as found:
                    optimizer.step()
            moved = sum(work.bytes for work in found.found if work.bytes >= 4 * side * side) / parameter.nbytes
        return moved + 3.0 * (optim.ema_decay is not None) + (optim.clip_norm is not None)

    def outcome(self, layout: Layout) -> Outcome:
        """What a layout needs and takes."""
        cluster, device, plan = self.cluster, self.cluster.accelerator, self._plan(layout)
        if layout.precision == "fp32":
            device = device.without_tf32
        images, parts = self.batch // (layout.data * layout.accumulation), layout.accumulation
        microbatch = self._passes(layout, images)
        compiled = plan.switches.compile != "off"
        # Ranks of a CPU compute and exchange with one core each, or share it.
        slowdown = max(min(cluster.ranks, cluster.per_node) / cluster.cores, 1.0) if device.device == "cpu" else 1.0
        forward, backward, *ends = (
            slowdown * device.seconds(table, compiled=compiled, divided=layout.tensor > 1 and at < 2)
            for at, table in enumerate(microbatch.tables)
        )
        share = 1.0
        if layout.pipeline > 1:
            costs = plan.costs[1:-1]
            stages = plan.stages(len(costs))
            share = max(sum(costs[index] for own in rank.values() for index in own) for rank in stages) / sum(costs)
        forward, backward = (self.pixels * share * seconds for seconds in (forward, backward))
        compute = parts * (forward + backward + self.pixels * sum(ends))
        waits = 0.0
        if layout.pipeline > 1:
            waits = compute * bubble(plan.order(parts), len(stage_ranks(layout.schedule, layout.pipeline)))
        owned = max(4.0 * sizes.trained for sizes in plan.sizes) / layout.shard
        update = slowdown * owned * self._update / (device.bandwidth * device.efficiency.get("pass", 1.0))
        exchange = slowdown * self.exchange_seconds(layout, images, forward, backward)
        step = (compute + waits + update + exchange) / cluster.efficiency
        loader = None
        if self.config.data.has_photographs:
            # A GPU has its part of a node's cores; ranks of a CPU have all, of which each computes with one.
            cores, busy = cluster.cores * cluster.ranks / cluster.per_node, 0.0
            if device.device == "cpu":
                cores = cluster.cores * cluster.nodes
                busy = min(cluster.ranks / cores, 1.0)
            loader = cores * cluster.images_per_core
            step = max(step, busy * step + self.batch / loader)
        peak = plan.peak_with(microbatch.activations, parts)
        itemsize = 4 if layout.precision in ("fp32", "tf32") else 2
        plain = self._measure(Layout(precision=layout.precision), _FEW)
        flops = self.pixels * sum(table.flops for table in plain.tables) / _FEW * self.batch
        return Outcome(
            layout=layout,
            peak=peak,
            state=plan.state(parts),
            compute=compute,
            update=update,
            exchange=exchange,
            bubble=waits,
            step=step,
            images=self.batch,
            flops=flops,
            peak_flops=device.flops[itemsize] * cluster.ranks,
            loader=loader,
            fits=peak.total <= USABLE * device.memory,
            compiled=compiled,
        )

    def exchanged_bytes(self, layout: Layout) -> dict[str, float]:
        """Bytes that the first rank exchanges in a step, whole ones, by the collective's name."""
        images = self.batch // (layout.data * layout.accumulation)
        found = defaultdict(float, self._weights(layout) if layout.data > 1 else {})
        for kind, size in self._features(layout, images):
            found[kind] += (layout.sums if kind == "all_reduce" else layout.accumulation) * size
        return dict(found)

    def _weights(self, layout: Layout) -> dict[str, float]:
        """Bytes of weights and gradients among them; of a rank that shares neither, those that FSDP copies."""
        plan, parts = self._plan(layout), layout.accumulation
        copies, blocks = plan.copies(parts), self._measure(layout, _FEW).activations.blocks
        before, units, after = plan.unit_sizes
        ends = [before, after] if layout.pipeline == 1 or layout.schedule == "zbv" else [before]
        # A rank's experts: `units` have all of them.
        experts = [
            (unit.parameters - block.parameters) // max(layout.expert - 1, 1)
            for unit, block in zip(units, blocks, strict=True)
        ]
        found: dict[str, float] = {}
        if layout.shard > 1 or layout.tensor > 1:
            # The last block of a stage, and what surrounds blocks, stay from the forward to the backward pass.
            once, again, gradients = sum(end.parameters for end in ends), 0, sum(end.trained for end in ends)
            for own in plan.stages(len(blocks))[0].values():
                for index in own:
                    rest = blocks[index].parameters - experts[index]
                    apart = experts[index] * (layout.shard > layout.expert)
                    once += rest + apart
                    again += (rest * (index != own[-1]) + apart) * copies.reshard_after_forward
                    gradients += blocks[index].trained - experts[index] + apart
            gathers = parts * (once + again)
            if layout.pipeline > 1:
                # Gathered blocks stay from backward pass to backward pass, and a forward pass between them frees them.
                gathers = once + parts * again
            found["all_gather"] = float(copies.compute_bytes * gathers)
            found["reduce_scatter"] = 4.0 * gradients * layout.sums
        if layout.replicate > 1:
            narrow = self.config.parallel.compression != "none"
            itemsize = 2 if narrow else copies.compute_bytes if copies.has_buckets else 4
            found["all_reduce"] = itemsize * plan.sizes[0].trained / layout.shard
        return found

    def _features(self, layout: Layout, images: int) -> list[tuple[str, float]]:
        """A microbatch's other exchanges of the first rank: those within blocks, and between stages."""
        microbatch = self._passes(layout, images)
        blocks = microbatch.activations.blocks
        stages, count = self._plan(layout).stages(len(blocks))[0], len(stage_ranks(layout.schedule, layout.pipeline))
        # Each stage also has those around the blocks: it divides features and puts them together.
        found = [each for own in stages.values() for index in (*own, -1) for each in microbatch.exchanges[index]]
        # Features to the stage after, gradients to the one before.
        found += [
            ("send", float(blocks[0].output * layout.tensor))
            for index in stages
            for end in (0, count - 1)
            if index != end
        ]
        return found

    def exchange_seconds(self, layout: Layout, images: int, forward: float, backward: float) -> float:
        """Seconds of exchanges that no arithmetic hides, of a step.

        Args:
            images: of a microbatch.
            forward, backward: seconds of its passes through the blocks of a rank.
        """
        cluster, parts, near = self.cluster, layout.accumulation, layout.tensor
        # On a CPU exchanges take the cores themselves.
        overlap = 0.0 if self.device.type == "cpu" else _OVERLAP
        found, blocks = self._weights(layout), self._measure(layout, _FEW).activations.blocks
        count, exposed = max(len(blocks) // layout.pipeline, 1), 0.0
        # Both gathered weights and gradients to be reduced are copied once, gradients of a rank alone twice.
        copies = 2.0 / (cluster.accelerator.bandwidth * cluster.accelerator.efficiency.get("pass", 1.0))
        if layout.shard > 1 or layout.tensor > 1:
            # One block's at a time, behind the block before it; the first gather and the last exchange are waited for.
            passes = 2 if self._plan(layout).copies(parts).reshard_after_forward else 1
            gather, scatter = (
                cluster.gather(size, layout.shard, apart=near) + copies * size
                for size in (found["all_gather"] / parts / passes / count, found["reduce_scatter"] / parts / count)
            )
            scatter += copies * found["reduce_scatter"] / parts / count * (layout.shard == 1)
            reduce = 0.0
            if layout.replicate > 1:
                reduce = cluster.reduce(found["all_reduce"] / count, layout.replicate, apart=near * layout.shard)
            for part in range(parts):
                # Replicas exchange in the last microbatch.
                sums = scatter + reduce * (part == parts - 1)
                behind = gather * (passes - 1) + sums
                hidden = max(0.0, gather - overlap * forward / count) + max(0.0, behind - overlap * backward / count)
                exposed += gather + sums + (count - 1) * hidden
        elif layout.replicate > 1:
            # In buckets, of which the last one of a step is never hidden.
            buckets = math.ceil(found["all_reduce"] / 2**20 / bucket_megabytes(found["all_reduce"]))
            size = found["all_reduce"] / buckets
            last = cluster.reduce(size, layout.replicate, apart=near) + copies * size
            # A pipeline averages gradients when all are there.
            exposed += buckets * last if layout.pipeline > 1 else max(last, buckets * last - overlap * backward)
        # Tokens travel to their experts where those are divided.
        features, travels = Counter(self._features(layout, images)), Counter[tuple[str, float]]()
        if layout.expert > 1:
            travels = features - Counter(self._features(replace(layout, expert=1), images))
        for (kind, size), count in travels.items():
            # An all-to-all, for which gloo gathers.
            local = size / layout.expert if kind == "all_gather" else size
            exposed += parts * count * cluster.gather(local, layout.expert, apart=near)
        for kind, size in (features - travels).elements():
            if kind == "send":
                exposed += parts * cluster.send(size, apart=cluster.ranks // layout.pipeline)
            elif kind == "all_reduce":
                exposed += layout.sums * cluster.reduce(size, near)
            else:
                # Korthikanti et al., 2022, section 4.2.2: four gathers and four reductions of a block's features.
                exposed += parts * cluster.gather(size, near)
        return exposed

    def outcomes(self) -> list[Outcome]:
        """All layouts: those that fit first, then the fastest, then (if several wait for images) the least busy."""
        found = [self.outcome(layout) for layout in self.layouts()]
        return sorted(found, key=lambda each: (not each.fits, each.step, each.busy))
