"""Datasets on disk: layouts, splits and what is said about mistakes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pycls_fast.data.choices import Folder
from pycls_fast.data.source import Opening
from pycls_fast.data.sources.base import Images
from pycls_fast.data.sources.files import EXTENSIONS
from pycls_fast.data.sources.folders import open_folder, scan_classes
from pycls_fast.errors import UserError
from tests.unit.data.conftest import WriteTree


def names(source: Images) -> list[str]:
    return [source.name(index) for index in range(len(source))]


def below(source: Images, root: Path) -> list[str]:
    return [os.path.relpath(name, root) for name in names(source)]


def open_plain(root: Path, val_fraction: float = 0.25, split_seed: int = 0) -> dict[str, Images]:
    return open_folder(root, Folder(val_fraction=val_fraction, split_seed=split_seed), Opening())


@pytest.mark.parametrize("val_name", ["val", "valid", "validation", "dev", "test"])
def test_train_and_validation_folders(tmp_path: Path, write_tree: WriteTree, val_name: str) -> None:
    write_tree(tmp_path, {"train/b": 3, "train/a": 2, f"{val_name}/a": 1, f"{val_name}/b": 2})
    sources = open_plain(tmp_path)
    assert set(sources) == {"train", "val"}
    assert sources["train"].classes == sources["val"].classes == ("a", "b")
    assert below(sources["train"], tmp_path / "train") == [
        "a/0.png",
        "a/1.png",
        "b/0.png",
        "b/1.png",
        "b/2.png",
    ]
    assert below(sources["val"], tmp_path / val_name) == ["a/0.png", "b/0.png", "b/1.png"]
    for source in sources.values():
        for index, name in enumerate(names(source)):
            data, label = source.read(index)
            assert data == Path(name).read_bytes()
            assert source.classes[label] == Path(name).parent.name
    assert sources["train"].describe() == f"5 images of 2 classes in {tmp_path / 'train'}"


def test_labels_follow_the_training_classes(tmp_path: Path, write_tree: WriteTree) -> None:
    write_tree(tmp_path, {"train/a": 1, "train/b": 1, "train/c": 1, "val/c": 2, "val/b": 1})
    val = open_plain(tmp_path)["val"]
    assert val.classes == ("a", "b", "c")
    assert [val.read(index)[1] for index in range(3)] == [1, 2, 2]


@pytest.mark.parametrize("prefix", ["", "train/"])
def test_random_split_is_stratified_and_complete(tmp_path: Path, write_tree: WriteTree, prefix: str) -> None:
    counts = {"one": 2, "two": 8, "three": 21}
    write_tree(tmp_path, {prefix + name: count for name, count in counts.items()})
    sources = open_plain(tmp_path)
    train, val = names(sources["train"]), names(sources["val"])
    assert sorted(train + val) == sorted(str(path) for path in tmp_path.rglob("*.png"))
    val_counts = {name: sum(Path(file).parent.name == name for file in val) for name in counts}
    assert val_counts == {"one": 1, "two": 2, "three": 5}
    assert names(open_plain(tmp_path)["val"]) == val
    assert names(open_plain(tmp_path, split_seed=1)["val"]) != val


def test_folds(tmp_path: Path, write_tree: WriteTree) -> None:
    """Each image is held out once; classes are spread evenly, and so are the larger parts."""
    counts = {f"c{number}": 6 for number in range(20)} | {"few": 2, "many": 33}
    write_tree(tmp_path, counts)
    held_out: list[str] = []
    sizes = []
    for fold in range(5):
        sources = open_folder(tmp_path, Folder(val_fraction=0.25, split_seed=0, folds=5, fold=fold), Opening())
        train, val = names(sources["train"]), names(sources["val"])
        assert sorted(train + val) == sorted(str(path) for path in tmp_path.rglob("*.png"))
        for name, count in counts.items():
            own = sum(Path(file).parent.name == name for file in val)
            assert own in (count // 5, count // 5 + 1)
        held_out += val
        sizes.append(len(val))
    assert sorted(held_out) == sorted(str(path) for path in tmp_path.rglob("*.png"))
    assert max(sizes) - min(sizes) < 10
    other = open_folder(tmp_path, Folder(val_fraction=0.25, split_seed=1, folds=5, fold=0), Opening())
    assert names(other["val"]) != held_out[: len(other["val"])]


def test_folds_that_cannot_be(tmp_path: Path, write_tree: WriteTree) -> None:
    write_tree(tmp_path / "one", {"a": 2})
    found = []
    for fold in range(3):
        try:
            found.append(len(open_folder(tmp_path / "one", Folder(folds=3, fold=fold), Opening())["val"]))
        except UserError as error:
            assert "use fewer than data.folds=3" in str(error)  # noqa: PT017  # one fold of three has no image
    assert found == [1, 1]
    write_tree(tmp_path / "two", {"train/a": 2, "val/a": 2})
    with pytest.raises(UserError, match=r"data.folds: .* has a validation split; use data.folds=null"):
        open_folder(tmp_path / "two", Folder(folds=3), Opening())


def test_random_split_depends_on_names_alone(tmp_path: Path, write_tree: WriteTree) -> None:
    write_tree(tmp_path / "here", {"a": 9, "b": 9})
    # Other place, other order of creation, one more class.
    write_tree(tmp_path / "there", {"b": 9, "a": 9, "0": 9})
    here, there = open_plain(tmp_path / "here")["val"], open_plain(tmp_path / "there")["val"]
    assert set(below(here, tmp_path / "here")) == {
        name for name in below(there, tmp_path / "there") if not name.startswith("0/")
    }


@pytest.mark.parametrize("name", ["train", "Training", "dev", "TEST"])
def test_a_class_may_be_called_like_a_split(tmp_path: Path, write_tree: WriteTree, name: str) -> None:
    write_tree(tmp_path, {"bus/deeper": 4, name: 4})
    assert open_plain(tmp_path)["train"].classes == tuple(sorted(("bus", name)))


@pytest.mark.parametrize(
    ("tree", "splits"),
    [
        (("train/a", "train/b", "val/a", "test/b"), {"train": 4, "val": 2, "test": 2}),
        # Test images without class folders are left out, and are no validation split.
        (("train/a", "val/a", "test"), {"train": 2, "val": 2}),
        (("train/a", "train/b", "test"), {"train": 2, "val": 2}),
        (("train/a", "Testing"), {"train": 1, "val": 1}),
        (("Training/a", "Training/b", "Testing/a", "notes"), {"train": 4, "val": 2}),
        (("train/a", "val/a", "dev/a"), {"train": 2, "val": 2}),
        (("train/a", "dev"), {"train": 1, "val": 1}),
    ],
)
def test_which_folders_are_splits(
    tmp_path: Path, write_tree: WriteTree, tree: tuple[str, ...], splits: dict[str, int]
) -> None:
    write_tree(tmp_path, dict.fromkeys(tree, 2))
    assert {name: len(source) for name, source in open_plain(tmp_path).items()} == splits


def test_what_counts_as_an_image(tmp_path: Path) -> None:
    folder = tmp_path / "a class"
    (folder / "deeper" / "still").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    wanted = [f"image{extension}" for extension in EXTENSIONS]
    wanted += [
        "UPPER.JPEG",
        "Mixed.Png",
        "saved by a browser.jfif",
        "OLD.JPE",
        "naïve 图.jpg",
        "deeper/1.png",
        "deeper/still/2.png",
    ]
    for name in [*wanted, "notes.txt", "._image.jpg", ".hidden/3.png", "jpg", "archive.jpg.zip"]:
        (folder / name).write_bytes(b"x")
    source = scan_classes(tmp_path)
    assert below(source, folder) == sorted(wanted, key=os.fsencode)
    assert source.classes == ("a class",)


def test_links_are_followed(tmp_path: Path, write_tree: WriteTree) -> None:
    write_tree(tmp_path / "elsewhere", {"cats": 2})
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cat").symlink_to(tmp_path / "elsewhere" / "cats")
    (tmp_path / "data" / "cat" / "broken.png").symlink_to(tmp_path / "nowhere.png")
    source = scan_classes(tmp_path / "data")
    assert below(source, tmp_path / "data") == ["cat/0.png", "cat/1.png", "cat/broken.png"]
    with pytest.raises(FileNotFoundError):
        source.read(2)
    # Links to themselves, which no system call can follow.
    for link in (tmp_path / "data/cat/own.png", tmp_path / "data/cat/own", tmp_path / "data/own"):
        link.symlink_to(link.name)
    source = scan_classes(tmp_path / "data")
    assert below(source, tmp_path / "data") == ["cat/0.png", "cat/1.png", "cat/broken.png", "cat/own.png"]
    with pytest.raises(OSError, match="symbolic links"):
        source.read(3)


def test_a_link_to_above_is_an_error(tmp_path: Path, write_tree: WriteTree) -> None:
    write_tree(tmp_path, {"a": 2})
    (tmp_path / "a" / "loop").symlink_to(tmp_path / "a")
    with pytest.raises(UserError, match="is a link to a folder above it"):
        scan_classes(tmp_path)


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"Val/a": 2, "Testing/a": 2}, "found Testing/, Val/ but no train/"),
        ({"set/train/a": 2, "set/val/a": 2}, "holds one class, set; did you mean data.root={root}/set?"),
        ({"": 3}, "holds 3 images but no class folders"),
        ({"train": 3, "val": 1}, "/train holds 3 images but no class folders"),
        ({"train/a": 2, "train/b": 2, "val/a": 2, "val/b": 0}, "/val: no images (.jpg"),
        ({"train/a": 2, "val/a": 2, "val/zebra": 1, "val/yak": 1}, "(val): no images of the class yak, zebra in train"),
        ({"a": 2, "lonely": 1, "other": 1}, "a single image in the class lonely, other;"),
    ],
)
def test_mistakes(tmp_path: Path, write_tree: WriteTree, tree: dict[str, int], says: str) -> None:
    write_tree(tmp_path, tree)
    with pytest.raises(UserError) as caught:
        open_plain(tmp_path)
    (line,) = caught.value.lines
    assert says.format(root=tmp_path) in line


def test_formats_that_are_not_read_are_named(
    tmp_path: Path, write_tree: WriteTree, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once per node."""
    write_tree(tmp_path, {"cat": 3, "dog": 3})
    for name in ("cat/a.HEIC", "cat/b.heic", "dog/c.avif", "dog/notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    for rank in range(2):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert len(scan_classes(tmp_path)) == 6
    note = f"note: {tmp_path}: images in formats that are not read are left out (1 .avif, 2 .heic); convert them\n"
    assert capsys.readouterr().err == note
