"""Datasets of torch as sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from pycls_fast.data.decode import decode
from pycls_fast.data.sources.base import Images
from pycls_fast.errors import UserError


class DatasetImages(Images):
    """A dataset of (image, label): Pillow images or uint8 (H, W, 3), before augmentation; labels from 0 on, or
    rows of zeros and ones, a column for each class.

    Labels are those of `targets`, as torchvision's datasets have it, also below a `torch.utils.data.Subset`; without
    it every image is read once. Class names are those of `classes`.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset, self.where = dataset, type(dataset).__name__
        self.labels = _labels(dataset).astype(np.int32)
        count = int(self.labels.max(initial=-1)) + 1
        if self.labels.ndim == 2:
            count = self.labels.shape[1]
            self.label_sets, labels = np.unique(self.labels > 0, axis=0, return_inverse=True)
            self.labels = labels.reshape(-1).astype(np.int32)
        while not hasattr(dataset, "classes") and hasattr(dataset, "indices"):
            dataset = dataset.dataset
        names = getattr(dataset, "classes", range(count))
        self.classes = tuple(map(str, names))
        if len(self):
            # A dataset with other images is refused before training.
            self.read(0)

    def read(self, index: int) -> np.ndarray:
        image = self._dataset[index][0]
        pixels = np.asarray(decode(image) if isinstance(image, Image.Image) else image)
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
            raise UserError(
                f"data: image {index} of the {self.where} is {type(image).__name__} {pixels.dtype} {pixels.shape}, not "
                "a Pillow image or uint8 (H, W, 3); leave out its transforms: `augment` has them"
            )
        return pixels


def _labels(dataset: Any) -> np.ndarray:
    if hasattr(dataset, "targets"):
        return np.asarray(dataset.targets)
    if hasattr(dataset, "indices"):
        return _labels(dataset.dataset)[np.asarray(dataset.indices)]
    return np.array([np.asarray(dataset[index][1]) for index in range(len(dataset))])


def open_given(datasets: Any) -> dict[str, Images]:
    """The sources of a dataset, which is split at random, or of several by the names of their splits."""
    named = datasets if isinstance(datasets, Mapping) else {"all": datasets}
    return {name: DatasetImages(dataset) for name, dataset in named.items()}
