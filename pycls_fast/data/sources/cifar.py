"""CIFAR-10 and CIFAR-100 as they are downloaded: Python pickles, read without running code from them."""

from __future__ import annotations

import codecs
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pycls_fast.counter import counter_seed
from pycls_fast.data.sources.base import Source
from pycls_fast.errors import UserError

_SIDE = 32


class _Layout(NamedTuple):
    """Files and keys of one of the two datasets."""

    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    meta: str
    labels: str
    class_names: str


_LAYOUTS = (
    _Layout(
        "cifar-10-batches-py",
        tuple(f"data_batch_{number}" for number in range(1, 6)),
        ("test_batch",),
        "batches.meta",
        "labels",
        "label_names",
    ),
    _Layout("cifar-100-python", ("train",), ("test",), "meta", "fine_labels", "fine_label_names"),
)


class ArraySource:
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

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> tuple[np.ndarray, int]:
        return self._images_NHWC[index], int(self.labels[index])

    def name(self, index: int) -> str:
        each = len(self) // len(self._files)
        return f"{self._files[min(index // each, len(self._files) - 1)]}[{index % each}]"

    def describe(self) -> str:
        height, width = self._images_NHWC.shape[1:3]
        return f"{len(self):,} images of {width} x {height} in {len(self.classes):,} classes from {self._files[0]}"


def is_cifar(root: Path) -> bool:
    """Whether `root` is, or holds, the unpacked folder of one of the two."""
    return any(_folder(root, layout) is not None for layout in _LAYOUTS)


def open_cifar(root: str | Path) -> dict[str, Source]:
    """The training batches as "train", the test batch as "val".

    Args:
        root: `cifar-10-batches-py` or `cifar-100-python` (its fine labels), or the folder that holds one of them.

    Raises:
        UserError: files that are missing, damaged or contain more than data.
    """
    root = Path(root)
    found = [(folder, layout) for layout in _LAYOUTS if (folder := _folder(root, layout)) is not None]
    if not found:
        packed = next(iter(sorted(root.glob("cifar-*.tar.gz"))), None) if root.is_dir() else None
        if packed is not None:
            raise UserError(f"{packed} is not unpacked; run: tar -xzf {packed} -C {root}")
        raise UserError(f"{root} holds neither {' nor '.join(layout.folder for layout in _LAYOUTS)} (data/README.md)")
    if len(found) > 1:
        raise UserError(f"{root} holds both sets; give the folder of one, e.g. data.root={found[0][0]}")
    folder, layout = found[0]
    meta = _read(folder / layout.meta)
    classes = [
        name.decode() if isinstance(name, bytes) else str(name) for name in _get(meta, layout.class_names, folder)
    ]
    return {
        "train": _open_batches(folder, layout, layout.train, classes),
        "val": _open_batches(folder, layout, layout.test, classes),
    }


def _folder(root: Path, layout: _Layout) -> Path | None:
    for folder in (root, root / layout.folder):
        if (folder / layout.meta).is_file() and (folder / layout.train[0]).is_file():
            return folder
    return None


def _open_batches(folder: Path, layout: _Layout, files: Sequence[str], classes: Sequence[str]) -> ArraySource:
    images, labels = [], []
    for name in files:
        path = folder / name
        batch = _read(path)
        data = _get(batch, "data", path)
        own = np.asarray(_get(batch, layout.labels, path), dtype=np.int32)
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape != (len(own), 3 * _SIDE**2):
            raise UserError(f"{path}: expected {len(own)} x 3,072 bytes of pixels; download it again")
        if len(own) and not 0 <= own.min() <= own.max() < len(classes):
            raise UserError(f"{path}: a label outside of the {len(classes)} classes; download it again")
        # (N, channel, row, column) -> (N, row, column, channel)
        images.append(data.reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1))
        labels.append(own)
    paths = [str(folder / name) for name in files]
    return ArraySource(np.ascontiguousarray(np.concatenate(images)), np.concatenate(labels), classes, paths)


def _get(values: dict[str, Any], key: str, path: Path) -> Any:
    if key not in values:
        raise UserError(f"{path}: no {key!r} in it; download it again")
    return values[key]


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path} is missing; unpack the archive again")
    try:
        with path.open("rb") as file:
            values = _DataOnly(file, encoding="bytes").load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise UserError(f"{path} is damaged or not a CIFAR file ({error}); download it again") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no dictionary; download it again")
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


class SyntheticSource:
    """Noise generated on demand: for measuring everything but disk and decoder, and for tests.

    The pixels depend only on (seed, index), uniform in 0..255 and unrelated to the label; labels cycle through the
    classes.
    """

    def __init__(self, count: int, image_size: int, num_classes: int, seed: int) -> None:
        if count < 1 or image_size < 1 or num_classes < 1:
            raise ValueError(f"need at least one image, pixel and class: {count}, {image_size}, {num_classes}")
        self._count = count
        self._image_size = image_size
        self._seed = seed
        self.classes = tuple(f"class{label}" for label in range(num_classes))

    def __len__(self) -> int:
        return self._count

    def read(self, index: int) -> tuple[np.ndarray, int]:
        size = self._image_size
        words = -(-size * size * 3 // 8)
        # A bit generator's raw words are stable between NumPy versions; the byte order is fixed for the same
        # reason.
        raw = np.random.PCG64(counter_seed(self._seed, index)).random_raw(words).astype("<u8")
        image_HWC = raw.view(np.uint8)[: size * size * 3].reshape(size, size, 3)
        return image_HWC, index % len(self.classes)

    def name(self, index: int) -> str:
        return f"synthetic image {index}"

    def describe(self) -> str:
        size = self._image_size
        return f"{self._count:,} synthetic images of {size} x {size} in {len(self.classes):,} classes"
