"""Randomness by counter: a seed is a pure function of where in the run it is used.

No generator state is carried from one sample or step to the next, so results do not depend on the number of
workers or ranks, and a restart needs nothing but the step it starts from.
"""

from __future__ import annotations

from typing import Any

_MASK = (1 << 64) - 1


def mixed(value: Any) -> Any:
    """The output function of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).

    Args:
        value: an integer in [0, 2**64), or an array of uint64.
    """
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def counter_seed(*counters: int) -> int:
    """Hash integers to a seed in [0, 2**63): the same on every machine, well mixed for neighbouring counters."""
    state = len(counters)
    for counter in counters:
        state = mixed((state + 0x9E3779B97F4A7C15 + (counter & _MASK)) & _MASK)
    return state >> 1


def microbatch_seed(seed: int, *, step: int, position: int, rank: int) -> int:
    """The seed of what is drawn for a microbatch as a whole: mixing, erasing noise, drop-path.

    Args:
        seed: the run's.
        step: counted from the start of the run.
        position: the microbatch's position in its step.
        rank: data-parallel rank.
    """
    return counter_seed(seed, step, position, rank)
