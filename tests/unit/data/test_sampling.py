"""Who sees what when: exactly the epoch, for any number of ranks and any place to resume."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pycls_fast.data.sampling import EvalSampler, Key, TrainSampler, epoch_order


def global_steps(world_size: int, accumulation_steps: int = 1, **options: int) -> list[list[Key]]:
    """The keys of each step, in order: microbatch after microbatch, rank after rank."""
    ranks = [
        list(TrainSampler(rank=rank, world_size=world_size, accumulation_steps=accumulation_steps, **options))
        for rank in range(world_size)
    ]
    steps = len(ranks[0]) // accumulation_steps
    return [
        [
            key
            for position in range(step * accumulation_steps, (step + 1) * accumulation_steps)
            for batches in ranks
            for key in batches[position]
        ]
        for step in range(steps)
    ]


def test_epoch_order_is_a_permutation_of_its_own() -> None:
    orders = {}
    for seed in range(3):
        for epoch in range(4):
            order = epoch_order(seed, epoch, 101)
            assert order.dtype == np.int64
            np.testing.assert_array_equal(np.sort(order), np.arange(101))
            np.testing.assert_array_equal(order, epoch_order(seed, epoch, 101))
            orders[tuple(order.tolist())] = (seed, epoch)
    assert len(orders) == 12
    assert epoch_order(0, 0, 1).tolist() == [0]


def test_epoch_order_is_well_mixed() -> None:
    """Each image comes to each place equally often (chi-squared over 6 places, 25 degrees of freedom)."""
    count, trials = 6, 3000
    table = np.zeros((count, count))
    for epoch in range(trials):
        table[np.arange(count), epoch_order(7, epoch, count)] += 1
    expected = trials / count
    assert ((table - expected) ** 2 / expected).sum() < 60


@settings(max_examples=60, deadline=None)
@given(
    world_size=st.integers(1, 5),
    accumulation_steps=st.integers(1, 3),
    microbatch=st.integers(1, 4),
    spare=st.integers(0, 70),
    seed=st.integers(0, 2**62),
    data=st.data(),
)
def test_ranks_together_see_exactly_the_epochs(
    world_size: int, accumulation_steps: int, microbatch: int, spare: int, seed: int, data: st.DataObject
) -> None:
    batch = world_size * accumulation_steps * microbatch
    count = batch + spare
    steps_per_epoch = count // batch
    total_steps = 2 * steps_per_epoch + data.draw(st.integers(0, steps_per_epoch))
    options = {"count": count, "seed": seed, "global_batch_size": batch, "total_steps": total_steps}
    steps = global_steps(world_size, accumulation_steps, start_step=0, **options)
    assert len(steps) == total_steps
    for step, keys in enumerate(steps):
        assert len(keys) == batch
        assert {epoch for epoch, _ in keys} == {step // steps_per_epoch}
    for epoch in range(2):
        seen = [key for keys in steps[epoch * steps_per_epoch : (epoch + 1) * steps_per_epoch] for key in keys]
        kept = epoch_order(seed, epoch, count)[: steps_per_epoch * batch]
        assert seen == [(epoch, index) for index in kept.tolist()]
        assert len(set(seen)) == len(seen)
    # One rank, no accumulation: the same steps.
    assert global_steps(1, start_step=0, **options) == steps
    # From any step on: the rest of the same run.
    start = data.draw(st.integers(0, total_steps))
    assert global_steps(world_size, accumulation_steps, start_step=start, **options) == steps[start:]


def test_ranks_have_contiguous_parts_of_every_microbatch() -> None:
    order = epoch_order(5, 0, 30)
    sampler = TrainSampler(
        30,
        seed=5,
        global_batch_size=24,
        rank=1,
        world_size=2,
        start_step=0,
        total_steps=1,
        accumulation_steps=3,
    )
    assert sampler.steps_per_epoch == 1
    assert len(sampler) == 3
    indices = [[index for _, index in batch] for batch in sampler]
    assert indices == [order[4:8].tolist(), order[12:16].tolist(), order[20:24].tolist()]


@pytest.mark.parametrize("repeats", [3, 4])
@pytest.mark.parametrize(("world_size", "accumulation_steps"), [(1, 1), (2, 1), (8, 1), (1, 4), (2, 2)])
def test_no_image_is_mixed_with_its_own_copy(repeats: int, world_size: int, accumulation_steps: int) -> None:
    """`Mixer` mixes each image of a rank's microbatch with the one before it."""
    count, batch = 1000, 64
    options = {"seed": 3, "global_batch_size": batch, "total_steps": 30, "repeats": repeats}
    steps = global_steps(world_size, accumulation_steps, count=count, **options)
    share = batch // world_size // accumulation_steps
    for keys in steps:
        images = np.array([position % count for _, position in keys]).reshape(-1, share)
        assert (images != np.roll(images, 1, axis=1)).all()
    assert global_steps(1, count=count, **options) == steps
    assert global_steps(world_size, accumulation_steps, count=count, start_step=17, **options) == steps[17:]
    seen = [position for keys in steps[:15] for _, position in keys]
    assert len(set(seen)) == len(seen)
    assert len({position % count for position in seen}) == -(-len(seen) // repeats)


def test_length_counts_what_is_left() -> None:
    sampler = TrainSampler(10, seed=0, global_batch_size=4, start_step=3, total_steps=9, accumulation_steps=2)
    assert len(sampler) == len(list(sampler)) == 12
    assert len(list(sampler)) == 12, "a second iteration starts over"


def test_epochs_differ() -> None:
    steps = global_steps(1, count=64, seed=0, global_batch_size=64, start_step=0, total_steps=2)
    first, second = ([index for _, index in keys] for keys in steps)
    assert first != second
    assert sorted(first) == sorted(second)


@settings(max_examples=100, deadline=None)
@given(count=st.integers(0, 200), batch_size=st.integers(1, 20), world_size=st.integers(1, 9))
def test_evaluation_sees_every_image_once(count: int, batch_size: int, world_size: int) -> None:
    ranks = [
        list(EvalSampler(count, batch_size=batch_size, rank=rank, world_size=world_size)) for rank in range(world_size)
    ]
    seen = [key for batches in ranks for batch in batches for key in batch]
    assert sorted(seen) == [(0, index) for index in range(count)]
    assert all(len(batch) <= batch_size for batches in ranks for batch in batches)
    lengths = {len(batches) for batches in ranks}
    assert lengths == {-(-count // (batch_size * world_size))}, "ranks would fall out of step"
    assert lengths == {len(EvalSampler(count, batch_size=batch_size, rank=0, world_size=world_size))}
    for batches in zip(*ranks, strict=True):
        sizes = [len(batch) for batch in batches]
        assert max(sizes) - min(sizes) <= 1
