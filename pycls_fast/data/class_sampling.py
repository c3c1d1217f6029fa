"""Orders of an epoch in which rare classes come more often than they have images."""

from __future__ import annotations

import numpy as np

from pycls_fast.counter import counter_seed
from pycls_fast.data.draws import frozen_generator


def class_order(seed: int, epoch: int, labels: np.ndarray, *, power: float, repeats: int = 1) -> np.ndarray:
    """An order of as many images as there are, in which a class of n images has a share proportional to `n ** power`.

    0 is class-balanced sampling, 1/2 square-root sampling, 1 would be each image once (Kang et al., Decoupling
    Representation and Classifier for Long-Tailed Recognition, 2020, section 3.1). Instead of drawing each image for
    itself, every class gets its share but for less than one image, and within a class every image comes as often as any
    other, or once more.

    Like `sampling.epoch_order` a function of its arguments alone, whatever the number of workers and ranks.

    Args:
        labels: int64, of each image.
        power: in [0, 1].
        repeats: of the sampler that takes this order.

    Returns:
        Positions, int64, as many as labels. Where an image comes again its position is higher by a multiple of
        `repeats` times the number of images, which tells its augmentations apart (`ImageDataset`).
    """
    generator = frozen_generator(counter_seed(seed, epoch))
    count = len(labels)
    counts = np.bincount(labels)
    shares = np.where(counts > 0, np.power(counts.astype(np.float64), power), 0.0)
    ends = np.cumsum(shares) * (count / shares.sum())
    ends[-1] = count
    # Rounded with one random offset for all: averaged over epochs each class gets its share (systematic sampling).
    borders = np.floor(np.concatenate([[0.0], ends]) + generator.random_sample()).astype(np.int64)
    quotas = np.diff(borders)
    by_class = np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])
    drawn = [_drawn(images, quota, generator) for images, quota in zip(by_class, quotas.tolist(), strict=True)]
    order = generator.permutation(np.concatenate(drawn).astype(np.int64))
    return order + _times_before(order) * (count * repeats)


def _times_before(order: np.ndarray) -> np.ndarray:
    """How often each place's image has come before it."""
    by_image = np.argsort(order, kind="stable")
    _, first, times = np.unique(order[by_image], return_index=True, return_counts=True)
    before = np.empty_like(order)
    before[by_image] = np.arange(len(order)) - np.repeat(first, times)
    return before


def _drawn(images: np.ndarray, quota: int, generator: np.random.RandomState) -> np.ndarray:
    """Whole rounds of all images, then a random part of one."""
    if not quota:
        return images[:0]
    rounds, rest = divmod(quota, len(images))
    return np.concatenate([np.tile(images, rounds), generator.permutation(images)[:rest]])
