"""Every layout gives the same images, with one label or several, in every process, and each epoch exactly."""

from __future__ import annotations

import io
import itertools
import pickle
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet
import pytest
import torch
import webdataset
from PIL import ExifTags, Image
from torch.utils.data import Dataset, Subset, TensorDataset

from pycls_fast.data.choices import Augment, Given
from pycls_fast.data.dataset import ImageDataset
from pycls_fast.data.loader import ImageLoader
from pycls_fast.data.pack import PackSettings, pack
from pycls_fast.data.sampling import TrainSampler
from pycls_fast.data.sources.arrays import DatasetImages, open_given
from pycls_fast.data.sources.base import Images
from pycls_fast.data.to_rgb import DamagedImage
from pycls_fast.data.transforms import TrainTransform
from pycls_fast.errors import UserError
from tests.unit.data.layouts import (
    CLASSES,
    LAYOUTS,
    expected,
    make_content,
    mistake,
    open_layout,
    opened,
    said,
    samples_of,
    write_cifar10,
)

KINDS = sorted(LAYOUTS)
CONTENT = make_content()


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Images]]:
    """Each layout, opened."""
    root = tmp_path_factory.mktemp("layouts")
    found = {kind: open_layout(kind, root / kind, CONTENT) for kind in KINDS}
    generator = np.random.default_rng(3)
    images = generator.integers(0, 256, (60, 32, 32, 3), dtype=np.uint8)
    labels = [int(n) for n in generator.integers(0, 3, 60)]
    found["cifar"] = opened("auto", write_cifar10(root / "cifar", images, labels, CLASSES))
    return found


@pytest.mark.parametrize(
    ("kind", "place", "options"),
    [
        ("manifest", "train.csv", {}),
        ("manifest", "train.tsv", {"extension": ".tsv"}),
        ("manifest", "train.parquet", {"extension": ".parquet"}),
        ("parquet", "data/train-00000-of-00001.parquet", {"shards": 1}),
        ("hub", "", {}),
        ("hub", "train", {}),
        ("packed", "", {}),
    ],
)
def test_what_a_root_holds_is_recognised(tmp_path: Path, kind: str, place: str, options: dict[str, Any]) -> None:
    root = Path(LAYOUTS[kind](tmp_path / "set", CONTENT, **options)) / place
    assert samples_of(opened("auto", root, whole=bool(place))["all" if place else "train"]) == expected(
        CONTENT["train"]
    )


# All sets of three classes.
SETS = [[k for k in range(3) if number >> k & 1] for number in range(8)]
NAMES = [[CLASSES[k] for k in own] for own in SETS]
JPEGS = [sample.data for sample in make_content((8,), ())["train"]]


def write_several(kind: str, root: Path) -> str:
    """A training split whose images have several labels, as numbers or names; the kind of source."""
    root.mkdir()
    (root / "classes.txt").write_text("\n".join(CLASSES))
    if kind == "hub":
        labels = datasets.Sequence(datasets.ClassLabel(names=list(CLASSES)))
        kinds = datasets.Features({"image": datasets.Value("binary"), "label": labels})
        made = datasets.Dataset.from_dict({"image": JPEGS, "label": SETS}, features=kinds)
        datasets.DatasetDict(train=made).save_to_disk(str(root))
    elif kind.startswith("parquet"):
        said = SETS if kind == "parquet numbers" else [";".join(own) for own in NAMES]
        pyarrow.parquet.write_table(pyarrow.table({"image": JPEGS, "label": said}), root / "train.parquet")
    else:
        where = str(root / "train-%06d.tar")
        with webdataset.ShardWriter(where, maxcount=5, verbose=0) as sink:
            for number, (data, own) in enumerate(zip(JPEGS, SETS, strict=True)):
                label = {"json": {"label": NAMES[number]}} if kind == "tar names" else {"cls": own}
                sink.write({"__key__": str(number), "jpg": data, **label})
    return str(root)


@pytest.mark.parametrize("kind", ["hub", "parquet numbers", "parquet names", "tar numbers", "tar names"])
def test_images_with_several_labels_in_shards_and_packed(tmp_path: Path, kind: str) -> None:
    root, name = write_several(kind, tmp_path / "root"), kind.split()[0]
    source = opened(name, root, whole=True, label_separator=";")["all"]
    pack(source, tmp_path / "packed" / "all", PackSettings(), workers=0, title="")
    packed = opened("auto", tmp_path / "packed", whole=True, label_separator=";")["all"]
    for each in (source, packed):
        assert each.classes == CLASSES
        assert said(each) == [set(own) for own in NAMES]
        assert [each.read(index) for index in range(8)] == JPEGS
    assert "have several labels each; use data.label_separator=;" in mistake("packed", tmp_path / "packed")


@pytest.mark.parametrize("kind", KINDS)
def test_test_images_are_the_validation_split_where_there_is_no_other(tmp_path: Path, kind: str) -> None:
    splits = open_layout(kind, tmp_path / kind, {"train": CONTENT["train"], "test": CONTENT["val"]})
    assert set(splits) == {"train", "val"}
    assert samples_of(splits["val"]) == expected(CONTENT["val"])


@pytest.mark.parametrize("kind", [*KINDS, "cifar"])
def test_a_source_goes_to_other_processes(layouts: dict[str, dict[str, Images]], kind: str) -> None:
    """It pickles no open files, and has no long Python list, which each worker would copy.

    Two epochs through worker processes: the right images, each once, the same as without workers.
    """
    source = layouts[kind]["train"]
    source.read(0)
    assert samples_of(pickle.loads(pickle.dumps(source))) == samples_of(source)
    count = len(source)
    assert not any(
        isinstance(value, list | dict | tuple | set) and len(value) >= count for value in vars(source).values()
    )

    def batches(workers: int) -> list[tuple[list[int], list[int], bytes]]:
        transform = TrainTransform(Augment(), image_size=8)
        sampler = TrainSampler(count, seed=1, global_batch_size=4, total_steps=2 * (count // 4))
        loader = ImageLoader(ImageDataset(source, transform, training=True), sampler, num_workers=workers)
        return [(b.indices_B.tolist(), b.labels_B.tolist(), b.images_BHWC.numpy().tobytes()) for b in loader]

    alone, shared = batches(0), batches(2)
    assert alone == shared
    epoch = [index for indices, _, _ in alone[: count // 4] for index in indices]
    assert len(set(epoch)) == len(epoch) == count // 4 * 4
    assert all(source.labels[indices].tolist() == own for indices, own, _ in alone)


def test_a_dataset_of_torch_with_several_labels() -> None:
    marks_NK = torch.tensor([[k in own for k in range(3)] for own in SETS])
    dataset: Any = TensorDataset(torch.zeros(8, 4, 4, 3, dtype=torch.uint8), marks_NK.float())
    # An attribute of the user's own, not that of a `Subset`.
    dataset.indices = [0]
    source = DatasetImages(dataset)
    assert source.classes == ("0", "1", "2")
    assert said(source) == [{str(k) for k in own} for own in SETS]
    dataset.classes = 3
    with pytest.raises(UserError, match="data: `classes` of the TensorDataset are no names"):
        DatasetImages(dataset)


class Labelled(TensorDataset):
    """Black images with these labels, of two classes with names."""

    classes = ("cat", "dog")

    def __init__(self, *targets: Any) -> None:
        super().__init__(torch.zeros(len(targets), 4, 4, 3, dtype=torch.uint8))
        self.targets = targets


@pytest.mark.parametrize("labels", [(1, 0, 1), (1.0, 0.0, 1.0), (True, False, True), ("dog", "cat", "dog")])
def test_a_dataset_of_torch(labels: tuple[Any, ...]) -> None:
    source = DatasetImages(Labelled(*labels))
    assert [sorted(source.classes_of(index)) for index in range(3)] == [["dog"], ["cat"], ["dog"]]
    assert DatasetImages(Subset(Labelled(*labels), [2, 1])).labels.tolist() == [1, 0]
    assert len(DatasetImages(Subset(Labelled(*labels), []))) == 0


def test_a_dataset_of_dictionaries() -> None:
    items = [{"id": n, "image": np.full((4, 4, 3), n, np.uint8), "label": name} for n, name in enumerate("bab")]
    source = DatasetImages(items)
    assert (source.classes, source.labels.tolist()) == (("a", "b"), [1, 0, 1])
    assert np.array_equal(source.read(1), items[1]["image"])
    with pytest.raises(
        UserError, match=r"rows of zeros and ones \(items have x, y; call one label or labels or target"
    ):
        DatasetImages([{"x": 0, "y": 1}])
    with pytest.raises(UserError, match=r"the list has no images \(items have x, label; call one image or img"):
        DatasetImages([{"x": 0, "label": 1}])
    with pytest.raises(UserError, match=r"list_iterator is read in one order only \(.*; give one with __len__"):
        DatasetImages(iter(items))


def test_a_dataset_without_targets_names_an_image_that_it_cannot_read() -> None:
    class Opened(Dataset[tuple[Image.Image, int]]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> tuple[Image.Image, int]:
            return Image.open(io.BytesIO((CONTENT["train"][0].data, b"")[index])), index

    with pytest.raises(
        UserError, match=r"^data: image 1 of the Opened .* label \(cannot identify .*\); with .*`targets`"
    ):
        DatasetImages(Opened())
    dataset: Any = Opened()
    dataset.targets = [0, 1]
    assert len(DatasetImages(dataset)) == 2


def test_pillow_images_of_a_dataset_are_converted_like_files() -> None:
    """And like those that a prediction gets."""
    clear = Image.new("RGBA", (2, 1))
    clear.getexif()[ExifTags.Base.Orientation] = 6
    for upright, on_white in itertools.product((False, True), repeat=2):
        data = Given(dataset="list", exif_orientation=upright, transparent="white" if on_white else "drop")
        pixels = open_given([(clear, 0), (clear, 1)], data)["all"].read(0)
        assert pixels.shape == ((2, 1, 3) if upright else (1, 2, 3))
        assert pixels.max() == (255 if on_white else 0)


def test_a_first_image_that_is_damaged_is_one_like_others() -> None:
    cut_off = Image.open(io.BytesIO(CONTENT["train"][0].data[:-20]))
    source = DatasetImages([(cut_off, 0), (Image.new("RGB", (4, 4)), 1)])
    with pytest.raises(DamagedImage, match="truncated"):
        source.read(0)


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ((1, 2), "data: Labelled: the label 2: labels count the classes, 0 to 1"),
        ((0.5, 1.5), r"data: labels of the Labelled are no whole numbers or names, .*, but float64 \(2,\)"),
        (((0, 1), (0,)), "data: labels of the Labelled are no whole numbers or names, .*inhomogeneous"),
        (((0, 1, 1),), "data: labels of the Labelled have 3 columns, not 2"),
        (((0.2, 0.8), (0.5, 0.5)), r"data: labels of the Labelled are no .*, or rows of zeros and ones, but float64"),
    ],
)
def test_labels_of_torch_that_are_refused(labels: tuple[Any, ...], says: str) -> None:
    with pytest.raises(UserError, match=says):
        DatasetImages(Labelled(*labels))


def test_a_source_of_one_label_has_no_several(tmp_path: Path) -> None:
    assert "one label each; use data.label_separator=null" in mistake("digits", tmp_path / "x", label_separator=";")
