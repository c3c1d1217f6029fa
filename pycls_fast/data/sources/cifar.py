"""CIFAR-10 and CIFAR-100 as they are downloaded: Python pickles, read without running code from them."""

from __future__ import annotations

import codecs
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pycls_fast.data.source import Opening, Source
from pycls_fast.data.sources.base import Images
from pycls_fast.data.sources.splits import refuse_folds
from pycls_fast.errors import UserError


class _Layout(NamedTuple):
    """Files and keys of one of the two datasets."""

    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    meta: str
    labels: str
    class_names: str


_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_LAYOUTS = (
    _Layout("cifar-10-batches-py", _BATCHES, ("test_batch",), "batches.meta", "labels", "label_names"),
    _Layout("cifar-100-python", ("train",), ("test",), "meta", "fine_labels", "fine_label_names"),
)


class ArrayImages(Images):
    """Decoded images of one size, all in memory."""

    def __init__(
        self, images_NHWC: np.ndarray, labels: np.ndarray, classes: Sequence[str], names: Sequence[str]
    ) -> None:
        """
        Args:
            images_NHWC: uint8.
            labels: int32, one per image.
            names: files that the images come from, equally many from each.
        """
        self.classes = tuple(classes)
        self.labels = labels
        self._images_NHWC = images_NHWC
        self._files = tuple(names)

    def read(self, index: int) -> tuple[np.ndarray, int]:
        return self._images_NHWC[index], int(self.labels[index])

    def name(self, index: int) -> str:
        each = len(self) // len(self._files)
        return f"{self._files[min(index // each, len(self._files) - 1)]}[{index % each}]"

    def describe(self) -> str:
        return f"{super().describe()} from {self._files[0]}"


def find_cifar(root: Path) -> tuple[Path, _Layout] | None:
    """The unpacked folder of one of the two, `root` or in it, and its layout."""
    places = ((folder, layout) for layout in _LAYOUTS for folder in (root, root / layout.folder))
    return next((place for place in places if (place[0] / place[1].meta).is_file()), None)


def open_cifar(root: str | Path, data: Source, how: Opening) -> dict[str, Images]:
    """The training batches as "train", the test batch as "val".

    Args:
        root: `cifar-10-batches-py` or `cifar-100-python` (its fine labels), or the folder that holds one of them.

    Raises:
        UserError: files that are missing, damaged or contain more than data.
    """
    found = find_cifar(Path(root))
    if found is None:
        folders = " nor ".join(layout.folder for layout in _LAYOUTS)
        raise UserError(f"{root} holds neither {folders}; unpack the archive there (data/README.md)")
    refuse_folds(str(root), data.folds)
    folder, layout = found
    path = folder / layout.meta
    try:
        names = _read(path)[layout.class_names]
        classes = [name.decode() if isinstance(name, bytes) else str(name) for name in names]
        opened: dict[str, Images] = {}
        for split, files in (("train", layout.train), ("val", layout.test)):
            images, labels = [], []
            for path in [folder / name for name in files]:
                batch = _read(path)
                # (N, channel, row, column) -> (N, row, column, channel)
                images.append(batch["data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
                labels.append(np.asarray(batch[layout.labels], dtype=np.int32))
                if images[-1].dtype != np.uint8 or len(images[-1]) != len(labels[-1]):
                    raise ValueError(f"expected {len(labels[-1])} images of bytes")
                if labels[-1].min() < 0 or labels[-1].max() >= len(classes):
                    raise ValueError(f"a label outside of the {len(classes)} classes")
            pixels = np.ascontiguousarray(np.concatenate(images))
            paths = [str(folder / name) for name in files]
            opened[split] = ArrayImages(pixels, np.concatenate(labels), classes, paths)
    # Damaged pickles raise nearly every kind.
    except Exception as error:
        raise UserError(f"{path} is missing or damaged ({error!r}); unpack or download it again") from error
    return opened


def _read(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        values = _DataOnly(file, encoding="bytes").load()
    return {key.decode() if isinstance(key, bytes) else str(key): value for key, value in values.items()}


# The functions that rebuild arrays, taken from arrays: their modules differ between NumPy's versions.
_REBUILD: dict[str, Any] = {
    "_reconstruct": np.empty(0).__reduce__()[0],
    "_frombuffer": np.empty(0).__reduce_ex__(5)[0],
}


class _DataOnly(pickle.Unpickler):
    """An unpickler that makes numbers, texts, containers and NumPy arrays, and calls nothing else."""

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if module.startswith("numpy.") and name in _REBUILD:
            return _REBUILD[name]
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):
            # How Python 3 writes bytes for Python 2.
            return codecs.encode
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not data")
