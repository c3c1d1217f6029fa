"""CIFAR's pickles and ImageNet as they are downloaded; telling layouts apart."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from tests.unit.data.layouts import (
    CLASSES,
    add_member,
    expected,
    make_content,
    mistake,
    opened,
    samples_of,
    write_cifar10,
    write_folder,
)

CONTENT = make_content()


# CIFAR


def cifar(root: Path, count: int = 60) -> tuple[np.ndarray, list[int]]:
    generator = np.random.default_rng(1)
    images = generator.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    labels = [int(n) for n in generator.integers(0, 10, count)]
    write_cifar10(root, images, labels, [f"class {n}" for n in range(10)])
    return images, labels


def test_cifar_10(tmp_path: Path) -> None:
    images, labels = cifar(tmp_path)
    for root in (tmp_path, tmp_path / "cifar-10-batches-py"):
        splits = opened("auto", root)
        for split, part in (("train", slice(0, 50)), ("val", slice(50, 60))):
            source = splits[split]
            pixels = [source.read(index)[0] for index in range(len(source))]
            np.testing.assert_array_equal(np.stack(pixels), images[part])  # type: ignore[arg-type]
            assert [source.read(index)[1] for index in range(len(source))] == labels[part]
    assert opened("auto", tmp_path)["train"].name(23).endswith("data_batch_3[3]")


def test_cifar_100_and_arrays_of_other_numpys(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    images = np.random.default_rng(0).integers(0, 256, (8, 3072), dtype=np.uint8)
    for protocol in (2, 5):
        for name, part in (("train", slice(0, 6)), ("test", slice(6, 8))):
            batch = {b"data": images[part], b"fine_labels": list(range(8))[part], b"coarse_labels": [0] * 8}
            (folder / name).write_bytes(pickle.dumps(batch, protocol))
        names = {b"fine_label_names": [f"fine{n}".encode() for n in range(100)]}
        (folder / "meta").write_bytes(pickle.dumps(names, protocol))
        splits = opened("auto", tmp_path)
        assert len(splits["train"].classes) == 100
        np.testing.assert_array_equal(splits["val"].read(1)[0], images[7].reshape(3, 32, 32).transpose(1, 2, 0))
        assert splits["val"].read(1)[1] == 7


class _Bomb:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch '{self.file}'",)


@pytest.mark.parametrize("name", ["batches.meta", "data_batch_2"])
def test_a_pickle_that_runs_code_is_refused(tmp_path: Path, name: str) -> None:
    cifar(tmp_path)
    (tmp_path / "cifar-10-batches-py" / name).write_bytes(pickle.dumps({b"data": _Bomb(tmp_path / "never")}))
    assert "asks for posix.system, which is not data" in mistake("auto", tmp_path)
    assert not (tmp_path / "never").exists()
    for harmful in (eval, getattr, np.load, np.lib.format.read_array, pickle.loads):
        (tmp_path / "cifar-10-batches-py" / name).write_bytes(pickle.dumps({b"data": harmful}))
        assert "which is not data" in mistake("auto", tmp_path)


def test_damaged_cifar(tmp_path: Path) -> None:
    cifar(tmp_path)
    folder = tmp_path / "cifar-10-batches-py"
    whole = (folder / "data_batch_4").read_bytes()
    (folder / "data_batch_4").write_bytes(whole[:-3000])
    assert "data_batch_4 is missing or damaged" in mistake("auto", tmp_path)
    batch = pickle.loads(whole, encoding="bytes")
    for change, says in (
        ({b"labels": [11] * 10}, "a label outside of the 10 classes"),
        ({b"labels": [1] * 9}, "expected 9 images of bytes"),
        ({b"data": batch[b"data"].astype(float)}, "expected 10 images of bytes"),
    ):
        (folder / "data_batch_4").write_bytes(pickle.dumps({**batch, **change}))
        assert says in mistake("auto", tmp_path)
    (folder / "data_batch_4").unlink()
    assert "data_batch_4 is missing" in mistake("auto", tmp_path)
    assert "unpack the archive there" in mistake("cifar", tmp_path / "nowhere")


# ImageNet


def flat_val(root: Path) -> tuple[list[str], list[int]]:
    """Class folders for training, validation images in one folder, in an order that mixes the classes."""
    write_folder(root, {"train": CONTENT["train"]})
    (root / "val").mkdir()
    samples, ids = CONTENT["val"], [2, 3, 1]
    order = [3, 0, 5, 2, 1, 4]
    names = []
    for number, position in enumerate(order, start=1):
        names.append(f"ILSVRC2012_val_{number:08d}")
        (root / "val" / f"{names[-1]}.JPEG").write_bytes(samples[position].data)
    return names, [ids[samples[position].label] for position in order]


def devkit(labels: list[int]) -> dict[str, bytes]:
    """The two files. ILSVRC2012_ID is not the order of the WordNet ids."""
    kinds = [("ILSVRC2012_ID", float), ("WNID", object), ("words", object), ("num_children", float)]
    rows = [(2, CLASSES[0], "one", 0), (3, CLASSES[1], "two", 0), (1, CLASSES[2], "three", 0), (1001, "n1", "up", 3)]
    buffer = io.BytesIO()
    savemat(buffer, {"synsets": np.array(rows, dtype=kinds).reshape(-1, 1)})
    return {
        "ILSVRC2012_validation_ground_truth.txt": "".join(f"{label}\n" for label in labels).encode(),
        "meta.mat": buffer.getvalue(),
    }


@pytest.mark.parametrize("place", ["kit", "kit above", "archive", "kaggle"])
def test_flat_validation_images(tmp_path: Path, place: str) -> None:
    root = tmp_path / "ILSVRC/Data/CLS-LOC" if place == "kaggle" else tmp_path / "imagenet"
    names, ids = flat_val(root)
    if place == "kaggle":
        table = ["ImageId,PredictionString"]
        for name, own in zip(names, ids, strict=True):
            wnid = {2: CLASSES[0], 3: CLASSES[1], 1: CLASSES[2]}[own]
            table.append(f"{name},{wnid} 1 2 3 4 {wnid} 5 6 7 8 ")
        (tmp_path / "LOC_val_solution.csv").write_text("\n".join(table))
    elif place == "archive":
        with tarfile.open(root / "ILSVRC2012_devkit_t12.tar.gz", "w:gz") as tar:
            for name, data in devkit(ids).items():
                add_member(tar, f"ILSVRC2012_devkit_t12/data/{name}", data)
            add_member(tar, "ILSVRC2012_devkit_t12/readme.txt", b"about")
    else:
        folder = {"kit": root / "ILSVRC2012_devkit_t12/data", "kit above": tmp_path / "ILSVRC2012_devkit_t12/data"}
        target = folder[place]
        target.mkdir(parents=True, exist_ok=True)
        for name, data in devkit(ids).items():
            (target / name).write_bytes(data)
    splits = opened("auto", tmp_path if place == "kaggle" else root)
    assert samples_of(splits["train"]) == expected(CONTENT["train"])
    # Class after class, as from class folders; within a class by number.
    found = samples_of(splits["val"])
    assert sorted(found) == sorted(expected(CONTENT["val"]))
    assert [name for _, name in found] == [CLASSES[sample.label] for sample in CONTENT["val"]]


def test_flat_validation_images_without_their_labels(tmp_path: Path) -> None:
    names, ids = flat_val(tmp_path)
    line = mistake("auto", tmp_path)
    assert "labels are not there; put ILSVRC2012_devkit_t12.tar.gz or LOC_val_solution.csv beside val/" in line
    (tmp_path / "LOC_val_solution.csv").write_text(f"ImageId,PredictionString\n{names[0]},{CLASSES[0]} 1 2 3 4\n")
    assert f"has no label of a training class for {names[1]}" in mistake("auto", tmp_path)
    rows = [f"{name},n99999999 1 2 3 4" for name in names]
    (tmp_path / "LOC_val_solution.csv").write_text("\n".join(["ImageId,PredictionString", *rows]))
    assert "has no label of a training class for ILSVRC2012_val_00000001" in mistake("auto", tmp_path)
    (tmp_path / "LOC_val_solution.csv").write_text("a,b\n1,2\n")
    assert "does not hold ImageNet's validation labels" in mistake("auto", tmp_path)
    (tmp_path / "LOC_val_solution.csv").unlink()
    (tmp_path / "ILSVRC2012_devkit_t12/data").mkdir(parents=True)
    for name, data in {**devkit(ids), "meta.mat": b"no matrix at all"}.items():
        (tmp_path / "ILSVRC2012_devkit_t12/data" / name).write_bytes(data)
    assert "does not hold ImageNet's validation labels" in mistake("auto", tmp_path)
