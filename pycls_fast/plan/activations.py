"""The memory of a forward and a backward pass, measured on fake tensors: nothing is computed or allocated.

Each kind of block runs once, alone; everything around the blocks runs once, with stand-ins in place of the blocks. The
time does not grow with the depth, and a network of any size can be measured on any machine. Storages are counted at
the dispatcher (`LiveMemory`), which sees neither workspaces inside kernels nor the allocator's rounding.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from pycls_fast.network import Network
from pycls_fast.optim.owned_weights import local
from pycls_fast.plan.operators import CountWork, LiveMemory, Work


class PassKernels(NamedTuple):
    """The kernels of a forward pass and of its backward pass."""

    forward: tuple[Work, ...] = ()
    backward: tuple[Work, ...] = ()


_NO_KERNELS = PassKernels()


@dataclass(frozen=True)
class BlockMemory:
    """One kind of block, in bytes.

    Attributes:
        held: what it keeps from its forward to its backward pass, its input included if it keeps that, but never its
            output.
        keeps_input, keeps_output: whether its backward pass needs them.
        input, output: their sizes.
        forward: the peak of its forward pass, without its input.
        backward: the peak of its backward pass, including what it holds, without the gradient of its output.
        parameters, trained: numbers of elements, not bytes.
        gradients: the gradients of its parameters, in the format of the backward pass.
        kernels: those of its passes; the backward pass includes what is recomputed.
    """

    held: int
    keeps_input: bool
    keeps_output: bool
    input: int
    output: int
    forward: int
    backward: int
    parameters: int
    trained: int
    gradients: int
    kernels: PassKernels = _NO_KERNELS

    @property
    def products(self) -> float:
        """Bytes of the results of the forward pass's matrix products."""
        products = (work for work in self.kernels.forward if work.kind == "product")
        return sum(work.count * work.m * work.n * work.itemsize for work in products)


@dataclass(frozen=True)
class Moment:
    """The peak outside the blocks, between two blocks or when one begins.

    Attributes:
        outside: bytes of everything but the blocks; their inputs (forward) and their outputs' gradients are included.
        done: the number of blocks whose forward pass is done and whose backward pass is not.
        backward: whether it is in the backward pass.
        begins: the block that begins here; None between blocks.
    """

    outside: int
    done: int
    backward: bool
    begins: int | None = None


@dataclass(frozen=True)
class Activations:
    """One microbatch's passes: the blocks in the order in which they ran, and the moments around them."""

    input: int
    """Bytes of the network's input, which the step keeps."""
    blocks: tuple[BlockMemory, ...]
    moments: tuple[Moment, ...]
    outside: tuple[bool, ...]
    """Whether anything but the blocks keeps the first block's input, the second's, ..., and the last one's output."""
    around: PassKernels = _NO_KERNELS
    """The kernels outside the blocks."""
    ends: int = 0
    """Bytes that are kept outside the blocks from the forward to the backward pass."""

    def offloaded(self) -> Activations:
        """The same if the host holds what blocks keep, which returns to the device for each block's backward pass."""
        blocks = (replace(block, held=0, keeps_input=False, keeps_output=False) for block in self.blocks)
        return replace(self, blocks=tuple(blocks))

    def within(self, budget: float) -> Activations:
        """The same if blocks keep their inputs and this share of everything else, and recompute the rest."""

        def kept(block: BlockMemory) -> BlockMemory:
            own = block.input * block.keeps_input
            return replace(block, held=own + round(budget * (block.held - own)))

        return replace(self, blocks=tuple(map(kept, self.blocks)))

    def between(self, other: Activations, share: float) -> Activations:
        """Interpolated to another number of images, in which bytes are affine; share 0 is these, 1 the other ones.

        The kernels stay these.
        """

        def mixed(few: Any, many: Any) -> Any:
            return replace(few, **{
                name: round(value + share * (getattr(many, name) - value))
                for name, value in vars(few).items()
                if type(value) is int and name not in ("done", "begins")
            })  # fmt: skip

        blocks = tuple(map(mixed, self.blocks, other.blocks))
        moments = tuple(map(mixed, self.moments, other.moments))
        return replace(mixed(self, other), blocks=blocks, moments=moments)

    def stage(self, units: range) -> Activations:
        """The activations of a pipeline stage: some neighbouring blocks, and what comes before the first block or after
        the last.

        A stage keeps its first block's input and its last block's output.
        """
        first, last = units.start == 0, units.stop == len(self.blocks)
        begins = next(moment for moment in self.moments if moment.begins == 0)
        before = begins.outside - self.blocks[0].input
        received = 0 if first else self.blocks[units.start].input
        sent = 0 if last else self.blocks[units.stop - 1].output
        moments = []
        for moment in self.moments:
            at, done = moment.begins, moment.done
            is_end = (first and done == 0) or (last and done == units.stop)
            if not (is_end if at is None else at in units):
                continue
            extra = 0 if first else received * (moment.backward or at != units.start) - before
            extra += sent * moment.backward
            here = None if at is None else at - units.start
            moments.append(replace(moment, outside=moment.outside + extra, done=done - units.start, begins=here))
        outside = list(self.outside[units.start : units.stop + 1])
        outside[0] |= not first
        outside[-1] |= not last
        ends = (before if first else received) + (self.ends - before if last else sent)
        blocks = self.blocks[units.start : units.stop]
        return Activations(self.input, blocks, tuple(moments), tuple(outside), self.around, ends)

    def held(self, count: int) -> int:
        """Bytes that the first `count` blocks hold together."""
        total = 0
        for index, block in enumerate(self.blocks[:count]):
            total += block.held - (block.input if block.keeps_input and self.outside[index] else 0)
            # An output that its block keeps (a ReLU's) is the next one's input, and counted there if that keeps it.
            is_counted = self.outside[index + 1] or any(b.keeps_input for b in self.blocks[index + 1 : index + 2])
            total += block.output if block.keeps_output and not is_counted else 0
        return total


def measure(
    network: Network,
    loss: Callable[[Tensor], Tensor],
    *,
    images: Callable[[], Tensor],
    autocast: Callable[[], AbstractContextManager[Any]],
    gradients_exist: bool = False,
) -> Activations:
    """Measure a microbatch's forward and backward pass.

    Args:
        network: on the meta device, frozen, in its number format and with its recomputation; it gets fake memory here.
        images: makes the network's input, on the CPU; called with fake tensors.
        gradients_exist: whether gradients are added to those of an earlier microbatch.
    """
    # Of blocks that are alike only the first one runs and needs memory.
    firsts: dict[str, nn.Module] = {}
    for _, unit in network.units():
        firsts.setdefault(_structure(unit), unit)
    others = {module for _, unit in network.units() if unit not in firsts.values() for module in unit.modules()}
    # What exists now is not garbage of a block's pass, and searching it would take longer than the pass.
    gc.freeze()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            known = materialise([module for module in network.modules() if module not in others], gradients_exist)
            with LiveMemory(known) as memory, CountWork() as work:
                return _Measurement(network, memory, work, firsts).run(loss, images, autocast)
    finally:
        gc.unfreeze()


def materialise(modules: Iterable[nn.Module], gradients_exist: bool) -> list[Tensor]:
    """Give parameters and buffers fake memory on the CPU, shared ones once; return this rank's parts of them."""
    made: dict[int, Any] = {}

    def like(value: Tensor) -> Any:
        own = local(value)
        empty: Tensor = torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device="cpu")
        if isinstance(value, DTensor):
            empty = DTensor.from_local(empty, value.device_mesh, value.placements, run_check=False)
        return nn.Parameter(empty, value.requires_grad) if isinstance(value, nn.Parameter) else empty

    for module in modules:
        for values in (module._parameters, module._buffers):
            for name, value in values.items():
                if value is not None:
                    if id(value) not in made:
                        made[id(value)] = like(value)
                    values[name] = made[id(value)]
    found = list(made.values())
    for value in found if gradients_exist else ():
        if value.requires_grad:
            value.grad = torch.empty_like(value)
    return [local(each) for each in (*found, *(value.grad for value in found if value.grad is not None))]


@dataclass
class _Measurement:
    """One forward and backward pass with stand-ins for the blocks."""

    network: Network
    memory: LiveMemory
    work: CountWork
    firsts: Mapping[str, nn.Module]
    kinds: dict[Any, tuple[BlockMemory, Callable[[], Tensor]]] = field(default_factory=dict)
    """Each kind of block that has run alone, and what makes a tensor like its output."""
    blocks: list[BlockMemory] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    between: list[weakref.ref[Any]] = field(default_factory=list)
    """The storages of the blocks' inputs, and of the last one's output."""
    left: int = 0
    """The number of blocks whose backward pass has not run."""

    def run(
        self,
        loss: Callable[[Tensor], Tensor],
        images: Callable[[], Tensor],
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> Activations:
        inners: dict[str, Callable[[Tensor], Tensor]] = {}
        for _, unit in self.network.units():
            structure = _structure(unit)
            unit.forward = partial(self.stand_in, structure, inners.setdefault(structure, unit.forward))
        input_BCHW = images()
        with autocast():
            logits_BK = self.network(input_BCHW)
        total = loss(logits_BK)
        # The step keeps its input and its loss, not the logits.
        del logits_BK
        # Frozen blocks at the beginning have no backward pass and stay left.
        self.left = len(self.blocks)
        outside = tuple(reference() is not None for reference in self.between)
        forward, ends = self.work.taken(), self.memory.live
        if total.requires_grad:
            self.note(self.left, backward=False)
            total.backward()
        self.note(self.left, backward=total.requires_grad)
        around = PassKernels(forward, self.work.taken())
        return Activations(input_BCHW.nbytes, tuple(self.blocks), tuple(self.moments), outside, around, ends)

    def note(self, done: int, *, backward: bool, begins: int | None = None) -> None:
        """Record the peak since the last note and, if a block begins, what is alive now."""
        self.moments.append(Moment(self.memory.peak, done, backward))
        if begins is not None:
            self.moments.append(Moment(self.memory.live, done, backward, begins))
        self.memory.peak = self.memory.live

    def stand_in(self, structure: str, inner: Callable[[Tensor], Tensor], features: Tensor) -> Tensor:
        """A block's `forward`: what the block does to memory, without computing it."""
        index, unit = len(self.blocks), self.firsts[structure]
        self.note(index, backward=False, begins=index)
        key = (structure, features.shape, features.stride(), features.dtype, features.requires_grad)
        if key not in self.kinds:
            self.kinds[key] = self._run_block(unit, inner, features)
        block, output = self.kinds[key]
        self.blocks.append(block)
        result: Tensor = _Instead.apply(features, torch.empty(0, requires_grad=block.backward > 0), self, index, output)
        self.between[index:] = [weakref.ref(each.untyped_storage()) for each in (features, result)]
        self.memory.peak = self.memory.live
        return result

    def began_backward(self, index: int) -> None:
        self.note(index + 1, backward=True, begins=index)
        self.left = index

    def _run_block(
        self, unit: nn.Module, inner: Callable[[Tensor], Tensor], like: Tensor
    ) -> tuple[BlockMemory, Callable[[], Tensor]]:
        """Run a block forwards and backwards on an input that nothing else holds."""
        memory, nothing = self.memory, torch.empty(0, requires_grad=like.requires_grad)
        before = self.work.taken()
        existed = {id(p) for p in unit.parameters() if p.grad is not None}
        base = memory.live
        features = _Source.apply(nothing, torch.empty_like(nothing), like.detach())
        input_bytes, input_ref = features.untyped_storage().nbytes(), weakref.ref(features.untyped_storage())
        memory.peak = memory.live
        out = inner(features)
        # Of what autocast has cast, only what the backward pass needs stays alive.
        torch.clear_autocast_cache()
        forward = memory.peak - base - input_bytes
        forward_kernels = self.work.taken()
        del features
        output_bytes, output_ref = out.untyped_storage().nbytes(), weakref.ref(out.untyped_storage())
        output = _emptied(out)
        keeps_input = input_ref() is not None
        held, backward, keeps_output = memory.live - base - output_bytes, 0, False
        if out.requires_grad:
            end = _Sink.apply(out)
            del out
            keeps_output = output_ref() is not None
            memory.peak = memory.live
            with torch.autocast("cpu", enabled=False):
                end.backward()
            # Recomputation has cast weights again.
            torch.clear_autocast_cache()
            del end
            backward = memory.peak - base - output_bytes
        else:
            del out
            held = 0
        gradients, partial_sums = _remove_gradients(unit, existed)
        if memory.live != base:
            gc.collect()
        # Ranks that see different tokens have a part of each norm's gradient; FSDP adds them up one after the other.
        added = [Work("all_reduce", float(partial_sums))] if partial_sums else []
        block = BlockMemory(
            held=held,
            keeps_input=keeps_input,
            keeps_output=keeps_output,
            input=input_bytes,
            output=output_bytes,
            forward=forward,
            backward=backward,
            parameters=sum(local(p).numel() for p in unit.parameters()),
            trained=sum(local(p).numel() for p in unit.parameters() if p.requires_grad),
            gradients=gradients,
            kernels=PassKernels(forward_kernels, (*self.work.taken(), *added)),
        )
        self.work.found += before
        return block, output


def _remove_gradients(unit: nn.Module, existed: set[int]) -> tuple[int, int]:
    """Remove a block's gradients, but not those that `existed` before; returns the bytes of all its gradients, and of
    those that ranks have yet to add up."""
    gradients = partial_sums = 0
    for parameter in unit.parameters():
        if parameter.grad is not None:
            size = local(parameter.grad).nbytes
            gradients += size
            partial_sums += size * _is_partial(parameter.grad)
            if id(parameter) not in existed:
                parameter.grad = None
    return gradients, partial_sums


def _is_partial(gradient: Tensor) -> bool:
    return isinstance(gradient, DTensor) and any(each.is_partial() for each in gradient.placements)


def _settings(owner: Any) -> Any:
    # Rates and other numbers with a fraction only matter by whether they are 0.
    return [
        (name, value != 0 if isinstance(value, float) else value)
        for name, value in sorted(vars(owner).items())
        if isinstance(value, (bool, int, float, str, tuple, torch.dtype))
    ]


def _structure(unit: nn.Module) -> str:
    """A text that is the same for blocks with the same modules, settings, parameters and wrapper of `forward`."""
    modules = [(type(module), _settings(module)) for module in unit.modules()]
    tensors = [(p.shape, p.dtype, p.requires_grad) for p in unit.parameters()]
    wrapper = (type(unit.forward), _settings(unit.forward) if hasattr(unit.forward, "__dict__") else None)
    return repr((modules, tensors, wrapper))


def _emptied(like: Tensor) -> Callable[[], Tensor]:
    """A function that makes empty tensors like this one, without keeping it."""
    return partial(torch.empty_strided, like.shape, like.stride(), dtype=like.dtype, device="cpu")


class _Instead(torch.autograd.Function):
    """Output and gradient of a block, without what it keeps."""

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, anything: Tensor, measurement: _Measurement, index: int, output: Any
    ) -> Tensor:
        ctx.measurement, ctx.index = measurement, index
        ctx.gradient = _emptied(features) if features.requires_grad else lambda: None
        made: Tensor = output()
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.measurement.began_backward(ctx.index)
        return ctx.gradient(), None, None, None, None


class _Source(torch.autograd.Function):
    """A block's input, which only the block keeps. (Two arguments: one would look like a cast of a parameter.)"""

    @staticmethod
    def forward(ctx: Any, one: Tensor, two: Tensor, like: Tensor) -> Tensor:
        return _emptied(like)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, None


class _Sink(torch.autograd.Function):
    """Makes the gradient of a block's output, so that only the backward pass owns it."""

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        ctx.gradient = _emptied(out)
        return torch.empty((), device="cpu")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.gradient()
