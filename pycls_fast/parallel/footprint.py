"""Memory per rank for weights, gradients and optimizer state, by strategy, without activations."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pycls_fast.strategies import STRATEGIES


@dataclass(frozen=True)
class Copies:
    """Which copies of weights and gradients a rank holds, in which formats.

    Attributes:
        strategy: a name of `STRATEGIES`.
        degree: number of ranks that share one copy.
        reshard_after_forward: weights are gathered block by block (ZeRO-3), not kept (ZeRO-2).
        compute_bytes: bytes of a gathered weight or, if none is gathered, of a weight of the network: below 4, weights
            and gradients exist in this format besides the optimizer's in float32.
        autocast_bytes: bytes per weight of the copy that autocast makes in the forward pass; it is kept for the
            backward pass, and no strategy shards it.
        recomputes: blocks are recomputed in the backward pass, so that only one block's copies are alive at a time.
        accumulates: gradients of several microbatches are accumulated before ranks exchange them.
    """

    strategy: str
    degree: int
    reshard_after_forward: bool = True
    compute_bytes: int = 4
    autocast_bytes: int = 0
    recomputes: bool = False
    accumulates: bool = False


def footprint(
    parameters: int,
    largest_unit: int,
    copies: Copies,
    *,
    state_copies: float,
    trained: int | None = None,
    reached: int | None = None,
    averaged: bool = False,
) -> float:
    """Bytes that a rank needs at the peak of a step, without activations.

    Args:
        parameters: parameters of the network.
        largest_unit: parameters of its largest block.
        copies: what the rank holds of them.
        state_copies: float32 copies of the trained parameters that the optimizer keeps.
        trained: parameters that have gradients and state; None: all.
        reached: parameters that the backward pass reaches, from the first trained one on; None: all.
        averaged: an average of all weights is kept.
    """
    trained = parameters if trained is None else trained
    reached = parameters if reached is None else reached
    shards, degree, compute_bytes = STRATEGIES[copies.strategy].shards, copies.degree, copies.compute_bytes
    weights = 4.0 * parameters * (1 + averaged)
    gradients, state = 4.0 * trained, 4.0 * trained * state_copies
    casts = float(copies.autocast_bytes * (min(largest_unit, reached) if copies.recomputes else reached))
    if shards == "nothing" or degree == 1:
        halves = float(compute_bytes * (parameters + trained)) if compute_bytes < 4 else 0.0
        return weights + gradients + state + halves + casts
    if shards == "state":
        # The average holds whole weights. Each gradient is sent to its owner as soon as it is computed, one block's at
        # a time; with accumulation all are kept until the last microbatch.
        sent = gradients / degree + 4.0 * min(largest_unit, trained)
        return weights + (gradients if copies.accumulates else min(sent, gradients)) + state / degree + casts
    owned = math.ceil(parameters / degree) * 4 * (1 + averaged) + math.ceil(trained / degree) * 4 * (1 + state_copies)
    # One block's weights and gradients, and the weights of the next one, which is prefetched.
    gathered = (2 * largest_unit if copies.reshard_after_forward else parameters) + min(largest_unit, trained)
    return owned + compute_bytes * gathered + casts
