"""Indexes on disk: kept, shared, and never believed when the folders changed."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from pycls_fast.data.sources import folders
from pycls_fast.data.sources.folders import scan_classes
from pycls_fast.data.sources.index import CachePolicy
from tests.unit.data.conftest import write_tree
from tests.unit.data.layouts import names, touch_older

ALWAYS = CachePolicy("auto", smallest=0)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Class folders that have been there for a while."""
    root = write_tree(tmp_path / "data", {"a": 3, "b": 4, "b/deeper": 2})
    touch_older(root)
    return root


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


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
    assert (tree.parent / ".pycls_fast_index" / tree.name / "class_folders.npz").is_file()
    assert len(first) == 9


CHANGES: dict[str, Callable[[Path], object]] = {
    "file added": lambda tree: shutil.copy(tree / "a/0.png", tree / "a/9.png"),
    "file removed": lambda tree: (tree / "a/0.png").unlink(),
    "file renamed": lambda tree: (tree / "b/deeper/0.png").rename(tree / "b/deeper/7.png"),
    "class added": lambda tree: shutil.copytree(tree / "a", tree / "c"),
    "class renamed": lambda tree: (tree / "a").rename(tree / "z"),
    "folder removed": lambda tree: shutil.rmtree(tree / "b/deeper"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(tree: Path, change: str) -> None:
    before = names(scan_classes(tree, ALWAYS))
    CHANGES[change](tree)
    after = names(scan_classes(tree, ALWAYS))
    assert after != before
    assert after == names(scan_classes(tree, CachePolicy("off")))


def test_a_folder_that_changed_a_moment_ago_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file could come within the same tick of the folder's clock."""
    root = write_tree(tmp_path / "data", {"a": 3})
    scan_classes(root, ALWAYS)
    status = (root / "a").stat()
    shutil.copy(root / "a/0.png", root / "a/9.png")
    os.utime(root / "a", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert len(scan_classes(root, ALWAYS)) == 4


def test_where_indexes_are_kept(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan_classes(tree, CachePolicy(str(tmp_path / "mine"), smallest=0))
    assert list((tmp_path / "mine").glob("*/class_folders.npz"))
    assert not (tree.parent / ".pycls_fast_index").exists()
    real = Path.mkdir

    def read_only(self: Path, *arguments: int, **options: bool) -> None:
        if ".pycls_fast_index" in self.parts:
            raise PermissionError(13, "Permission denied", str(self))
        real(self, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", read_only)
    scan_classes(tree, ALWAYS)
    assert list((tmp_path / "cache/pycls_fast").glob("*/class_folders.npz"))
    listed = scans(monkeypatch)
    scan_classes(tree, ALWAYS)
    assert listed == []


@pytest.mark.parametrize("damage", ["cut", "empty", "other", "misfit"])
def test_a_damaged_index_is_made_anew(tree: Path, damage: str) -> None:
    before = names(scan_classes(tree, ALWAYS))
    place = tree.parent / ".pycls_fast_index" / tree.name / "class_folders.npz"
    whole = place.read_bytes()
    with np.load(place) as stored:
        np.savez(misfit := io.BytesIO(), **{**stored, "labels": stored["labels"][:1]})
    damaged = {"cut": whole[: len(whole) // 2], "empty": b"", "other": b"<html>" * 99, "misfit": misfit.getvalue()}
    place.write_bytes(damaged[damage])
    assert names(scan_classes(tree, ALWAYS)) == before
    assert names(scan_classes(tree, ALWAYS)) == before
    assert len(place.read_bytes()) == len(whole)


def test_one_of_several_builds(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = scans(monkeypatch)
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda _: names(scan_classes(tree, ALWAYS)), range(6)))
    assert listed == ["a", "b"]
    assert all(own == found[0] for own in found)
