"""Parquet files and datasets of the Hugging Face hub, through `datasets`: rows are mapped from Arrow files on disk."""

from __future__ import annotations

import glob
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pycls_fast.data.source import ColumnSource
from pycls_fast.data.sources.base import Images, Labels, number_groups
from pycls_fast.data.sources.files import SPLIT_OF, find_files, missing_column, name_classes, read_class_list
from pycls_fast.errors import UserError, first_few, is_first_of_node, one_of, refusing
from pycls_fast.reading import IMAGE_BYTES, open_file, read_bytes


class ArrowImages(Images):
    """One split of a `datasets.Dataset`."""

    def __init__(self, images: Any, where: str, labels: Labels) -> None:
        """`images`: a dataset in Arrow format whose only column holds the encoded images."""
        self.classes, self.labels, self.label_sets = labels
        self._images = images
        self.where = where

    def read(self, index: int) -> bytes:
        image = self._images[index].column(0)[0].as_py()
        if isinstance(image, dict):
            path, image = image.get("path"), image["bytes"]
            image = read_bytes(path, IMAGE_BYTES) if image is None and isinstance(path, str) else image
        if not isinstance(image, bytes):
            raise OSError("there is no image in this row")
        return image


def open_parquet(root: str, data: ColumnSource, image_column: str | None) -> dict[str, Images]:
    """The parts of Parquet files with images in them, told apart by their names (`train-00000-of-00294.parquet`).

    `datasets` copies them once into Arrow files in its cache (`HF_DATASETS_CACHE`), from which any row is read at once.
    """
    names = read_class_list(root)
    found = find_files(root, (".parquet",), data)
    opened: dict[str, Images] = {}
    with _datasets(root) as hf:
        for split, files in found.items():
            for file in files:
                open_file(file, None).close()
            # Each split on its own: `datasets` wants the same columns in all, and a test split may have no labels.
            dataset = hf.load_dataset("parquet", data_files=[glob.escape(file) for file in files], split="train")
            where, is_test = f"{root} ({split})", split == "test"
            opened[split] = open_split(where, dataset, data, image_column, is_test=is_test, names=names)
    return opened


def open_hub(name: str, data: ColumnSource, image_column: str | None, hub_config: str | None) -> dict[str, Images]:
    """The parts of a dataset on the hub ("ILSVRC/imagenet-1k", or "ILSVRC/imagenet-1k@REVISION") or in a folder that
    `save_to_disk` wrote."""
    repository, _, revision = name.partition("@")
    opened: dict[str, Images] = {}
    with _datasets(name) as hf:
        if Path(name).is_dir():
            for file in Path(name).rglob("*"):
                if not file.is_dir():
                    open_file(file, None).close()
            found = hf.load_from_disk(name)
        else:
            found = hf.load_dataset(repository, hub_config, revision=revision or None)
        loaded = dict(found) if isinstance(found, dict) else {"train": found}
        named = {"train": data.train or "train"} | ({} if data.val is None else {"val": data.val})
        if data.train is None and data.val is None:
            # The first validation split, else a test split, which is left out if it has no labels.
            other = next((own for own in SPLIT_OF if own in loaded and SPLIT_OF[own] != "train"), None)
            named |= {} if other is None else {SPLIT_OF[other]: other}
            if other is None and len(loaded) > 1 and is_first_of_node():
                rest = first_few(sorted(loaded.keys() - {"train"}))
                print(
                    f"note: {name}: splits that are not read: {rest}; data.val=NAME validates on one", file=sys.stderr
                )
        for own, split in named.items():
            one_of(f"data.{own}", split, sorted(loaded))
            where, is_test = f"{name} ({split})", own == "test"
            opened[own] = open_split(where, loaded[split], data, image_column, is_test=is_test)
    return opened


@contextmanager
def _datasets(name: str) -> Iterator[Any]:
    """The library; what fails within the block becomes one line."""
    with refusing("data.source: parquet and hub need `datasets`", ImportError, use="pip install 'pycls_fast[hub]'"):
        import datasets
    try:
        yield datasets
    except UserError:
        raise
    except Exception as error:
        # Raised by the hub, the file system, Arrow or the dataset's own definition.
        reason = error.__cause__ or error
        text = " ".join(str(reason).split())[:300]
        raise UserError(f"data.root: {name} cannot be loaded by datasets ({type(reason).__name__}: {text})") from error


def open_split(
    where: str,
    dataset: Any,
    data: ColumnSource,
    image_column: str | None,
    *,
    is_test: bool,
    names: Sequence[str] | None = None,
) -> ArrowImages:
    """Class names take the place of the dataset's own; a test split may have no column of labels."""
    label, features = data.label_column, dataset.features
    column = _image_column(where, dataset, image_column, data.source)
    if label in features:
        values = _values(dataset, label)
    elif is_test:
        values = [None] * len(dataset)
    else:
        raise missing_column(where, label, list(features), f"data.source={data.source} data.label_column")
    kind = features.get(label)
    # That of the elements of a list.
    names = names or getattr(getattr(kind, "feature", kind), "names", None)
    labels = name_classes(values, names=names, where=where, separator=data.label_separator)
    images = ArrowImages(dataset.select_columns([column]).with_format("arrow"), where, labels)
    if data.group_by is not None and data.group_by in features:
        images.groups = number_groups(_values(dataset, data.group_by))
    with suppress(OSError, IndexError):
        # What Arrow cannot read at all is one error now; an image that is missing is skipped later.
        images.read(0)
    return images


def _values(dataset: Any, column: str) -> list[Any]:
    # Selected first: if the rows are picked by indices, all columns would be copied.
    found: list[Any] = dataset.select_columns([column]).with_format("arrow")[:].column(0).to_pylist()
    return found


def is_of_hugging_face(dataset: object) -> bool:
    """Whether it is a `datasets.Dataset`, of which any row is read at once, without an import."""
    return hasattr(dataset, "select_columns") and hasattr(dataset, "__len__")


def _image_column(where: str, dataset: Any, wanted: str | None, kind: str) -> str:
    """The column of encoded images: binary, or structs with a field `bytes` (what `datasets.Image` is stored as)."""
    schema = dataset.features.arrow_schema
    found = _image_columns(schema)
    if wanted in found or (wanted is None and len(found) == 1):
        return wanted or found[0]
    raise UserError(
        f"{where}: columns of images are {first_few(found) or 'none'}, of {first_few(list(schema.names), 12)}; choose "
        f"one with data.source={kind} data.image_column=NAME"
    )


def _image_columns(schema: Any) -> list[str]:
    import pyarrow

    def holds_images(kind: Any) -> bool:
        binary = pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind)
        return binary or (pyarrow.types.is_struct(kind) and kind.get_field_index("bytes") >= 0)

    return [name for name in schema.names if holds_images(schema.field(name).type)]


def is_saved(root: Path) -> bool:
    """Whether `save_to_disk` wrote this folder: of several splits, or of one."""
    return any((root / name).is_file() for name in ("dataset_dict.json", "dataset_info.json"))


def has_images(file: Path) -> bool:
    """Whether a Parquet file holds images, not their paths."""
    with refusing(f"{file}: Parquet needs pyarrow", ImportError, use="pip install 'pycls_fast[hub]'"):
        import pyarrow.parquet
    with refusing(f"{file}: cannot be read", OSError, ValueError):
        return bool(_image_columns(pyarrow.parquet.read_schema(file)))
