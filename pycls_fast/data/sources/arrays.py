"""Images in memory: CIFAR as downloaded, noise, datasets of torch, and scikit-learn's digits, which become files."""

from __future__ import annotations

import codecs
import math
import pickle
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch.utils.data import Subset

from pycls_fast.data.source import ColumnSource, Opening, Source
from pycls_fast.data.sources.base import Images
from pycls_fast.data.sources.files import SPLIT_OF, labels_of, name_classes
from pycls_fast.data.sources.folders import scan_classes
from pycls_fast.data.sources.hub import is_of_hugging_face, open_split
from pycls_fast.data.sources.index import CachePolicy
from pycls_fast.data.to_rgb import AS_STORED, Conversion, DamagedImage, decode
from pycls_fast.errors import UserError, first_few, refusing
from pycls_fast.reading import TABLE_BYTES, open_file
from pycls_fast.seeds import counter_seed
from pycls_fast.values import Size


class _Layout(NamedTuple):
    """Files and keys of CIFAR-10 or CIFAR-100."""

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

    def __init__(self, images_NHWC: np.ndarray, labels: np.ndarray, classes: Sequence[str], where: str) -> None:
        self.classes = tuple(classes)
        self.labels = labels
        self._images_NHWC = images_NHWC
        self.where = where

    def read(self, index: int) -> np.ndarray:
        pixels: np.ndarray = self._images_NHWC[index]
        return pixels


def find_cifar(root: Path) -> tuple[Path, _Layout] | None:
    """The unpacked folder of one of the two, `root` or in it, and its layout."""
    places = ((folder, layout) for layout in _LAYOUTS for folder in (root, root / layout.folder))
    return next((place for place in places if (place[0] / place[1].meta).is_file()), None)


def open_cifar(root: str | Path) -> dict[str, Images]:
    """The training batches as "train", the test batch as "val".

    Args:
        root: `cifar-10-batches-py` or `cifar-100-python` (its fine labels), or the folder that holds one of them.
    """
    folder, layout = find_cifar(Path(root)) or (Path(root) / _LAYOUTS[0].folder, _LAYOUTS[0])
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
            opened[split] = ArrayImages(pixels, np.concatenate(labels), classes, f"{folder} ({split})")
    # Damaged pickles raise nearly every kind.
    except Exception as error:
        raise UserError(f"{path} is missing or damaged ({error!r}); unpack or download it again") from error
    return opened


def _read(path: Path) -> dict[str, Any]:
    with open_file(path, TABLE_BYTES) as file:
        values = _DataOnly(file, encoding="bytes").load()
    return {key.decode() if isinstance(key, bytes) else str(key): value for key, value in values.items()}


# The functions that rebuild arrays, taken from arrays: their modules differ between NumPy's versions.
_REBUILD: dict[str, Any] = {
    "_reconstruct": np.empty(0).__reduce__()[0],
    "_frombuffer": np.empty(0).__reduce_ex__(5)[0],
}


class _DataOnly(pickle.Unpickler):
    """An unpickler that only makes numbers, texts, containers and NumPy arrays; it calls nothing else."""

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if module.startswith("numpy.") and name in _REBUILD:
            return _REBUILD[name]
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):
            # How Python 3 writes bytes for Python 2.
            return codecs.encode
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not data")


# Numbers of random streams, which must differ from each other and from that of the initial weights (1).
_TRAIN, _VAL = 2, 3


class SyntheticImages(Images):
    """Noise generated on demand: for measuring everything but disk and decoder, and for tests.

    The pixels depend only on (seed, index), uniform in 0..255 and unrelated to the label; labels cycle through the
    classes.
    """

    def __init__(self, count: int, image_size: int | tuple[int, int], num_classes: int, seed: int) -> None:
        self._image_size = Size.of(image_size)
        self._seed = seed
        self.classes = tuple(f"class{label}" for label in range(num_classes))
        self.labels = np.arange(count, dtype=np.int32) % np.int32(num_classes)

    def read(self, index: int) -> np.ndarray:
        shape = (*self._image_size, 3)
        count = math.prod(shape)
        words = -(-count // 8)
        # A bit generator's raw words are stable between NumPy versions; the byte order is fixed for the same reason.
        raw = np.random.PCG64(counter_seed(self._seed, index)).random_raw(words).astype("<u8")
        return raw.view(np.uint8)[:count].reshape(shape)

    def name(self, index: int) -> str:
        return f"synthetic image {index}"

    def describe(self) -> str:
        return f"{super().describe()}, synthetic, {self._image_size} px"


def open_synthetic(
    image_size: Size, seed: int, *, synthetic_train_images: int, synthetic_val_images: int, synthetic_classes: int
) -> dict[str, Images]:
    counts = {"train": (synthetic_train_images, _TRAIN), "val": (synthetic_val_images, _VAL)}
    return {
        split: SyntheticImages(count, image_size, synthetic_classes, counter_seed(seed, stream))
        for split, (count, stream) in counts.items()
    }


_DIGITS = 1797
"""Images in `sklearn.datasets.load_digits`, the test set of Alpaydin and Kaynak's Optical Recognition of
Handwritten Digits (UCI Machine Learning Repository, 1998): 8 x 8 pixels."""


def write_digits(folder: str | Path) -> None:
    """Write the digits as grayscale PNGs `folder/DIGIT/NNNN.png`, unless they are there; values 0..16 become 0..255.

    The files appear all at once (written beside `folder`, then renamed), so that several processes may call this.

    Raises:
        UserError: when `folder` holds something else or cannot be written.
    """
    # `.` has no name.
    folder = Path(folder).absolute()
    if _is_complete(folder):
        return
    draft = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
    try:
        draft.mkdir(parents=True)
        _write_images(draft)
        draft.rename(folder)
    except OSError:
        # Another process was first, or something is in the way: a rename never replaces a filled folder.
        way_out = "choose another folder, or train on the images there with --config-name finetune"
        with refusing(f"{folder}: the digits cannot be written there", use=way_out):
            if not _is_complete(folder):
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _is_complete(folder: Path) -> bool:
    return sum(1 for _ in folder.glob("[0-9]/[0-9][0-9][0-9][0-9].png")) == _DIGITS


def _write_images(folder: Path) -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images_BHW = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    for digit in range(10):
        (folder / str(digit)).mkdir()
    for number, (image_HW, digit) in enumerate(zip(images_BHW, digits.target, strict=True)):
        Image.fromarray(image_HW).save(folder / str(digit) / f"{number:04d}.png")


def open_digits(root: str, data: Source, how: Opening) -> dict[str, Images]:
    """The digits, written to `root` unless they are there; the published results are of a split by position."""
    write_digits(root)
    images = scan_classes(Path(root), CachePolicy.of(data, how))
    images.numbered = True
    return {"all": images}


class DatasetImages(Images):
    """A dataset of (image, label) or of dictionaries with them (`_KEYS`): Pillow images or uint8 (H, W, 3), before
    augmentation; labels from 0 on, names, or rows of zeros and ones, a column for each class.

    Labels come from `targets`, which torchvision's datasets have, also inside a `torch.utils.data.Subset`; without it
    every image is read once. Class names come from `classes`.
    """

    def __init__(self, dataset: Any, convert: Conversion = AS_STORED) -> None:
        """
        Args:
            convert: for Pillow images.

        Raises:
            UserError: images or labels of other kinds, or more classes than names.
        """
        self._dataset, self._convert, self.where = dataset, convert, type(dataset).__name__
        what = f"data: labels of the {self.where} are no whole numbers or names, or rows of zeros and ones"
        with refusing(what, ValueError):
            labels = _labels(dataset)
        while not hasattr(dataset, "classes") and isinstance(dataset, Subset):
            dataset = dataset.dataset
        with refusing(f"data: `classes` of the {self.where} are no names", TypeError):
            names = tuple(map(str, dataset.classes)) if hasattr(dataset, "classes") else None
        if labels.ndim == 2 and labels.dtype.kind in "biuf" and np.isin(labels, (0, 1)).all():
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
            # A dataset with other images is refused before training; a damaged image is skipped later.
            with refusing(f"data: the {self.where} has no images", ValueError), suppress(OSError, DamagedImage):
                self.read(0)

    def read(self, index: int) -> np.ndarray:
        image = _part(self._dataset[index], 0)
        pixels = np.asarray(decode(image, self._convert) if isinstance(image, Image.Image) else image)
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
            raise UserError(
                f"data: image {index} of the {self.where} is {type(image).__name__} {pixels.dtype} {pixels.shape}, not "
                "a Pillow image or uint8 (H, W, 3); leave out its transforms: `augment` has them"
            )
        return pixels


_KEYS = (("image", "img", "pixel_values"), ("label", "labels", "target"))
"""What images and labels are called in items that are dictionaries."""


def _key(names: Iterable[Any], place: int, *, is_needed: bool = True) -> str:
    """What the image (0) or the label (1) is called."""
    found = [key for key in _KEYS[place] if key in names]
    if not found and is_needed:
        raise ValueError(f"items have {first_few(list(map(str, names)))}; call one {' or '.join(_KEYS[place])}")
    return [*found, *_KEYS[place]][0]


def _part(item: Any, place: int) -> Any:
    """The image (0) or the label (1) of an item."""
    return item[_key(item, place) if isinstance(item, Mapping) else place]


def _labels(dataset: Any) -> np.ndarray:
    if hasattr(dataset, "targets"):
        labels = np.asarray(dataset.targets)
    elif isinstance(dataset, Subset):
        labels = _labels(dataset.dataset)[np.asarray(dataset.indices, dtype=np.int64)]
    else:
        where = f"data: the {type(dataset).__name__} is read in one order only"
        with refusing(where, TypeError, use="give one with __len__ and __getitem__"):
            count = len(dataset)
        labels = np.array([_label(dataset, index) for index in range(count)])
    if labels.ndim == 1 and labels.dtype.kind in "bf":
        # Whole numbers in another format.
        whole = labels.astype(np.int64)
        labels = whole if np.array_equal(whole, labels) else labels
    return labels


def _label(dataset: Any, index: int) -> np.ndarray:
    what = f"data: image {index} of the {type(dataset).__name__} cannot be read, and with it its label"
    with refusing(what, use="with an attribute `targets`, the labels of all, it would be left out"):
        return np.asarray(_part(dataset[index], 1))


def open_given(datasets: Any, data: Source) -> dict[str, Images]:
    """The sources of a dataset, which is split at random, or of several by the names of their splits; those of Hugging
    Face's `datasets` are read as from a file."""
    named = datasets if isinstance(datasets, Mapping) else {"all": datasets}
    return {
        split: _open_columns(split, dataset, data.label_separator)
        if is_of_hugging_face(dataset)
        else DatasetImages(dataset, data.conversion)
        for split, dataset in named.items()
    }


def _open_columns(split: str, dataset: Any, label_separator: str | None) -> Images:
    is_test = SPLIT_OF.get(split) == "test"
    with refusing("data: the dataset cannot be read", ValueError):
        image, label = _key(dataset.features, 0), _key(dataset.features, 1, is_needed=not is_test)
    data = ColumnSource.model_construct(source="hub", label_column=label, label_separator=label_separator)
    return open_split("data", dataset, data, image, is_test=is_test)
