"""Datasets of torch as sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from pycls_fast.data.decode import decode
from pycls_fast.data.sources.base import Images
from pycls_fast.data.sources.files import labels_of, name_classes
from pycls_fast.errors import UserError, refusing


class DatasetImages(Images):
    """A dataset of (image, label): Pillow images or uint8 (H, W, 3), before augmentation; labels from 0 on, names, or
    rows of zeros and ones, a column for each class.

    Labels are those of `targets`, as torchvision's datasets have it, also below a `torch.utils.data.Subset`; without
    it every image is read once. Class names are those of `classes`.
    """

    def __init__(self, dataset: Any) -> None:
        """
        Raises:
            UserError: images or labels of other kinds, or more classes than names.
        """
        self._dataset, self.where = dataset, type(dataset).__name__
        what = f"data: labels of the {self.where} are no whole numbers or names, or rows of zeros and ones"
        with refusing(what, ValueError):
            labels = _labels(dataset)
        while not hasattr(dataset, "classes") and hasattr(dataset, "indices"):
            dataset = dataset.dataset
        names = tuple(map(str, dataset.classes)) if hasattr(dataset, "classes") else None
        if labels.ndim == 2:
            names = names or tuple(map(str, range(labels.shape[1])))
            if len(names) != labels.shape[1]:
                raise UserError(f"data: labels of the {self.where} have {labels.shape[1]} columns, not {len(names)}")
            found = labels_of((np.flatnonzero(row > 0).tolist() for row in labels), names)
        elif labels.ndim != 1 or labels.dtype.kind not in "iuU":
            raise UserError(f"{what}, but {labels.dtype} {labels.shape}")
        else:
            found = name_classes(labels.tolist(), names=names, where=f"data: {self.where}")
        self.classes, self.labels, self.label_sets = found
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
        labels = np.asarray(dataset.targets)
    elif hasattr(dataset, "indices"):
        labels = _labels(dataset.dataset)[np.asarray(dataset.indices, dtype=np.int64)]
    else:
        labels = np.array([np.asarray(dataset[index][1]) for index in range(len(dataset))])
    if labels.ndim == 1 and labels.dtype.kind in "bf":
        # Whole numbers in another format.
        whole = labels.astype(np.int64)
        labels = whole if np.array_equal(whole, labels) else labels
    return labels


def open_given(datasets: Any) -> dict[str, Images]:
    """The sources of a dataset, which is split at random, or of several by the names of their splits."""
    named = datasets if isinstance(datasets, Mapping) else {"all": datasets}
    return {name: DatasetImages(dataset) for name, dataset in named.items()}
