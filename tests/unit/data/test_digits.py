"""The embedded digits: right pixels, written once, safely by many."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from pycls_fast.data.sources.synthetic import write_digits
from pycls_fast.errors import UserError
from tests.unit.data.layouts import opened


def test_pixels_and_labels(tmp_path: Path) -> None:
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


def test_something_else_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "digits" / "3").mkdir(parents=True)
    (tmp_path / "digits" / "3" / "0003.png").write_bytes(b"mine")
    with pytest.raises(UserError, match="choose another folder, or train on the images there"):
        write_digits(tmp_path / "digits")
    assert (tmp_path / "digits" / "3" / "0003.png").read_bytes() == b"mine"
    assert [path.name for path in tmp_path.iterdir()] == ["digits"]


def _write_together(folder: Path, barrier: multiprocessing.synchronize.Barrier) -> None:
    barrier.wait()
    write_digits(folder)
    assert sum(1 for _ in folder.rglob("*.png")) == 1797


@pytest.mark.slow
def test_many_processes_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    processes = [context.Process(target=_write_together, args=(tmp_path / "digits", barrier)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["digits"], "a draft was left behind"
