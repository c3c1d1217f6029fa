"""Randomness by counter: a seed is a pure function of where in the run it is used.

No generator state is carried from one sample or step to the next, so samples do not depend on the number of workers
or ranks (mixing, erasing's noise and drop-path depend on the rank), and a restart needs nothing but the step that it
starts from.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch

_MASK = (1 << 64) - 1


def mixed(value: Any) -> Any:
    """The output function of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).

    `value` is an integer in [0, 2**64), or an array of uint64.
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

    `position` is the microbatch's in its step, `rank` the data-parallel one.
    """
    return counter_seed(seed, step, position, rank)


def frozen_generator(seed: int) -> np.random.RandomState:
    """A NumPy generator for a seed in [0, 2**63).

    `RandomState` is the one generator whose stream NumPy promises never to change (NEP 19), so a resumed run keeps its
    order of samples after an upgrade. It takes 32-bit words, hence the two halves.
    """
    import numpy as np

    return np.random.RandomState(np.array([seed & 0xFFFFFFFF, seed >> 32], dtype=np.uint32))


def generators(device: torch.device) -> list[torch.Generator]:
    """Those of the CPU and of `device`, from which a training step draws."""
    import torch

    return [torch.default_generator, *([torch.cuda.default_generators[device.index]] if device.type == "cuda" else [])]


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed `generators(device)`.

    The streams are those after `torch.manual_seed`, which costs more: it formats the Python stack once for each kind of
    accelerator that is not in use.
    """
    for generator in generators(device):
        generator.manual_seed(seed)


@contextmanager
def seeded_torch(seed: int) -> Iterator[None]:
    """Seed torch's default CPU generator within the block; restore its state afterwards.

    torchvision's transforms always draw from that generator. `torch.manual_seed` is avoided because it also seeds the
    accelerators' generators, which belong to the training step.
    """
    import torch

    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)
