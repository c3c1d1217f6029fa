"""CIFAR's pickles, the embedded digits, and noise."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from pycls_fast.data.sources.arrays import SyntheticImages, write_digits
from pycls_fast.errors import UserError
from tests.unit.data.layouts import mistake, opened, write_cifar10


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
            pixels = [source.read(index) for index in range(len(source))]
            np.testing.assert_array_equal(np.stack(pixels), images[part])  # type: ignore[arg-type]
            assert source.labels.tolist() == labels[part]


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
        np.testing.assert_array_equal(splits["val"].read(1), images[7].reshape(3, 32, 32).transpose(1, 2, 0))
        assert splits["val"].labels[1] == 7


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
    (folder / "data_batch_4").write_bytes(pickle.dumps({**pickle.loads(whole, encoding="bytes"), b"labels": [11] * 10}))
    assert "a label outside of the 10 classes" in mistake("auto", tmp_path)
    assert "unpack or download it again" in mistake("cifar", tmp_path / "nowhere")


def test_digits(tmp_path: Path) -> None:
    write_digits(tmp_path / "data" / "digits")
    digits = load_digits()
    paths = sorted((tmp_path / "data" / "digits").rglob("*.png"), key=lambda path: path.name)
    assert [int(path.parent.name) for path in paths] == digits.target.tolist()
    for path, image_HW in zip(paths, digits.images, strict=True):
        with Image.open(path) as image:
            assert image.mode == "L"
            np.testing.assert_allclose(np.asarray(image), image_HW * 255 / 16, atol=0.5)
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["digits"]
    sources = opened("digits", tmp_path / "data" / "digits")
    assert sources["train"].classes == tuple("0123456789")
    assert len(sources["train"]) + len(sources["val"]) == len(paths)
    # Divided by their positions: the published results are of this split.
    assert sources["train"].name_hashes() is None


def test_something_else_is_never_overwritten_by_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "digits" / "3").mkdir(parents=True)
    (tmp_path / "digits" / "3" / "0003.png").write_bytes(b"mine")
    monkeypatch.chdir(tmp_path / "digits")
    for folder in (tmp_path / "digits", "."):
        with pytest.raises(UserError, match="choose another folder, or train on the images there"):
            write_digits(folder)
    assert (tmp_path / "digits" / "3" / "0003.png").read_bytes() == b"mine"
    assert [path.name for path in tmp_path.iterdir()] == ["digits"]


def test_the_counter_decides_the_noise() -> None:
    source, same, other = (SyntheticImages(50, 9, 4, seed) for seed in (3, 3, 4))
    values, again, others = (np.stack([each.read(index) for index in range(50)]) for each in (source, same, other))
    assert (values.shape, values.dtype) == ((50, 9, 9, 3), np.uint8)
    assert source.labels.tolist() == [index % 4 for index in range(50)]
    np.testing.assert_array_equal(values, again)
    assert len(np.unique(np.concatenate([values, others]), axis=0)) == 100
    # The mean of n uniform values has a standard error of 73.9 / sqrt(n).
    assert abs(values.mean() - 127.5) < 5 * 73.9 / values.size**0.5
