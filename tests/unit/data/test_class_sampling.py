"""How often classes and images come in an epoch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pycls_fast.config import load_config
from pycls_fast.data.choices import Augment
from pycls_fast.data.dataset import ImageDataset
from pycls_fast.data.sampling import TrainSampler, class_order, order_of
from pycls_fast.data.sources.arrays import SyntheticImages
from pycls_fast.data.sources.base import Images
from pycls_fast.data.transforms import TrainTransform
from pycls_fast.errors import UserError

# 1, 10, 100 and no images; mixed up, so that positions say nothing.
LABELS = np.random.RandomState(0).permutation(np.repeat([0, 1, 2, 4], [1, 10, 100, 9])).astype(np.int64)


def counts(order: np.ndarray) -> np.ndarray:
    return np.bincount(LABELS[order % 120], minlength=5)


def test_balanced_gives_each_class_its_share() -> None:
    order = class_order(1, 2, LABELS, power=0.0)
    assert len(order) == len(LABELS) == 120
    assert counts(order).tolist() == [30, 30, 30, 0, 30]
    # Every image of a class as often as any other, or once more.
    for label in (0, 1, 2, 4):
        times = np.bincount(order % 120, minlength=120)[label == LABELS]
        assert times.max() - times.min() <= 1


def test_square_root_lies_between() -> None:
    found = np.mean([counts(class_order(0, epoch, LABELS, power=0.5)) for epoch in range(50)], axis=0)
    shares = np.sqrt([1, 10, 100, 0, 9])
    assert found == pytest.approx(120 * shares / shares.sum(), abs=0.3)


def test_power_one_is_every_image_once() -> None:
    assert sorted(class_order(3, 1, LABELS, power=1.0)) == list(range(120))


def test_a_function_of_its_arguments() -> None:
    same = class_order(1, 2, LABELS, power=0.0)
    assert (class_order(1, 2, LABELS, power=0.0) == same).all()
    assert (class_order(1, 3, LABELS, power=0.0) != same).any()
    assert (class_order(2, 2, LABELS, power=0.0) != same).any()
    # Not class after class.
    assert len(set(LABELS[same[:20] % 120])) > 2


def test_epochs_together_visit_all_images() -> None:
    seen = {i for epoch in range(30) for i in (class_order(0, epoch, LABELS, power=0.0) % 120).tolist()}
    assert seen == set(range(120))


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
    dataset = ImageDataset(Coloured(), TrainTransform(Augment(), image_size=8), training=True, repeats=3 * 120)
    pictures = {dataset[0, index].image_HWC.tobytes() for index in shown}
    assert len(pictures) == len(shown)


class Coloured(Images):
    """120 pictures of noise, the same bytes each."""

    labels = LABELS
    picture = np.random.RandomState(0).randint(0, 256, (40, 40, 3)).astype(np.uint8)

    def read(self, index: int) -> tuple[np.ndarray, int]:
        return self.picture, int(LABELS[index])


def test_ranks_and_restarts_see_the_same_images() -> None:
    def keys(rank: int, ranks: int, start: int) -> list[list[tuple[int, int]]]:
        sampler = TrainSampler(
            120, seed=5, global_batch_size=12, rank=rank, world_size=ranks, start_step=start, total_steps=25,
            order=lambda seed, epoch: class_order(seed, epoch, LABELS, power=0.0),
        )  # fmt: skip
        return [list(batch) for batch in sampler]

    alone = keys(0, 1, 0)
    assert [a + b for a, b in zip(keys(0, 2, 0), keys(1, 2, 0), strict=True)] == alone
    assert keys(0, 1, 13) == alone[13:]


def test_the_configuration_chooses_and_refuses() -> None:
    source = SyntheticImages(4, 8, 2, seed=0)
    source.labels = np.array([0, 1, 1, 1])
    config = load_config("vit_digits", ["data.sampling=balanced"])
    order = order_of(source, config.data, 1)
    assert order is not None
    assert np.bincount(source.labels[order(0, 0) % 4]).tolist() == [2, 2]
    assert order_of(source, load_config("vit_digits").data, 1) is None
    with pytest.raises(UserError, match=r"data.sampling: visits images in any order, but data.shuffle=blocks"):
        load_config("vit_digits", ["data.sampling=balanced", "data.shuffle=blocks"])
