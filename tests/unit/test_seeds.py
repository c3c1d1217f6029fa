"""Seeds by counter: the same for ever, no two alike, every counter and its place taken in."""

from __future__ import annotations

import itertools
import traceback

import numpy as np
import pytest
import torch

from pycls_fast.seeds import counter_seed, microbatch_seed, seed_generators

MASK = 2**64 - 1


def splitmix64(state: int) -> int:
    """SplitMix64's next() for a state before its increment, in numpy's wrapping arithmetic."""
    with np.errstate(over="ignore"):
        z = np.uint64(state & MASK) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return int(z ^ (z >> np.uint64(31)))


@pytest.mark.parametrize(
    "counters", [(), (0,), (1,), (0, 0), (5, 3, 2**40), (-1,), (-7, 2**63), (2**64 - 1, 2**70 + 3), (1, 2, 3, 4, 5)]
)
def test_it_is_a_chain_of_splitmix64(counters: tuple[int, ...]) -> None:
    state = len(counters)
    for counter in counters:
        state = splitmix64(state + counter)
    assert counter_seed(*counters) == state >> 1


def test_the_reference_generator_is_splitmix64() -> None:
    """The first outputs for state 1234567, which Vigna's C code prints too."""
    state, outputs = 1234567, []
    for _ in range(3):
        outputs.append(splitmix64(state))
        state += 0x9E3779B97F4A7C15
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize(
    ("counters", "seed"),
    [
        # Frozen: runs of the past are resumed and compared with these.
        ((0,), 5225608189600411232),
        ((0, 0), 3617558351911305818),
        ((1, 2, 3), 8119519447357249846),
        ((-1,), 8147104208329303767),
    ],
)
def test_values_never_change(counters: tuple[int, ...], seed: int) -> None:
    assert counter_seed(*counters) == seed


def test_each_microbatch_of_each_rank_has_its_seed() -> None:
    """What is drawn for one is drawn for no other, and again when a run is resumed."""
    assert microbatch_seed(1, step=2, position=3, rank=4) == counter_seed(1, 2, 3, 4) == 814128022664307656
    seeds = {
        microbatch_seed(1, step=step, position=position, rank=rank)
        for step, position, rank in itertools.product(range(2), repeat=3)
    }
    assert len(seeds) == 8


def test_a_seeded_step_draws_as_after_manual_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(7)
    expected = torch.rand(5)
    monkeypatch.setattr(traceback, "format_stack", lambda *_: pytest.fail("torch formats the Python stack"))
    seed_generators(7, torch.device("cpu"))
    assert torch.equal(torch.rand(5), expected)
