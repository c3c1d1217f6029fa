"""Indexes on disk: kept, shared, and never believed when the folders changed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from torchvision.datasets import ImageFolder

from pycls_fast.data.sources import CachePolicy, FileSource, folders, scan_classes
from pycls_fast.errors import UserError
from tests.unit.data.conftest import WriteTree
from tests.unit.data.layouts import touch_older

ALWAYS = CachePolicy("auto", smallest=0)


@pytest.fixture
def tree(tmp_path: Path, write_tree: WriteTree) -> Path:
    """Class folders that have been there for a while."""
    root = write_tree(tmp_path / "data", {"a": 3, "b": 4, "b/deeper": 2})
    touch_older(root)
    return root


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def names(source: FileSource) -> list[str]:
    return [source.name(index) for index in range(len(source))]


def scans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Class folders that are listed from here on."""
    listed: list[str] = []
    real = folders._list_class

    def counting(root: Path, name: str) -> object:
        listed.append(name)
        return real(root, name)

    monkeypatch.setattr(folders, "_list_class", counting)
    return listed


def test_the_second_time_nothing_is_listed(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = scans(monkeypatch)
    first = scan_classes(tree, ALWAYS)
    assert listed == ["a", "b"]
    again = scan_classes(tree, ALWAYS)
    assert listed == ["a", "b"]
    assert names(again) == names(first)
    assert again.classes == first.classes
    np.testing.assert_array_equal(again.labels, first.labels)
    assert (tree.parent / ".pycls_fast_index" / tree.name / "class_folders/about.json").is_file()
    assert len(first) == 9


def test_other_programs_do_not_see_it(tree: Path) -> None:
    scan_classes(tree, ALWAYS)
    assert ImageFolder(tree).classes == ["a", "b"]


def test_small_datasets_are_not_kept(tree: Path) -> None:
    scan_classes(tree)
    scan_classes(tree, CachePolicy("off", smallest=0))
    assert not list(tree.parent.rglob(".pycls_fast_index"))


def add_file(tree: Path) -> None:
    shutil.copy(tree / "a/0.png", tree / "a/9.png")


def remove_file(tree: Path) -> None:
    (tree / "a/0.png").unlink()


def rename_file(tree: Path) -> None:
    (tree / "b/deeper/0.png").rename(tree / "b/deeper/7.png")


def add_class(tree: Path) -> None:
    shutil.copytree(tree / "a", tree / "c")


def rename_class(tree: Path) -> None:
    (tree / "a").rename(tree / "z")


def remove_class(tree: Path) -> None:
    shutil.rmtree(tree / "b")


def remove_nested(tree: Path) -> None:
    shutil.rmtree(tree / "b/deeper")


@pytest.mark.parametrize(
    "change", [add_file, remove_file, rename_file, add_class, rename_class, remove_class, remove_nested]
)
def test_a_change_is_seen(tree: Path, change: Callable[[Path], None]) -> None:
    before = names(scan_classes(tree, ALWAYS))
    change(tree)
    after = names(scan_classes(tree, ALWAYS))
    assert after != before
    assert after == names(scan_classes(tree, CachePolicy("off")))


def test_a_folder_that_changed_a_moment_ago_is_looked_at_again(
    tmp_path: Path, write_tree: WriteTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file could come within the same tick of the folder's clock."""
    root = write_tree(tmp_path / "data", {"a": 3})
    scan_classes(root, ALWAYS)
    status = (root / "a").stat()
    shutil.copy(root / "a/0.png", root / "a/9.png")
    os.utime(root / "a", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert len(scan_classes(root, ALWAYS)) == 4


def test_where_indexes_are_kept(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan_classes(tree, CachePolicy(str(tmp_path / "mine"), smallest=0))
    assert list((tmp_path / "mine").glob("*/class_folders/about.json"))
    assert not (tree.parent / ".pycls_fast_index").exists()
    real = Path.mkdir

    def read_only(self: Path, *arguments: int, **options: bool) -> None:
        if ".pycls_fast_index" in self.parts:
            raise PermissionError(13, "Permission denied", str(self))
        real(self, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", read_only)
    scan_classes(tree, ALWAYS)
    assert list((tmp_path / "cache/pycls_fast").glob("*/class_folders/about.json"))
    listed = scans(monkeypatch)
    scan_classes(tree, ALWAYS)
    assert listed == []


def test_nowhere_to_keep_it(tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    source = scan_classes(tree, CachePolicy(str(tmp_path / "file"), smallest=0))
    assert len(source) == 9
    assert "the index could not be saved" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["about.json", "names.npy", "labels.npy", "missing", "empty", "format"])
def test_a_damaged_index_is_made_anew(tree: Path, damage: str) -> None:
    before = names(scan_classes(tree, ALWAYS))
    place = tree.parent / ".pycls_fast_index" / tree.name / "class_folders"
    about = json.loads((place / "about.json").read_text())
    if damage == "missing":
        (place / "name_ends.npy").unlink()
    elif damage == "empty":
        os.truncate(place / "labels.npy", 0)
    elif damage == "format":
        (place / "about.json").write_text(json.dumps({**about, "format": 99}))
    else:
        os.truncate(place / damage, (place / damage).stat().st_size // 2)
    assert names(scan_classes(tree, ALWAYS)) == before
    assert json.loads((place / "about.json").read_text()) == about


def test_mapped_arrays_are_not_copied_to_other_processes(tmp_path: Path) -> None:
    (tmp_path / "data/a").mkdir(parents=True)
    for number in range(3000):
        (tmp_path / f"data/a/{number:06d}.jpg").touch()
    touch_older(tmp_path / "data")
    source = scan_classes(tmp_path / "data", ALWAYS)
    assert isinstance(source.labels, np.memmap)
    sent = pickle.dumps(source)
    assert len(sent) < 3000
    assert names(pickle.loads(sent)) == names(source)


def test_one_of_several_builds(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = scans(monkeypatch)
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda _: names(scan_classes(tree, ALWAYS)), range(6)))
    assert listed == ["a", "b"]
    assert all(own == found[0] for own in found)


def test_a_mistake_does_not_leave_an_index(tree: Path) -> None:
    (tree / "empty").mkdir()
    with pytest.raises(UserError, match="no images in the class folder empty/"):
        scan_classes(tree, ALWAYS)
    assert not (tree.parent / ".pycls_fast_index").exists()
