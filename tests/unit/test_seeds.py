"""Seeds by counter: the same for ever, no two alike, every counter and its place taken in."""

from __future__ import annotations

import itertools
import traceback

import pytest
import torch

from pycls_fast.seeds import counter_seed, microbatch_seed, seed_generators


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
