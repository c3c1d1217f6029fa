"""How many steps a timing's turn takes if it has to last a while."""

from __future__ import annotations

import math

from pycls_fast.ledger.parts import Part, Turn, slowest
from pycls_fast.parallel import World


def turn_length(part: Part, world: World, steps: int, seconds: float) -> int:
    """Steps of a turn that lasts at least `seconds` and has at least `steps`; the same on all ranks.

    Steps are run to find out, until half of `seconds` has passed: clocks and power take a while to settle under load.
    With `seconds` 0, none are.

    Args:
        part: warmed up as far as kernels and memory go.
        world: its ranks.
        steps: the fewest steps.
        seconds: the shortest time.
    """
    if not seconds:
        return steps
    turn = slowest(part.turn(1), world)
    warm = turn.total
    while warm < seconds / 2:
        turn = slowest(part.turn(_steps_within(seconds / 2 - warm, turn)), world)
        warm += turn.total
    return max(steps, _steps_within(seconds, turn))


def _steps_within(seconds: float, turn: Turn) -> int:
    """Number of steps, as long as the turn's, that take at least `seconds`."""
    return max(math.ceil(seconds * len(turn.seconds) / max(turn.total, 1e-9)), 1)
