"""What a rank holds of weights, gradients and optimizer state, by strategy; activations come on top."""

from __future__ import annotations

import math


def footprint(
    parameters: int,
    largest_unit: int,
    *,
    state_copies: float,
    strategy: str = "single",
    degree: int = 1,
    reshard_after_forward: bool = True,
    compute_bytes: int = 4,
    autocast_bytes: int = 0,
    recomputes: bool = False,
) -> float:
    """Bytes a rank needs at the peak of a step.

    Args:
        parameters: of the network.
        largest_unit: parameters of its largest block.
        state_copies: float32 copies that optimizer and average keep.
        strategy: a name of `STRATEGIES`.
        degree: ranks that have one copy between them.
        reshard_after_forward: weights are gathered block by block (ZeRO-3), not kept (ZeRO-2).
        compute_bytes: of a gathered weight.
        autocast_bytes: of the copy of a weight that autocast makes in the forward pass; it is kept for the backward
            pass, and no strategy divides it.
        recomputes: blocks are computed again in the backward pass, so that one block's copies are alive at a time.
    """
    whole = 4.0 * parameters
    casts = float(autocast_bytes * (largest_unit if recomputes else parameters))
    if strategy in ("single", "ddp") or degree == 1:
        return whole * (2 + state_copies) + casts
    if strategy == "fairscale_sharded_ddp":
        return whole * (2 + state_copies / degree) + casts
    shards = 4.0 * math.ceil(parameters / degree) * (2 + state_copies)
    # A block's weights and their gradients, and the weights of the next one, which is gathered meanwhile.
    gathered = compute_bytes * (3 * largest_unit if reshard_after_forward else parameters + largest_unit)
    return shards + gathered + casts
