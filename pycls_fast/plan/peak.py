"""The peak of a training step on one rank: measured activations, and formulas for what a strategy keeps and gathers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from pycls_fast.optim.owned_weights import local
from pycls_fast.plan.activations import Activations, Moment
from pycls_fast.plan.operators import LiveMemory
from pycls_fast.strategies import STRATEGIES


@dataclass(frozen=True)
class Copies:
    """Which copies of weights and gradients a rank holds, in which formats.

    Attributes:
        degree: number of ranks that share one copy.
        reshard_after_forward: weights are gathered block by block (ZeRO-3), not kept (ZeRO-2).
        compute_bytes: bytes of a gathered weight or, if none is gathered, of a weight of the network: below 4, weights
            and gradients exist in this format besides the optimizer's in float32.
        masters_kept: these float32 weights are kept from step to step, not only during the update.
        accumulates: gradients of several microbatches are accumulated before ranks exchange them.
        averaged: an average of all weights is kept.
        state_copies: float32 copies of the trained parameters that the optimizer keeps.
        on_host: weights, gradients and state that the strategy shards, or the optimizer's own copies, are in the host's
            memory.
    """

    strategy: str
    degree: int
    state_copies: float
    reshard_after_forward: bool = True
    compute_bytes: int = 4
    masters_kept: bool = True
    accumulates: bool = False
    averaged: bool = False
    on_host: bool = False

    @property
    def shards(self) -> str:
        """What is divided: "nothing" with one copy for each rank, unless torch's FSDP gathers from that, too."""
        strategy = STRATEGIES[self.strategy]
        return strategy.shards if self.degree > 1 or strategy.has_dtensors else "nothing"

    @property
    def has_buckets(self) -> bool:
        """Whether gradients are views of buffers that are never freed (DDP)."""
        return STRATEGIES[self.strategy].replicates

    @property
    def gradients_exist(self) -> bool:
        """Whether a backward pass adds to gradients in its own format that exist before it, at least in the end."""
        is_whole = self.shards == "state" or (self.shards == "nothing" and self.compute_bytes == 4)
        return self.has_buckets or (self.accumulates and is_whole)


@dataclass(frozen=True)
class Sizes:
    """A network in numbers of elements: all, those with gradients and state, those of the largest block, those of the
    largest trained tensor; and the bytes of its buffers."""

    parameters: int
    trained: int
    largest_unit: int
    largest_tensor: int = 0
    buffer_bytes: int = 0

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> Sizes:
        """The sizes of parameters and buffers, this rank's parts of them, as one unit."""
        own = [(local(tensor), isinstance(tensor, nn.Parameter), tensor.requires_grad) for tensor in tensors]
        trained = [part.numel() for part, _, is_trained in own if is_trained]
        total = sum(part.numel() for part, is_parameter, _ in own if is_parameter)
        buffers = sum(part.nbytes for part, is_parameter, _ in own if not is_parameter)
        return cls(total, sum(trained), total, max(trained, default=0), buffers)

    @classmethod
    def together(cls, units: Sequence[Sizes], ends: Sequence[Sizes]) -> Sizes:
        """The sizes of units and of what is around them, which is none."""
        parts = [*units, *ends]
        return cls(
            sum(part.parameters for part in parts),
            sum(part.trained for part in parts),
            max((unit.parameters for unit in units), default=0),
            max((part.largest_tensor for part in parts), default=0),
            sum(part.buffer_bytes for part in parts),
        )


@dataclass(frozen=True)
class State:
    """Bytes of a rank besides activations.

    Attributes:
        kept: from step to step: weights, average, optimizer state, and DDP's buckets.
        accumulated: gradients that exist during the passes of the last microbatch, beyond what is kept.
        grows: the share of a block's gradients that stays after its backward pass.
        updating: weights, gradients and state during the update, without the optimizer's temporaries.
        taking: the most of these while gradients are handed to the optimizer.
    """

    kept: float
    accumulated: float
    grows: float
    updating: float
    taking: float = 0.0


class PassPeak(NamedTuple):
    """The most bytes at any time in a pass, besides what a rank keeps from step to step.

    Two are compared by their `total`, in which the other numbers are included.
    """

    total: float
    gathered: float
    """Whole weights, and gradients to be sent."""
    gradients: float


@dataclass(frozen=True)
class Temporaries:
    """What an optimizer's step allocates and frees.

    Attributes:
        per_byte: bytes for each byte of all trained parameters.
        per_largest_byte: bytes for each byte of the largest one.
    """

    per_byte: float = 0.0
    per_largest_byte: float = 0.0

    def bytes(self, sizes: Sizes) -> float:
        """Bytes for a network of these sizes."""
        return 4.0 * (self.per_byte * sizes.trained + self.per_largest_byte * sizes.largest_tensor)


@dataclass(frozen=True)
class Peak:
    """The most bytes of a rank at any time in a step, by what they are at that time.

    Attributes:
        optimizer: its state and temporaries, and the average of the weights.
        activations: inputs and all else that passes need.
        gathered: whole weights, and gradients to be sent, of a rank that owns a share.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float

    @property
    def total(self) -> float:
        """All of them."""
        return sum(vars(self).values())


def state(sizes: Sizes, copies: Copies) -> State:
    """What a rank keeps under a strategy, and when gradients exist."""
    parameters, trained, degree = sizes.parameters, sizes.trained, copies.degree
    average = 4.0 * parameters * copies.averaged
    optimizer = 4.0 * trained * copies.state_copies
    gradients, half = 4.0 * trained, copies.compute_bytes < 4
    if copies.shards == "weights":
        if copies.on_host:
            return State(sizes.buffer_bytes, 0.0, 0.0, sizes.buffer_bytes)
        # Each tensor is padded to a multiple of the degree, which is next to nothing.
        kept = sizes.buffer_bytes + (4.0 * parameters + average + optimizer) / degree
        share = gradients / degree
        return State(kept, share * copies.accumulates, 0.0 if copies.accumulates else 1 / degree, kept + share)
    if copies.shards == "state":
        # The average holds whole weights. Each gradient is sent to its owner as soon as it is computed, one block's at
        # a time; with accumulation all are kept until the last microbatch.
        kept = sizes.buffer_bytes + 4.0 * parameters + average + optimizer / degree
        sent = min(gradients / degree + 4.0 * min(sizes.largest_unit, trained), gradients)
        if copies.accumulates:
            return State(kept, gradients, 0.0, kept + gradients)
        return State(kept, 0.0, 1 / degree, kept + sent)
    if copies.on_host:
        optimizer = 0.0
    kept = sizes.buffer_bytes + copies.compute_bytes * parameters + average + optimizer
    masters = 4.0 * parameters if half else 0.0
    kept += masters * copies.masters_kept
    own = float(copies.compute_bytes * trained)
    if copies.has_buckets:
        kept += own
    # Masters take the network's gradients in float32 after the backward pass (under `single`, after each microbatch).
    # DDP has them in its buckets only after the last microbatch, to which those of the others are new tensors.
    taken = gradients + masters * (not copies.masters_kept)
    accumulated = copies.accumulates * (own if copies.has_buckets else taken)
    grows = 0.0 if copies.gradients_exist else 1.0
    # Until then, the network's own gradients exist beside those of the masters.
    updating = kept + (taken if half else own * (not copies.has_buckets))
    taking = updating + (own if half and not copies.has_buckets else 0.0)
    return State(kept, accumulated, grows, updating, taking)


def peak(
    activations: Activations,
    sizes: Sizes,
    copies: Copies,
    *,
    inputs: float,
    temporaries: Temporaries,
) -> Peak:
    """The most bytes that a rank has at any time in a step.

    Args:
        activations: of one microbatch, measured with `copies.gradients_exist`.
        inputs: bytes of batches on the device, in addition to the network's input.
        temporaries: the optimizer's.
    """
    held = state(sizes, copies)
    most = max(passes(activations, sizes, copies, held.grows))
    return _fullest(sizes, copies, held, most, inputs, inputs + activations.input, temporaries)


def pipelined_peak(
    stages: Mapping[int, Activations],
    order: Iterable[Any],
    sizes: Sizes,
    copies: Copies,
    *,
    inputs: float,
    temporaries: Temporaries,
) -> Peak:
    """The same for a rank of a pipeline.

    Args:
        stages: of this rank, a microbatch's (`Activations.stage`).
        order: its actions (`parallel.pipeline.orders`).
        sizes: of its stages together.
        inputs: bytes of batches and images of all microbatches.
    """
    # Masters take the network's gradients after the last microbatch.
    held = replace(state(sizes, copies), accumulated=float(copies.compute_bytes * sizes.trained))
    gathers = grown = 0.0
    if copies.shards == "weights":
        # FSDP in a stage keeps whole weights, and adds up whole gradients until the last microbatch.
        held = replace(held, accumulated=0.0)
        gathers, grown = float(copies.compute_bytes * sizes.parameters), 4.0 * sizes.trained
    # Whole weights are there already.
    plain = replace(copies, strategy="single")
    peaks = {index: passes(stage, sizes, plain, grows=0.0) for index, stage in stages.items()}
    forward = {index: each.total for index, (each, _) in peaks.items()}
    backward = {index: each.total for index, (_, each) in peaks.items()}
    waits = {index: stage.held(len(stage.blocks)) + stage.ends for index, stage in stages.items()}
    # Between the halves of a backward pass, the gradients of the products' outputs are kept as well.
    halves = {index: sum(block.products for block in stage.blocks) for index, stage in stages.items()}
    others, highest = 0.0, 0.0
    for action in order:
        kind, index = (action.computation_type.name, action.stage_index) if action else ("", 0)
        if kind == "FORWARD":
            highest = max(highest, others + forward[index])
            others += waits[index]
        elif kind in ("FULL_BACKWARD", "BACKWARD_INPUT"):
            others -= waits[index]
            highest = max(highest, others + backward[index])
            others += (waits[index] + halves[index]) * (kind == "BACKWARD_INPUT")
        elif kind == "BACKWARD_WEIGHT":
            highest = max(highest, others)
            others -= waits[index] + halves[index]
    most = PassPeak(highest + gathers + grown, gathers, grown)
    return _fullest(sizes, copies, held, most, inputs, inputs, temporaries)


def _fullest(
    sizes: Sizes,
    copies: Copies,
    held: State,
    most: PassPeak,
    inputs: float,
    inputs_at_update: float,
    temporaries: Temporaries,
) -> Peak:
    """The larger of the peaks of the passes, `most`, and of the update with the optimizer's temporaries."""
    plain = replace(copies, state_copies=0.0, averaged=False)
    without, weights = state(sizes, plain).kept, state(replace(sizes, trained=0), plain).kept
    optimizer, buckets = held.kept - without, without - weights
    computing = Peak(
        weights=weights,
        gradients=buckets + held.accumulated + most.gradients,
        optimizer=optimizer,
        activations=inputs + most.total - most.gathered - most.gradients,
        gathered=most.gathered,
    )
    transient = temporaries.bytes(sizes) / (1 if copies.shards != "weights" else copies.degree)
    gradients = max(held.taking, held.updating) - held.kept
    optimizer += max(held.updating + (0.0 if copies.on_host else transient) - held.kept - gradients, 0.0)
    updating = Peak(weights, buckets + gradients, optimizer, inputs_at_update, 0.0)
    return max(computing, updating, key=lambda each: each.total)


def passes(activations: Activations, sizes: Sizes, copies: Copies, grows: float) -> tuple[PassPeak, PassPeak]:
    """The peaks of a microbatch's forward pass and of its backward pass.

    Args:
        grows: see `State`.
    """
    blocks = activations.blocks
    # The gradients of the blocks from the i-th on.
    gradients = [*accumulate((block.gradients for block in reversed(blocks)), initial=0)][::-1]
    # Blocks are frozen from the first on, if any are.
    kept = [activations.held(count) for count in range(len(blocks) + 1)]
    forward = backward = PassPeak(0.0, 0.0, 0.0)
    for moment in activations.moments:
        index, during = moment.begins, 0.0
        grown = grows * gradients[moment.done] if moment.backward else 0.0
        if index is not None:
            block = blocks[index]
            during = block.backward - block.held if moment.backward else block.forward
        gathers = gathered(activations, sizes, copies, moment)
        total = moment.outside + kept[moment.done] + grown + during + gathers
        now = PassPeak(total, gathers, grown)
        if moment.backward:
            backward = max(backward, now)
        else:
            forward = max(forward, now)
    return forward, backward


def gathered(activations: Activations, sizes: Sizes, copies: Copies, moment: Moment) -> float:
    """Bytes of whole weights and gradients, at a moment, on a rank that owns a share of each."""
    if copies.shards != "weights":
        return 0.0
    blocks, index, done = activations.blocks, moment.begins, moment.done
    weights: float = sizes.parameters - sum(block.parameters for block in blocks)

    def size(at: int) -> int:
        return blocks[at].parameters if 0 <= at < len(blocks) else 0

    if not copies.reshard_after_forward:
        weights += sum(block.parameters for block in blocks[: done if moment.backward else done + 1])
    elif index is not None:
        weights += size(index)
    elif done == len(blocks):
        # The last block is needed again at once.
        weights += size(done - 1)
    # What a gather receives, this block's or the next one's, is copied into the weights.
    buffers = 0 if index is None else max(size(index), size(index + (-1 if moment.backward else 1)))
    total = copies.compute_bytes * (weights + buffers)
    if moment.backward and index is not None:
        # Gradients are sent in float32, from a buffer that lives until the next block's.
        total += 4.0 * (blocks[index + 1].trained if index + 1 < len(blocks) else 0)
    return total


def optimizer_temporaries(make: Callable[[list[nn.Parameter]], Optimizer], side: int = 64) -> Temporaries:
    """The temporaries of an optimizer's step, measured on a few small tensors."""

    def most(count: int) -> int:
        parameters = [nn.Parameter(torch.zeros(side, side)) for _ in range(count)]
        optimizer = make(parameters)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        # The first one allocates the state.
        optimizer.step()
        state = [value for value in tree_leaves(dict(optimizer.state)) if isinstance(value, Tensor)]
        with LiveMemory([*parameters, *(p.grad for p in parameters if p.grad is not None), *state]) as memory:
            optimizer.step()
        return memory.peak

    few, many = most(2), most(4)
    size = 4 * side * side
    per_byte = max(many - few, 0) / (2 * size)
    return Temporaries(per_byte, max(few / size - 2 * per_byte, 0.0))
