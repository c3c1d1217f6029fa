"""Which layout a folder has, and which files its splits have."""

from __future__ import annotations

from pathlib import Path

import pytest

from pycls_fast.data.sources.files import find_files
from pycls_fast.errors import UserError
from tests.unit.data.layouts import LAYOUTS, make_content, mistake, opened

CONTENT = make_content()


def touch(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")
    return root


def test_layouts_that_are_recognised(tmp_path: Path) -> None:
    for kind in ("folder", "packed"):
        assert len(opened("auto", LAYOUTS[kind](tmp_path / kind, CONTENT))["train"]) == 16
    # Kaggle's own tables, and archives that were left where they were unpacked.
    touch(tmp_path / "folder", "LOC_val_solution.csv", "ILSVRC2012_img_train.tar")
    assert len(opened("auto", tmp_path / "folder")["train"]) == 16


def test_what_is_no_folder_of_images(tmp_path: Path) -> None:
    file = touch(tmp_path, "file.csv") / "file.csv"
    for root, says in ((tmp_path / "nowhere", "does not exist"), (file, "is a file, not a folder")):
        assert mistake("auto", root).startswith(f"the dataset folder {root} {says}; expected ROOT/train/CLASS/IMAGE")
        assert "data.source=NAME chooses another layout" in mistake("auto", root)
    assert "holds no class folders" in mistake("auto", tmp_path)


def found(root: Path, **options: str) -> dict[str, list[str]]:
    files = find_files(str(root), (".tar",), **options)  # type: ignore[arg-type]
    return {split: [str(Path(file).relative_to(root)) for file in own] for split, own in files.items()}


def test_splits_by_names_and_folders(tmp_path: Path) -> None:
    touch(tmp_path, "test/train-0.tar", "a/validation/0.tar", "a/Training-1.TAR", "dev/.hidden.tar", "lost+found/x.tar")
    (tmp_path / "latest").symlink_to("a")
    (tmp_path / "a/above").symlink_to(tmp_path)
    assert found(tmp_path) == {"train": ["a/Training-1.TAR", "test/train-0.tar"], "val": ["a/validation/0.tar"]}
    assert set(found(touch(tmp_path / "one", "x.tar"))) == {"all"}


def test_files_that_are_named(tmp_path: Path) -> None:
    root = touch(tmp_path / "set [1]{1..2}", *(f"x-{n:03d}.tar" for n in range(4)))
    assert found(root, train="x-{000..002}.tar", val="*3.tar") == {
        "train": ["x-000.tar", "x-001.tar", "x-002.tar"],
        "val": ["x-003.tar"],
    }
    with pytest.raises(UserError, match=r"data.train: there is no file .*/y.tar"):
        found(root, train="y.tar")


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["train.tar", "x.tar"], "no name or folder says that .*/x.tar is train, val or test"),
        (["train-00000-of-00003.tar"], "train-00001-of-00003, .*train-00002-of-00003: missing, of 3 files"),
        # A clone of a hub repository has a folder for each configuration, with the same images.
        (["160px/train/0.tar", "full/train/0.tar"], "0.tar is in 2 folders; choose one of them as data.root"),
        ([], "there are no .tar files"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, names: list[str], says: str) -> None:
    touch(tmp_path, *names)
    with pytest.raises(UserError, match=says):
        found(tmp_path)
