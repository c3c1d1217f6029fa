"""All layouts of a run on a cluster, each with the memory and the time that it would take.

Networks run on fake tensors only, once for each way of recomputing, with two numbers of images; the rest is arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import torch
from torch import nn

from pycls_fast.config.conflicts import Purpose, problems
from pycls_fast.config.run import RunConfig
from pycls_fast.errors import UserError
from pycls_fast.plan.activations import Activations
from pycls_fast.plan.cluster import Cluster
from pycls_fast.plan.memory import peak, state
from pycls_fast.plan.memory_plan import USABLE, MemoryPlan
from pycls_fast.plan.time import Kernels
from pycls_fast.plan.work import CountWork
from pycls_fast.values import AUTO

# Images of the two measurements.
_FEW, _MANY = 8, 64
# Of the arithmetic behind which an exchange hides: the rest is lost to kernels that share the device's memory with it.
_OVERLAP = 0.92
# DDP's default; the last one of a step is never hidden.
_BUCKET = 25 * 2**20


@dataclass(frozen=True)
class Layout:
    """How ranks share a step: replicate x shard x tensor of them, in this order from far to near."""

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    accumulation: int = 1
    recompute: str = "off"
    precision: str = "amp_bf16"

    @property
    def data(self) -> int:
        """Ranks with different images."""
        return self.replicate * self.shard

    @property
    def values(self) -> dict[str, dict[str, object]]:
        """The settings of the run."""
        parallel: dict[str, object] = {"name": "auto"}
        if self.shard > 1 or self.tensor > 1:
            parallel = {"name": "fsdp"}
            if self.replicate > 1:
                parallel = {"name": "hsdp", "shard_degree": self.shard, "replicate_degree": self.replicate}
        if self.tensor > 1:
            parallel["tensor_degree"] = self.tensor
        return {
            "parallel": parallel,
            "optim": {"accumulation_steps": self.accumulation},
            "speed": {"recompute": self.recompute},
            "precision": {"name": self.precision},
        }

    @property
    def overrides(self) -> list[str]:
        """The same as a command line has them."""
        return [
            f"{group}={value}" if key == "name" else f"{group}.{key}={value}"
            for group, values in self.values.items()
            for key, value in values.items()
        ]

    def __str__(self) -> str:
        degrees = {name: getattr(self, name) for name in ("replicate", "shard", "tensor")}
        return " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "one rank"


@dataclass(frozen=True)
class Outcome:
    """What a layout needs and takes.

    Attributes:
        memory: peak bytes of a rank; `state`: weights, gradients, optimizer state and averages among them.
        compute, update, exchange: seconds of a step: kernels of the passes, the optimizer, visible exchanges.
        step: their sum, with the jitter of many nodes, or longer if images come later.
        images: of a step, on all ranks.
        flops: of a step on all ranks, without recomputation; peak_flops: a second's most.
        loader: images/s that the hosts' cores prepare; None if nothing is decoded.
    """

    layout: Layout
    memory: float
    state: float
    compute: float
    update: float
    exchange: float
    step: float
    images: int
    flops: float
    peak_flops: float
    loader: float | None
    fits: bool

    @property
    def images_per_second(self) -> float:
        """The speed of all ranks together."""
        return self.images / self.step

    @property
    def share_of_peak(self) -> float:
        """The share of the devices' arithmetic that is used."""
        return self.flops / self.step / self.peak_flops

    def loses(self, best: Outcome) -> str:
        """Why this is not the best layout."""
        if not self.fits:
            return "does not fit"
        costs = {
            "exchange": self.exchange - best.exchange,
            "optimizer": self.update - best.update,
            "recomputation" if self.layout.recompute != best.layout.recompute else "smaller kernels": self.compute
            - best.compute,
        }
        most = max(costs, key=lambda name: costs[name])
        return f"{most} +{costs[most] / best.step:.1%}" if costs[most] > 1e-4 * best.step else ""


@dataclass(frozen=True)
class _Traced:
    """A network's passes with a number of images."""

    activations: Activations

    @cached_property
    def tables(self) -> tuple[Kernels, Kernels, Kernels, Kernels]:
        """Kernels of the blocks forwards and backwards, and of all else forwards and backwards."""
        found = self.activations
        blocks = [Kernels.of([work for block in found.blocks for work in block.kernels[at]]) for at in (0, 1)]
        return blocks[0], blocks[1], Kernels.of(found.around[0]), Kernels.of(found.around[1])


class Search:
    """The layouts of a configuration on a cluster.

    Args:
        config: with a global batch; the layout's own settings are replaced.
        cluster: where it would run.
        classes: outputs, if `model.num_classes` does not say.
    """

    def __init__(self, config: RunConfig, cluster: Cluster, classes: int = 1000) -> None:
        if config.data.global_batch_size == AUTO:
            raise UserError("data.global_batch_size: auto depends on the data; give a number")
        self.config, self.cluster, self.classes = config, cluster, classes
        self.device = torch.device(cluster.accelerator.device)
        self.batch = config.data.global_batch_size
        self.image_size = max(config.data.training_image_sizes.values())
        # `auto` begins with autocast on a GPU.
        automatic = "amp_bf16" if self.device.type == "cuda" else "fp32"
        self.precision = automatic if config.precision.name == "auto" else config.precision.name
        self.one = self._plan(Layout(precision=self.precision))
        self._known: dict[tuple[str, str, int], _Traced] = {}

    def layouts(self) -> Iterator[Layout]:
        """All that the configuration and the code allow, whether they fit or not."""
        ranks, per_node = self.cluster.ranks, self.cluster.per_node
        heads = getattr(self.config.model, "heads", 1)
        blocks = self._trace(Layout(precision=self.precision), _FEW).activations.blocks
        for tensor in (1, 2, 4, 8):
            if heads % tensor or ranks % tensor or tensor > per_node:
                continue
            data = ranks // tensor
            shards = {1, data, max(per_node // tensor, 1)} if self.config.optim.shardable else {1}
            if tensor > 1:
                # Such copies are FSDP's.
                shards -= {1} - {data}
            for shard in sorted(shard for shard in shards if data % shard == 0):
                layout = Layout(data // shard, shard, tensor, precision=self.precision)
                refused = tensor > 1 and any(problems(self.config.with_values(**layout.values), Purpose()))
                if self.batch % data or refused:
                    continue
                for parts, recompute in product(self._plan(layout).parts(), ("off", "full") if blocks else ("off",)):
                    yield replace(layout, accumulation=parts, recompute=recompute)

    def _plan(self, layout: Layout) -> MemoryPlan:
        # Whole blocks are measured, and divided by `outcome`.
        config = self.config.with_values(**replace(layout, tensor=1).values)
        return MemoryPlan(config, self.device, layout.data, self.classes)

    def _trace(self, layout: Layout, images: int) -> _Traced:
        key = (layout.recompute, layout.precision, images)
        if key not in self._known:
            # With gradients that exist a rank needs less, at most by those of one block.
            found = self._plan(layout).activations(images, self.image_size, gradients_exist=False)
            self._known[key] = _Traced(found)
        return self._known[key]

    @cached_property
    def _update(self) -> float:
        """Bytes that the optimizer, clipping and the average move for each byte of a float32 parameter."""
        side = 64
        parameter = nn.Parameter(torch.zeros(side, side))
        optimizer = self.config.optim.build([{"params": [parameter], "hidden": True}], self.one.switches.optimizer)
        for _ in range(2):
            # The first step allocates the state.
            parameter.grad = torch.ones_like(parameter)
            with CountWork() as found:
                optimizer.step()
        moved = sum(work.bytes for work in found.found if work.bytes >= 4 * side * side) / parameter.nbytes
        return moved + 3.0 * (self.config.optim.ema_decay is not None) + (self.config.optim.clip_norm is not None)

    def outcome(self, layout: Layout) -> Outcome:
        """What a layout needs and takes."""
        cluster, device, plan = self.cluster, self.cluster.accelerator, self._plan(layout)
        images, parts = self.batch // (layout.data * layout.accumulation), layout.accumulation
        few, many = self._trace(layout, _FEW), self._trace(layout, _MANY)
        share = (images - _FEW) / (_MANY - _FEW)
        activations = few.activations.between(many.activations, share)
        tables = [one.between(other, share) for one, other in zip(few.tables, many.tables, strict=True)]
        compiled = plan.switches.compile != "off"
        divided = [table.divided(layout.tensor) for table in tables[:2]] + tables[2:]
        # Ranks of a CPU compute with one core each, or share it.
        late = max(min(cluster.ranks, cluster.per_node) / cluster.cores, 1.0) if device.device == "cpu" else 1.0
        forward, backward, *ends = (late * device.seconds(table, compiled=compiled) for table in divided)
        compute = parts * (forward + backward + sum(ends))
        owned = 4.0 * self.one.sizes.trained / (layout.shard * layout.tensor)
        update = late * owned * self._update / (device.bandwidth * device.efficiency.get("pass", 1.0))
        exchange = self.exchange(layout, activations, forward, backward)
        step = (compute + update + exchange) / cluster.efficiency()
        loader = None
        if self.config.data.source != "synthetic":
            loader = cluster.cores * cluster.ranks / cluster.per_node * device.images_per_core
            step = max(step, self.batch / loader)
        memory, held = self.memory(layout, activations)
        itemsize = 4 if layout.precision in ("fp32", "tf32") else 2
        plain = self._trace(replace(layout, recompute="off"), _FEW)
        flops = sum(table.flops for table in plain.tables) / _FEW * self.batch
        return Outcome(
            layout, memory, held, compute, update, exchange, step, self.batch, flops,
            device.flops[itemsize] * cluster.ranks, loader, memory <= USABLE * device.memory,
        )  # fmt: skip

    def memory(self, layout: Layout, activations: Activations) -> tuple[float, float]:
        """Peak bytes of a rank, and those of weights, gradients and state."""
        plan = self._plan(layout)
        copies, images = plan.copies(layout.accumulation), self.batch // (layout.data * layout.accumulation)
        # Two more batches are on their way to a GPU, in bytes; see `MemoryPlan`.
        waiting = (3.0 if plan.switches.input_copy == "prefetch" else 1.0) * images * self.image_size**2 * 3
        whole = peak(activations, self.one.sizes, copies, inputs=waiting, update=self.one.update)
        return whole / layout.tensor, state(self.one.sizes, copies).updating / layout.tensor

    def exchanged(self, layout: Layout) -> dict[str, float]:
        """Bytes of a step's exchanges of weights and gradients, whole ones, by the collective's name."""
        copies, sizes, parts = self._plan(layout).copies(layout.accumulation), self.one.sizes, layout.accumulation
        trained, found = sizes.trained / layout.tensor, {}
        if layout.shard > 1:
            blocks = sum(block.parameters for block in self._trace(layout, _FEW).activations.blocks)
            # What surrounds the blocks is kept from its forward to its backward pass.
            gathers = sizes.parameters - blocks + blocks * (2 if copies.reshard_after_forward else 1)
            found["all_gather"] = copies.compute_bytes * gathers * parts / layout.tensor
            found["reduce_scatter"] = 4.0 * trained * parts
        if layout.replicate > 1:
            own = copies.compute_bytes if copies.has_buckets else 4
            found["all_reduce"] = own * trained / layout.shard * (parts if layout.shard > 1 else 1)
        return found

    def exchange(self, layout: Layout, activations: Activations, forward: float, backward: float) -> float:
        """Seconds of exchanges that no arithmetic hides, of a step."""
        cluster, parts, near = self.cluster, layout.accumulation, layout.tensor
        found, blocks = self.exchanged(layout), activations.blocks
        count, exposed = max(len(blocks), 1), 0.0
        if layout.shard > 1:
            # One block's at a time, behind the block before it; the first gather and the last exchange are waited for.
            passes = 2 if self.config.parallel.reshard_after_forward else 1
            gather = cluster.gather(found["all_gather"] / parts / passes / count, layout.shard, apart=near)
            scatter = cluster.gather(found["reduce_scatter"] / parts / count, layout.shard, apart=near)
            if layout.replicate > 1:
                size = found["all_reduce"] / parts / count
                scatter += cluster.reduce(size, layout.replicate, apart=near * layout.shard)
            behind = gather * (passes - 1) + scatter
            hidden = max(0.0, gather - _OVERLAP * forward / count) + max(0.0, behind - _OVERLAP * backward / count)
            exposed += parts * (gather + scatter + (count - 1) * hidden)
        elif layout.replicate > 1:
            whole = cluster.reduce(found["all_reduce"], layout.replicate, apart=near)
            last = cluster.reduce(min(_BUCKET, found["all_reduce"]), layout.replicate, apart=near)
            exposed += max(last, whole - _OVERLAP * backward)
        if layout.tensor > 1:
            # Korthikanti et al., 2022, section 4.2.2: four gathers and four reductions of a block's features.
            exposed += parts * 8 * count * cluster.gather(blocks[0].output, layout.tensor)
        return exposed

    def outcomes(self) -> list[Outcome]:
        """All layouts, those that fit first, the fastest first."""
        found = [self.outcome(layout) for layout in self.layouts()]
        return sorted(found, key=lambda each: (not each.fits, each.step))
