"""Epoch orders that oversample rare classes."""

from __future__ import annotations

import numpy as np

from pycls_fast.counter import counter_seed
from pycls_fast.data.draws import frozen_generator


def class_order(seed: int, epoch: int, labels: np.ndarray, *, power: float, repeats: int = 1) -> np.ndarray:
    """An epoch order of the usual length in which a class of n images has a share proportional to `n ** power`.

    0 is class-balanced sampling, 1/2 square-root sampling, 1 would be each image once (Kang et al., Decoupling
    Representation and Classifier for Long-Tailed Recognition, 2020, section 3.1). Images are not drawn independently:
    every class gets its share to within one image, and within a class the images' counts differ by at most one.

    Like `sampling.epoch_order`, it depends only on its arguments, not on the number of workers and ranks.

    Args:
        labels: int64, one per image.
        power: in [0, 1].
        repeats: that of the sampler that uses this order.

    Returns:
        Positions, int64, as many as labels. The position of a repeated image is higher by a multiple of `repeats` times
        the number of images, so that its copies are augmented differently (`ImageDataset`).
    """
    generator = frozen_generator(counter_seed(seed, epoch))
    count = len(labels)
    counts = np.bincount(labels)
    shares = np.where(counts > 0, np.power(counts.astype(np.float64), power), 0.0)
    ends = np.cumsum(shares) * (count / shares.sum())
    ends[-1] = count
    # Rounded with one random offset for all classes: averaged over epochs each class gets its share (systematic
    # sampling).
    borders = np.floor(np.concatenate([[0.0], ends]) + generator.random_sample()).astype(np.int64)
    quotas = np.diff(borders)
    by_class = np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])
    drawn = [_drawn(images, quota, generator) for images, quota in zip(by_class, quotas.tolist(), strict=True)]
    order = generator.permutation(np.concatenate(drawn).astype(np.int64))
    return order + _times_before(order) * (count * repeats)


def _times_before(order: np.ndarray) -> np.ndarray:
    """How often the image at each place has occurred before."""
    by_image = np.argsort(order, kind="stable")
    _, first, times = np.unique(order[by_image], return_index=True, return_counts=True)
    before = np.empty_like(order)
    before[by_image] = np.arange(len(order)) - np.repeat(first, times)
    return before


def _drawn(images: np.ndarray, quota: int, generator: np.random.RandomState) -> np.ndarray:
    """Draw `quota` images: all of them equally often, then a random subset once more."""
    if not quota:
        return images[:0]
    rounds, rest = divmod(quota, len(images))
    return np.concatenate([np.tile(images, rounds), generator.permutation(images)[:rest]])
