"""Datasets of the Hugging Face hub by name, or a folder of `save_to_disk`, through the `datasets` library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pycls_fast.data.sources.base import Source
from pycls_fast.data.sources.labels import missing_column, name_classes
from pycls_fast.data.sources.options import OpenOptions
from pycls_fast.data.sources.splits import as_splits
from pycls_fast.errors import UserError, first_few

_VAL_NAMES = ("validation", "val", "valid", "dev", "test")


class HubSource:
    """One split of a `datasets.Dataset`, whose rows are mapped from Arrow files on disk."""

    def __init__(self, dataset: Any, where: str, image_column: str, classes: Sequence[str], labels: np.ndarray) -> None:
        """
        Args:
            dataset: with undecoded images, as {"bytes", "path"}.
            where: what to call the split in messages.
        """
        self.classes = tuple(classes)
        self.labels = labels
        self._dataset = dataset
        self._where = where
        self._image_column = image_column

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> tuple[bytes, int]:
        image = self._dataset[index][self._image_column]
        if image is None:
            raise OSError("there is no image in this row")
        data = image["bytes"] if image["bytes"] is not None else Path(image["path"]).read_bytes()
        return data, int(self.labels[index])

    def name(self, index: int) -> str:
        return f"{self._where}[{index}]"

    def describe(self) -> str:
        return f"{len(self):,} images of {len(self.classes):,} classes in {self._where}"


def open_hub(name: str, options: OpenOptions) -> dict[str, Source]:
    """The splits of a dataset.

    Args:
        name: a name on the hub ("ILSVRC/imagenet-1k", or with a branch, tag or commit "ILSVRC/imagenet-1k@REVISION"),
            or a folder written by `save_to_disk`.

    Raises:
        UserError: no such dataset, split or column; `datasets` not installed.
    """
    loaded = _load(name, options.hub_config)
    splits = sorted(loaded)
    train = options.train or ("train" if "train" in loaded or len(splits) != 1 else splits[0])
    named = {"train": train}
    if options.val is not None:
        named["val"] = options.val
    elif options.train is None:
        found = next((own for own in _VAL_NAMES if own in loaded and own != train), None)
        # A test split that has no labels will be left out.
        named |= {} if found is None else {"test": found} if found == "test" else {"val": found}
    for key, split in named.items():
        if split not in loaded:
            raise UserError(f"data.{key}: {name} has no split {split}; it has {first_few(splits)}")
    opened = {
        own: _open_split(name, split, loaded[split], options, may_lack=own == "test") for own, split in named.items()
    }
    return as_splits(opened, options, where=name)


def _load(name: str, config: str | None) -> dict[str, Any]:
    try:
        import datasets
    except ImportError as error:
        raise UserError("data.source=hub needs datasets, which is not installed: pip install -e '.[hub]'") from error
    try:
        if Path(name).is_dir():
            loaded = datasets.load_from_disk(name)
        else:
            repository, _, revision = name.partition("@")
            loaded = datasets.load_dataset(repository, config, revision=revision or None)
    except Exception as error:
        # Raised by the hub, the file system or the dataset's own definition.
        text = " ".join(str(error).split())[:300]
        raise UserError(f"data.root: {name} cannot be loaded by datasets ({type(error).__name__}: {text})") from error
    return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}


def _open_split(name: str, split: str, dataset: Any, options: OpenOptions, *, may_lack: bool) -> HubSource:
    import datasets

    image_column, label_column = options.image_column, options.label_column

    where = f"{name} ({split})"
    images = [column for column, feature in dataset.features.items() if isinstance(feature, datasets.Image)]
    if image_column is not None and image_column not in images:
        raise missing_column(f"{where}, among its images,", image_column, images, "data.image_column")
    if image_column is None and len(images) != 1:
        raise UserError(
            f"{where}: {len(images)} columns hold images ({first_few(list(dataset.features))}); choose one with "
            "data.image_column=NAME"
        )
    has_labels = label_column in dataset.features
    if not has_labels and not may_lack:
        raise missing_column(where, label_column, list(dataset.features), "data.label_column")
    chosen = image_column or images[0]
    if not len(dataset):
        raise UserError(f"{where}: no rows")
    names = getattr(dataset.features[label_column], "names", None) if has_labels else None
    # A list: the column object of `datasets` is lazy.
    values = list(dataset.with_format("arrow")[:][label_column].to_pylist()) if has_labels else [-1] * len(dataset)
    classes, labels = name_classes(values, names=names, where=where, may_lack=may_lack)
    rows = dataset.select_columns([chosen]).cast_column(chosen, datasets.Image(decode=False)).with_format(None)
    return HubSource(rows, where, chosen, classes, labels)
