"""The memory of a forward and a backward pass, measured on fake tensors: nothing is computed or allocated.

Each kind of block runs once, alone; everything around the blocks runs once with stand-ins in their places. So the time
does not grow with the depth, and a network of any size can be measured on any machine. Storages are counted at the
dispatcher (`LiveMemory`): workspaces inside kernels and the allocator's rounding are not seen.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from pycls_fast.network import Network
from pycls_fast.optim.weights import local
from pycls_fast.plan.operators import CountWork, LiveMemory, Work

Passes = tuple[tuple[Work, ...], tuple[Work, ...]]
"""The kernels of a forward and of a backward pass."""


@dataclass(frozen=True)
class BlockMemory:
    """One kind of block, in bytes.

    Attributes:
        held: kept from its forward to its backward pass: its input, if it keeps that, but never its output.
        keeps_input, keeps_output: whether its backward pass needs them.
        input, output: their sizes.
        forward: the most in its forward pass, besides its input.
        backward: the most in its backward pass, besides the gradient of its output; what it holds is included.
        parameters, trained: numbers of elements, not bytes.
        gradients: bytes of its parameters' gradients, in the format of the backward pass.
        kernels: of its forward pass, and of its backward pass with what it recomputes.
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
    kernels: Passes = ((), ())

    @property
    def products(self) -> float:
        """Bytes of what the matrix products of the forward pass compute."""
        return sum(work.count * work.m * work.n * work.itemsize for work in self.kernels[0] if work.kind == "product")


@dataclass(frozen=True)
class Moment:
    """The most bytes outside the blocks, in a stretch between two blocks or when one begins.

    Attributes:
        outside: bytes of everything but the blocks, and of their inputs (forward) or their outputs' gradients.
        done: the number of blocks whose forward pass is done, and whose backward pass is not.
        backward: it is in the backward pass.
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
    """Whether others than the blocks keep the first block's input, the second's, ..., and the last one's output."""
    around: Passes = ((), ())
    """The kernels outside the blocks."""
    ends: int = 0
    """Bytes that are kept outside the blocks from the forward to the backward pass."""

    def offloaded(self) -> Activations:
        """The same with all that blocks hold on the host: it returns for a block's own backward pass."""
        blocks = (replace(block, held=0, keeps_input=False, keeps_output=False) for block in self.blocks)
        return replace(self, blocks=tuple(blocks))

    def within(self, budget: float) -> Activations:
        """The same if blocks keep this share of what they hold besides their inputs, and recompute the rest."""

        def kept(block: BlockMemory) -> BlockMemory:
            own = block.input * block.keeps_input
            return replace(block, held=own + round(budget * (block.held - own)))

        return replace(self, blocks=tuple(map(kept, self.blocks)))

    def between(self, other: Activations, share: float) -> Activations:
        """For another number of images, in which bytes are affine; 0: these, 1: the other ones. Kernels stay these."""

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
        """What a rank has that computes only some neighbouring blocks, with what is before the first or after the last.

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
            if at not in units if at is not None else not ((first and done == 0) or (last and done == units.stop)):
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
        network: on the meta device, which this function takes it from: frozen, in its number format, with its
            recomputation.
        images: makes the network's input, on the CPU; called with fake tensors.
        gradients_exist: gradients are added to those of an earlier microbatch.
    """
    # Of blocks that are alike one runs, and only that one needs memory.
    firsts: dict[str, nn.Module] = {}
    for _, unit in network.units():
        firsts.setdefault(_structure(unit), unit)
    others = {module for _, unit in network.units() if unit not in firsts.values() for module in unit.modules()}
    # What exists now is no garbage of a block's pass, and looking through it takes longer than the pass.
    gc.freeze()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            known = materialise([module for module in network.modules() if module not in others], gradients_exist)
            with LiveMemory(known) as memory, CountWork() as work:
                return _Passes(network, memory, work, firsts).run(loss, images, autocast)
    finally:
        gc.unfreeze()


def materialise(modules: Iterable[nn.Module], gradients_exist: bool) -> list[Tensor]:
    """Give parameters and buffers fake memory on the CPU, shared ones once; this rank's parts are returned."""
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
class _Passes:
    """One forward and backward pass with stand-ins for the blocks."""

    network: Network
    memory: LiveMemory
    work: CountWork
    firsts: Mapping[str, nn.Module]
    kinds: dict[Any, tuple[BlockMemory, Callable[[], Tensor]]] = field(default_factory=dict)
    blocks: list[BlockMemory] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    between: list[weakref.ref[Any]] = field(default_factory=list)
    """The storages of the blocks' inputs, and of the last one's output."""
    left: int = 0

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
        # Of so many blocks the backward pass has not run; frozen ones at the beginning have none.
        self.left = len(self.blocks)
        outside = tuple(reference() is not None for reference in self.between)
        forward, ends = self.work.taken(), self.memory.live
        if total.requires_grad:
            self.note(self.left, backward=False)
            total.backward()
        self.note(self.left, backward=total.requires_grad)
        around = (forward, self.work.taken())
        return Activations(input_BCHW.nbytes, tuple(self.blocks), tuple(self.moments), outside, around, ends)

    def note(self, done: int, *, backward: bool, begins: int | None = None) -> None:
        """Record the most since the last note and, if a block begins, what is alive now."""
        self.moments.append(Moment(self.memory.peak, done, backward))
        if begins is not None:
            self.moments.append(Moment(self.memory.live, done, backward, begins))
        self.memory.peak = self.memory.live

    def stand_in(self, structure: str, inner: Callable[[Tensor], Tensor], features: Tensor) -> Tensor:
        index, unit = len(self.blocks), self.firsts[structure]
        self.note(index, backward=False, begins=index)
        key = (structure, features.shape, features.stride(), features.dtype, features.requires_grad)
        if key not in self.kinds:
            self.kinds[key] = self._alone(unit, inner, features)
        block, output = self.kinds[key]
        self.blocks.append(block)
        result: Tensor = _Instead.apply(features, torch.empty(0, requires_grad=block.backward > 0), self, index, output)
        self.between[index:] = [weakref.ref(each.untyped_storage()) for each in (features, result)]
        self.memory.peak = self.memory.live
        return result

    def began_backward(self, index: int) -> None:
        self.note(index + 1, backward=True, begins=index)
        self.left = index

    def _alone(
        self, unit: nn.Module, inner: Callable[[Tensor], Tensor], like: Tensor
    ) -> tuple[BlockMemory, Callable[[], Tensor]]:
        """Run a block forwards and backwards on an input of its own."""
        memory, nothing = self.memory, torch.empty(0, requires_grad=like.requires_grad)
        before = self.work.taken()
        existed = {id(p) for p in unit.parameters() if p.grad is not None}
        base = memory.live
        features = _Source.apply(nothing, torch.empty_like(nothing), like.detach())
        input_bytes, input_ref = features.untyped_storage().nbytes(), weakref.ref(features.untyped_storage())
        memory.peak = memory.live
        out = inner(features)
        # What autocast has cast stays alive only as far as the backward pass needs it.
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
            # What ran again has cast weights anew.
            torch.clear_autocast_cache()
            del end
            backward = memory.peak - base - output_bytes
        else:
            del out
            held = 0
        gradients = parts = 0
        for parameter in unit.parameters():
            if parameter.grad is not None:
                gradients += local(parameter.grad).nbytes
                parts += local(parameter.grad).nbytes * _is_partial(parameter.grad)
                if id(parameter) not in existed:
                    parameter.grad = None
        if memory.live != base:
            gc.collect()
        # FSDP adds up the gradients of norms, one after the other: ranks that see other tokens have a part of each.
        added = [Work("all_reduce", float(parts))] if parts else []
        block = BlockMemory(
            held, keeps_input, keeps_output, input_bytes, output_bytes, forward, backward,
            sum(local(p).numel() for p in unit.parameters()),
            sum(local(p).numel() for p in unit.parameters() if p.requires_grad),
            gradients,
            (forward_kernels, (*self.work.taken(), *added)),
        )  # fmt: skip
        self.work.found += before
        return block, output


def _is_partial(gradient: Tensor) -> bool:
    return isinstance(gradient, DTensor) and any(each.is_partial() for each in gradient.placements)


def _settings(owner: Any) -> Any:
    # Of rates and the like only whether they are 0.
    return [
        (name, value != 0 if isinstance(value, float) else value)
        for name, value in sorted(vars(owner).items())
        if isinstance(value, (bool, int, float, str, tuple, torch.dtype))
    ]


def _structure(unit: nn.Module) -> str:
    """What a block is: its modules and their settings, its parameters, how its forward pass is wrapped."""
    modules = [(type(module), _settings(module)) for module in unit.modules()]
    tensors = [(p.shape, p.dtype, p.requires_grad) for p in unit.parameters()]
    wrapper = (type(unit.forward), _settings(unit.forward) if hasattr(unit.forward, "__dict__") else None)
    return repr((modules, tensors, wrapper))


def _emptied(like: Tensor) -> Callable[[], Tensor]:
    """Makes tensors like this one, which is not kept."""
    return partial(torch.empty_strided, like.shape, like.stride(), dtype=like.dtype, device="cpu")


class _Instead(torch.autograd.Function):
    """Output and gradient of a block, without what it keeps."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, anything: Tensor, passes: _Passes, index: int, output: Any) -> Tensor:
        ctx.passes, ctx.index = passes, index
        ctx.gradient = _emptied(features) if features.requires_grad else lambda: None
        made: Tensor = output()
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.passes.began_backward(ctx.index)
        return ctx.gradient(), None, None, None, None


class _Source(torch.autograd.Function):
    """A block's input that nobody keeps but the block. (Two arguments: one would look like a cast of a parameter.)"""

    @staticmethod
    def forward(ctx: Any, one: Tensor, two: Tensor, like: Tensor) -> Tensor:
        return _emptied(like)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, None


class _Sink(torch.autograd.Function):
    """Makes the gradient of a block's output, which then only the backward pass owns."""

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        ctx.gradient = _emptied(out)
        return torch.empty((), device="cpu")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.gradient()
