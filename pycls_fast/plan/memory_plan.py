"""The memory plan of a configuration: the peak of its step, and the microbatch that fits into a device."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from pycls_fast.build.data import prepare_on_host
from pycls_fast.build.device import DTYPES, autocast, compute_dtype, level, switches
from pycls_fast.build.network import apply_precision, freeze, loss, model, stage_costs
from pycls_fast.config.conflicts import Purpose, problems
from pycls_fast.config.run import RunConfig
from pycls_fast.data.prepare import IN_FLIGHT, MEMORY_FORMATS
from pycls_fast.errors import UserError, refusing
from pycls_fast.losses import Targets
from pycls_fast.network import Network
from pycls_fast.parallel.launch import degrees
from pycls_fast.parallel.pipeline import orders, partition_blocks
from pycls_fast.parallel.saved_activations import save_activation_memory
from pycls_fast.parallel.tensor import divide, divide_experts
from pycls_fast.parallel.world import World
from pycls_fast.plan.activations import Activations, measure
from pycls_fast.plan.peak import (
    Copies,
    Peak,
    Sizes,
    Temporaries,
    optimizer_temporaries,
    peak,
    pipelined_peak,
    state,
)
from pycls_fast.speed import Speed
from pycls_fast.strategies import STRATEGIES, ScheduleName
from pycls_fast.values import AUTO, Size

_CPU = torch.device("cpu")
# Of the device's memory: libraries and communication take some, the allocator wastes some.
USABLE = 0.92
# Replaces what a CPU or fake tensors cannot run by what keeps as much memory, or (skipped samples) a little more.
_INSTEAD = {
    ("attention", "sdpa_efficient"): "sdpa",
    ("attention", "sdpa_cudnn"): "sdpa",
    ("drop_path_compute", "skip"): "multiply",
    ("cross_entropy", "fused"): "plain",
}
_ONLY_RECOMPUTED = {"activation_compression": "none"}
_RANKS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class MemoryPlan:
    """What a step of a configuration needs, on one of a number of ranks.

    Compiled code is planned as eager code, which keeps more; with an activation budget, as that share of it.

    Attributes:
        config: with a precision and a global batch; `optim.accumulation_steps` may be `auto`.
        world: the ranks, divided as the configuration says; a world without process groups may be imagined.
        classes: outputs, if `model.num_classes` does not say.
    """

    config: RunConfig
    world: World
    classes: int = 1000

    @classmethod
    def imagined(cls, config: RunConfig, device: torch.device, ranks: int = 1, classes: int = 1000) -> MemoryPlan:
        """The plan for ranks that do not exist."""
        parallel = config.parallel
        world = World(0, ranks, device, tensor=parallel.tensor_degree, pipeline=parallel.pipeline_degree)
        return cls(config, world, classes)

    @cached_property
    def switches(self) -> Speed:
        """The run's switches, as far as a CPU with fake tensors can run them."""
        chosen = switches(self.config, self.world.device)
        return chosen.replace(**{name: _INSTEAD.get((name, value), value) for name, value in chosen.values().items()})

    @property
    def per_rank(self) -> int:
        """Images of a step on each rank."""
        return self.config.data.global_batch_size // self.world.data_size

    @cached_property
    def sizes(self) -> tuple[Sizes, ...]:
        """Those of each rank of a pipeline; without one, those of the network."""
        before, units, after = self.unit_sizes
        ranks = []
        for stages in self.stages(len(units)):
            own = [index for each in stages.values() for index in each]
            ends = [before] * (0 in own or not units) + [after] * (len(units) - 1 in own or not units)
            ranks.append(Sizes.together([units[index] for index in own], ends))
        return tuple(ranks)

    @cached_property
    def unit_sizes(self) -> tuple[Sizes, list[Sizes], Sizes]:
        """This rank's sizes: of what comes before the blocks, of each block, and of the rest."""
        config, optim = self.config, self.config.optim
        model = (config.model.model_dump_json(), config.data.image_size, self.classes)
        key = (*model, optim.trainable, optim.lora_rank, self.world.tensor)
        # A network given from Python may be a different one next time.
        if key in _sizes and config.model.kind != "given":
            return _sizes[key]
        network = self._network()
        freeze(config, network)
        # All experts count: the shards that divide them are taken into account later.
        with self._divided(network, "tensor"):
            places = [*network.ends()[0], *(name for name, _ in network.units())]
            found: dict[str, list[Tensor]] = {}
            for name, tensor in chain(network.named_parameters(), network.named_buffers()):
                place = next((each for each in places if name.startswith(f"{each}.")), "")
                found.setdefault(place, []).append(tensor)
            before = [tensor for name in network.ends()[0] for tensor in found.get(name, [])]
            units = [Sizes.of(found.get(name, [])) for name, _ in network.units()]
            _sizes[key] = (Sizes.of(before), units, Sizes.of(found.get("", [])))
        return _sizes[key]

    @cached_property
    def costs(self) -> tuple[int, ...]:
        """Those of `stage_costs`."""
        key = (self.config.model.model_dump_json(), self.config.data.image_size, self.classes)
        if key not in _costs:
            _costs[key] = tuple(stage_costs(self.config, self.config.model.num_classes or self.classes))
        return _costs[key]

    def stages(self, units: int) -> list[dict[int, range]]:
        """The blocks of each stage of each rank of a pipeline; without one, of one rank with one stage."""
        if self.world.pipeline == 1:
            return [{0: range(units)}]
        ranks: list[dict[int, range]] = [{} for _ in range(self.world.pipeline)]
        schedule = self.config.parallel.pipeline_schedule
        for index, (owner, own) in enumerate(partition_blocks(schedule, len(ranks), self.costs)):
            ranks[owner][index] = own
        return ranks

    def order(self, accumulation: int) -> Mapping[int, Sequence[Any]]:
        """Each rank's actions of a step of a pipeline."""
        key = (self.config.parallel.pipeline_schedule, self.world.pipeline, accumulation)
        if key not in _orders:
            with group({"pipeline": self.world.pipeline}, self.world.mesh) as mesh:
                _orders[key] = orders(key[0], mesh.get_group(), accumulation)
        return _orders[key]

    def copies(self, accumulation: int) -> Copies:
        """What a rank holds of weights, gradients and state."""
        config, world, precision = self.config, self.world, level(self.config)
        is_half = precision.weights != "float32"
        name = config.parallel.strategy(world.size)
        if world.pipeline > 1 and STRATEGIES[name].replicates:
            # Stages exchange gradients after the last microbatch, without buckets.
            name = "single"
        degree = 1 if STRATEGIES[name].shards == "nothing" else world.data_size
        if STRATEGIES[name].has_groups:
            degree = degrees(config.parallel, world.stage_size)[1]
        # fsdp and hsdp gather weights in autocast's format.
        narrow = is_half or (STRATEGIES[name].has_dtensors and precision.autocast is not None and not precision.float8)
        return Copies(
            strategy=name,
            degree=degree,
            # With LoRA the optimizer keeps the initial value of each adapted weight; the rest is small.
            state_copies=config.optim.state_copies if config.optim.lora_rank is None else 1.0,
            reshard_after_forward=config.parallel.reshard_after_forward,
            compute_bytes=compute_dtype(config).itemsize if narrow else 4,
            masters_kept=precision.masters == "kept" or not is_half,
            accumulates=accumulation > 1,
            averaged=config.optim.ema_decay is not None,
            on_host=self.switches.param_offload == "cpu" and world.device.type != "cpu",
        )

    def state(self, accumulation: int) -> float:
        """Bytes of weights, gradients, optimizer state and average, without activations."""
        copies = self.copies(accumulation)
        return max(state(sizes, copies).updating for sizes in self.sizes)

    def peak(self, accumulation: int) -> float:
        """The most bytes of a rank in a step with so many microbatches.

        Raises:
            UserError: the network cannot be measured.
        """
        world, config, images = self.world, self.config, self.per_rank // accumulation
        settings = config.model_dump_json(exclude=_NOT_MEASURED)
        key = (settings, world.device.type, world.size, self.classes, accumulation)
        if key not in _peaks or config.model.kind == "given":
            size, exist = config.data.largest_image_size, self.copies(accumulation).gradients_exist
            what = "optim.accumulation_steps: auto cannot measure this network without running it"
            with refusing(what, RuntimeError, TypeError, use="give a number"):
                activations = self.activations(images, size, gradients_exist=exist)
            _peaks[key] = self.peak_with(activations, accumulation).total
        return _peaks[key]

    def peak_with(self, activations: Activations, accumulation: int) -> Peak:
        """The same and its parts, with activations that are known."""
        config, copies, chosen, world = self.config, self.copies(accumulation), self.switches, self.world
        images, size = self.per_rank // accumulation, config.data.largest_image_size
        batches = 1 + (IN_FLIGHT if chosen.input_copy == "prefetch" else 0)
        on_host = prepare_on_host(config, chosen) is not None
        inputs = float(batches * images * math.prod(size) * 3 * (4 if on_host else 1))
        if world.pipeline == 1:
            return peak(activations, self.sizes[0], copies, inputs=inputs, temporaries=self.temporaries)
        # The images of all microbatches are on the device from the beginning.
        images_of_all = float(accumulation * activations.input)
        order = self.order(accumulation)
        ranks = (
            pipelined_peak(
                {index: activations.stage(own) for index, own in stages.items()},
                order[rank],
                self.sizes[rank],
                copies,
                inputs=inputs + images_of_all * (0 in stages),
                temporaries=self.temporaries,
            )
            for rank, stages in enumerate(self.stages(len(activations.blocks)))
        )
        return max(ranks, key=lambda each: each.total)

    def activations(self, images: int, size: Size, *, gradients_exist: bool) -> Activations:
        """Activations of a microbatch; see `measure`."""
        config = self.config
        if level(config).float8:
            # torchao's layers keep what layers under autocast keep.
            config = config.with_values(precision={"name": "amp_bf16"})
        offloads = self.switches.activation_offload == "cpu"
        chosen = self.switches.replace(activation_offload="none")
        network = self._network()
        freeze(config, network)
        apply_precision(config, network, _CPU)
        save_activation_memory(network, network.units(), chosen)
        of_logits = loss(config, chosen, _CPU, self.config.model.num_classes or self.classes)
        dtype = DTYPES[level(config).weights]

        def whole_loss(logits_BK: Tensor) -> Tensor:
            labels_B = torch.zeros(images, dtype=torch.int64)
            mixes = config.augment.mixes
            return of_logits(logits_BK, Targets(labels_B, labels_B if mixes else None, 0.5 if mixes else 1.0))

        with self._divided(network, "expert", "tensor"):
            activations = measure(
                network,
                whole_loss,
                images=lambda: torch.empty(
                    (images, 3, *size), dtype=dtype, memory_format=MEMORY_FORMATS[chosen.memory_format]
                ),
                autocast=autocast(config, _CPU),
                gradients_exist=gradients_exist,
            )
        if self.switches.recompute == "budget":
            # The compiler chooses what to keep, which eager code does not show.
            activations = activations.within(config.parallel.recompute_budget)
        return activations.offloaded() if offloads and self.world.device.type != "cpu" else activations

    @contextmanager
    def _divided(self, network: Network, *names: str) -> Iterator[None]:
        """Divide a network among the ranks, in place, while the context lasts."""
        world = self.world
        ranks = {"expert": self.config.parallel.expert_degree, "tensor": world.tensor}
        wanted = {name: ranks[name] for name in names if ranks[name] > 1}
        if not wanted:
            yield
            return
        with group(wanted, world.mesh if world.experts is None else world.experts) as mesh:
            if "tensor" in wanted:
                divide(network, [unit for _, unit in network.units()], mesh["tensor"])
            divide_experts(network, mesh, compute_dtype(self.config))
            yield

    def _network(self) -> Network:
        # Building may seed torch's generator.
        with torch.random.fork_rng(devices=[]):
            network = model(self.config, self.config.model.num_classes or self.classes, self.switches, empty=True)
        return network.to(memory_format=MEMORY_FORMATS[self.switches.memory_format])

    @cached_property
    def temporaries(self) -> Temporaries:
        settings = self.config.optim
        if settings.compiles_itself or self.switches.optimizer_compile == "on":
            return Temporaries(per_largest_byte=1.0)

        def make(parameters: list[nn.Parameter]) -> Optimizer:
            group = {"params": parameters, "hidden": True}
            return settings.build([group], self.switches.optimizer)

        return optimizer_temporaries(make)

    def microbatch_counts(self) -> list[int]:
        """The possible numbers of microbatches, from the most to the fewest; each has the images that mixing needs.

        A pipeline gets at least four for each stage, or as many as there can be.
        """
        stages, least = self.world.pipeline, 2 if self.config.augment.mixes else 1
        most = self.per_rank // least
        found = [parts for parts in range(most, 0, -1) if self.per_rank % parts == 0 == parts % stages]
        return [parts for parts in found if stages == 1 or parts >= 4 * stages] or found[:1]

    def fewest_microbatches(self, memory: float, *, more_than: int = 0) -> int | None:
        """The fewest microbatches with which a step fits into a device's memory (bytes); None if it never fits."""
        parts = [each for each in self.microbatch_counts() if each > more_than]
        # If a microbatch fits, all smaller ones do.
        count = bisect(parts, False, key=lambda each: self.peak(each) > USABLE * memory)
        return parts[count - 1] if count else None

    def way_out(self, memory: float) -> str:
        """A way to make the step fit: sharding over more ranks, or recomputing; "" if neither helps."""
        config, known = self.config, set(problems(self.config, Purpose()))

        def fits(made: MemoryPlan) -> bool:
            # A setting that conflicts with the others is no way out.
            is_legal = not set(problems(made.config, Purpose())) - known
            return is_legal and made.fewest_microbatches(memory) is not None

        # Ranks that divide blocks or experts have process groups, and other ranks cannot be imagined beside these.
        whole = self.world.size == self.world.data_size and self.world.experts is None
        for ranks in _RANKS if whole else ():
            if ranks < self.world.size or config.data.global_batch_size % ranks:
                continue
            sharded = config.with_values(parallel={"name": "fsdp"})
            if fits(MemoryPlan.imagined(sharded, self.world.device, ranks, self.classes)):
                return f"fits with parallel=fsdp on {ranks}"
        recomputing = replace(self, config=config.with_values(speed={"recompute": "full", **_ONLY_RECOMPUTED}))
        return "fits with speed.recompute=full" if fits(recomputing) else ""


@contextmanager
def group(ranks: Mapping[str, int], mesh: DeviceMesh | None) -> Iterator[DeviceMesh]:
    """A mesh on the CPU, for fake tensors: over an existing one's ranks, or over imagined ones."""
    names = tuple(ranks)
    if mesh is not None:
        # Nothing is exchanged between fake tensors.
        groups, part = [mesh.get_group(name) for name in names], mesh[names]
        yield DeviceMesh.from_group(groups, "cpu", mesh=part.mesh, mesh_dim_names=names)
        return
    # Imports torch's compiler, which takes a second.
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    # torch's cache for equal meshes refers to groups that no longer exist.
    _clear_sharding_prop_cache()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(ranks.values()))
    try:
        yield init_device_mesh("cpu", tuple(ranks.values()), mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


# Caches of this process: the start table asks for a plan again, and a search compares hundreds.
_peaks: dict[tuple[object, ...], float] = {}
_orders: dict[tuple[ScheduleName, int, int], Mapping[int, Sequence[Any]]] = {}
_sizes: dict[tuple[object, ...], tuple[Sizes, list[Sizes], Sizes]] = {}
_costs: dict[tuple[object, ...], tuple[int, ...]] = {}
_NOT_MEASURED = {"config_name", "run_dir", "seed", "resume", "weights", "schedule", "runtime"}


def device_memory(config: RunConfig, world: World) -> float | None:
    """Bytes of a rank's device, the least of all ranks: `runtime.device_memory`, else a GPU's own; None on a CPU."""
    if config.runtime.device_memory is not None:
        return float(config.runtime.device_memory)
    if world.device.type != "cuda":
        return None
    return float(min(world.gather(torch.cuda.get_device_properties(world.device).total_memory)))


def with_accumulation(config: RunConfig, world: World, classes: int | None = None) -> RunConfig:
    """The configuration with the fewest accumulation steps that fit in place of `auto`: 1 if no memory is known.

    All ranks call this, with a precision and a global batch that they can divide.

    Raises:
        UserError: not even the smallest microbatch fits, the network cannot be measured, or a switch needs one
            microbatch.
    """
    if config.optim.accumulation_steps != AUTO:
        return config
    memory, made = device_memory(config, world), MemoryPlan(config, world, classes or 1000)
    steps = 1
    if world.pipeline > 1:
        steps = min(made.microbatch_counts(), default=0)
        if not steps:
            raise UserError(
                f"data.global_batch_size: {config.data.global_batch_size} cannot be divided into microbatches for "
                f"parallel.pipeline_degree={world.pipeline}; use a multiple of {world.data_size * world.pipeline}"
            )
    if memory is not None:
        found = made.fewest_microbatches(memory)
        if found is None:
            least = made.peak(made.microbatch_counts()[0])
            way_out = made.way_out(memory) or "use a smaller model or data.image_size"
            raise UserError(
                f"optim.accumulation_steps: auto finds no microbatch that fits into {USABLE:.0%} of "
                f"{gigabytes(memory)}: the smallest needs {gigabytes(least)}; {way_out}"
            )
        steps = found
    config = config.with_values(optim={"accumulation_steps": steps})
    if steps > 1:
        # Refuse switches that cannot run with several microbatches, which is only known now.
        switches(config, world.device)
    return config


def gigabytes(count: float) -> str:
    """Bytes in GB, or in MB below one."""
    size, unit = (count / 1e9, "GB") if count >= 1e9 else (count / 1e6, "MB")
    return f"{size:.3g} {unit}" if size < 999.5 else f"{size:,.0f} {unit}"
