"""Who sees what when: exactly the epoch, for any number of ranks and any place to resume; how often classes come."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pycls_fast.data.choices import Augment
from pycls_fast.data.dataset import ImageDataset
from pycls_fast.data.sampling import EvalSampler, Key, TrainSampler, block_order, class_order, epoch_order, order_of
from pycls_fast.data.sources.arrays import SyntheticImages
from pycls_fast.data.transforms import TrainTransform
from tests.factories import config_of


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
    orders = [epoch_order(seed, epoch, 101).tolist() for seed in range(3) for epoch in range(4)]
    assert all(sorted(order) == list(range(101)) for order in orders)
    assert len(set(map(tuple, orders))) == 12


@settings(max_examples=60, deadline=None)
@given(
    world_size=st.integers(1, 5), accumulation_steps=st.integers(1, 3), microbatch=st.integers(1, 4),
    spare=st.integers(0, 70), seed=st.integers(0, 2**62), data=st.data(),
)  # fmt: skip
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


def test_block_order_reads_few_shards_at_a_time() -> None:
    """Each rank of 4 touches a quarter of the shards, in runs; every epoch has another order."""
    sizes = np.random.default_rng(0).integers(80, 120, 256)
    ends = np.cumsum(sizes)
    count, batch = int(ends[-1]), 256
    order = block_order(1, 0, ends, buffer=640, global_batch_size=batch)
    np.testing.assert_array_equal(np.sort(order), np.arange(count))
    assert not np.array_equal(order, block_order(1, 1, ends, buffer=640, global_batch_size=batch))
    np.testing.assert_array_equal(order, block_order(1, 0, ends, buffer=640, global_batch_size=batch))
    steps = count // batch
    shard = np.searchsorted(ends, order[: steps * batch], side="right").reshape(steps, 4, batch // 4)
    for rank in range(4):
        own = shard[:, rank]
        assert len(np.unique(own)) <= 256 // 4 + 17, "about a quarter, and the ends of 16 lanes"
        for first in range(0, steps - 5, 5):
            # 16 lanes, of which each needs the shard it is in and the next.
            assert len(np.unique(own[first : first + 5])) <= 16 * 3
    # Shards come in another order in each epoch.
    other = block_order(1, 1, ends, buffer=640, global_batch_size=batch)
    first, second = (set(np.searchsorted(ends, own[:batch], side="right").tolist()) for own in (order, other))
    assert len(first & second) < len(first) / 2
    # Within a lane the shard's own order is gone.
    lane = order[: steps * batch].reshape(steps, batch)[:, :4].reshape(-1)
    assert np.mean(np.diff(lane) == 1) < 0.3


# 1, 10, 100 and no images; mixed up, so that positions say nothing.
LABELS = np.random.RandomState(0).permutation(np.repeat([0, 1, 2, 4], [1, 10, 100, 9])).astype(np.int64)


def test_an_order_of_classes_is_one_of_its_seed_and_epoch() -> None:
    orders = [class_order(*own, LABELS, power=0.0).tolist() for own in ((1, 2), (1, 2), (1, 3), (2, 2))]
    assert [orders.index(order) for order in orders] == [0, 0, 2, 3]
    # Not class after class.
    assert len(set(LABELS[np.array(orders[0][:20]) % 120])) > 2


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.integers(0, 9))
def test_any_labels(labels: list[int], power: float, epoch: int) -> None:
    order = class_order(0, epoch, np.array(labels), power=power)
    assert len(order) == len(labels)
    assert order.min() >= 0
    # Never the same sample twice.
    assert len(set(order.tolist())) == len(labels)
    have = np.bincount(labels)
    shares = np.where(have > 0, have**power, 0.0)
    expected = len(labels) * shares / shares.sum()
    assert (np.abs(np.bincount(np.array(labels)[order % len(labels)], minlength=len(have)) - expected) < 1 + 1e-9).all()


def test_what_comes_again_is_augmented_anew() -> None:
    """Also under repeated augmentation, where an image has copies of its own: 1 is shown 30 times in 3 copies."""
    sampler = TrainSampler(
        120, seed=5, global_batch_size=120, total_steps=1, repeats=3,
        order=lambda seed, epoch: class_order(seed, epoch, LABELS, power=0.0, repeats=3),
    )  # fmt: skip
    (keys,) = sampler
    assert len(set(keys)) == 120
    (lonely,) = np.flatnonzero(LABELS == 0)
    shown = [index for _, index in keys if index % 120 == lonely]
    assert len(shown) > 20
    transform = TrainTransform(Augment(), image_size=8)
    dataset = ImageDataset(SyntheticImages(120, 40, 5, seed=0), transform, training=True)
    pictures = {dataset[0, index].image_HWC.tobytes() for index in shown}
    assert len(pictures) == len(shown)


def test_the_configuration_chooses_and_refuses() -> None:
    source = SyntheticImages(4, 8, 2, seed=0)
    source.labels = np.array([0, 1, 1, 1])
    config = config_of("data.sampling=balanced")
    name, order = order_of(source, config.data, repeats=3)
    assert name == "classes"
    assert order is not None
    assert np.bincount(source.labels[order(0, 0) % 4]).tolist() == [2, 2]
    # The image that comes again is behind the three copies of all.
    assert order(0, 0).max() == 3 * 4
    assert order_of(source, config_of().data) == ("full", None)
