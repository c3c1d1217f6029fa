"""Datasets on disk: layouts, splits and what is said about mistakes."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from pycls_fast.data.sources.base import Images
from pycls_fast.data.sources.files import EXTENSIONS
from pycls_fast.data.sources.folders import scan_classes
from pycls_fast.errors import UserError
from pycls_fast.train.folder import new_file
from tests.factories import class_folders, config_of
from tests.unit.data.conftest import write_tree
from tests.unit.data.layouts import (
    CLASSES,
    add_member,
    expected,
    make_content,
    mistake,
    names,
    opened,
    said,
    samples_of,
    write_folder,
)

CONTENT = make_content()


def below(source: Images, root: Path) -> list[str]:
    return [os.path.relpath(name, root) for name in names(source)]


@pytest.mark.parametrize("val_name", ["val", "dev", "test"])
def test_train_and_validation_folders(tmp_path: Path, val_name: str) -> None:
    write_tree(tmp_path, {"train/b": 3, "train/a": 2, "train/c": 1, f"{val_name}/c": 1, f"{val_name}/b": 2})
    sources = opened("folder", tmp_path)
    assert set(sources) == {"train", "val"}
    # Of training, of which validation may lack some.
    assert sources["train"].classes == sources["val"].classes == ("a", "b", "c")
    assert below(sources["train"], tmp_path / "train") == [
        "a/0.png", "a/1.png", "b/0.png", "b/1.png", "b/2.png", "c/0.png",
    ]  # fmt: skip
    assert below(sources["val"], tmp_path / val_name) == ["b/0.png", "b/1.png", "c/0.png"]
    for source in sources.values():
        for index, name in enumerate(names(source)):
            data, label = source.read(index), source.labels[index]
            assert data == Path(name).read_bytes()
            assert source.classes[label] == Path(name).parent.name
    assert sources["train"].describe() == f"6 images of 3 classes in {tmp_path / 'train'}"


@pytest.mark.parametrize("root", ["..", "../../images", "."])
def test_a_root_that_is_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str) -> None:
    """Links to a folder above are not followed; `..` is no link."""
    images = class_folders(tmp_path / "images", cat=2, dog=3)
    (images / "dog" / "up").symlink_to(images)
    monkeypatch.chdir(images if root == "." else images / "cat")
    assert scan_classes(Path(root)).classes == ("cat", "dog")
    assert len(scan_classes(Path(root))) == 5


def test_links_from_several_class_folders_are_one_image(tmp_path: Path) -> None:
    root = write_tree(tmp_path, {"train/a": 3, "train/b": 1, "val/a": 1, "val/c": 1})
    (root / "train" / "c").mkdir()
    (root / "train" / "c" / "soft.png").symlink_to("../a/1.png")
    (root / "train" / "b" / "hard.png").hardlink_to(root / "train" / "a" / "1.png")
    (root / "train" / "b" / "soft.png").symlink_to("../a/2.png")
    (root / "train" / "b" / "broken.png").symlink_to("nowhere")
    splits = opened("folder", tmp_path, label_separator=";")
    train = splits["train"]
    assert below(train, root / "train") == ["a/0.png", "a/1.png", "a/2.png", "b/0.png", "b/broken.png"]
    assert said(train) == [{"a"}, {"a", "b", "c"}, {"a", "b"}, {"b"}, {"b"}]
    assert said(splits["val"]) == [{"a"}, {"c"}]
    assert len(opened("folder", tmp_path)["train"]) == 8


@pytest.mark.parametrize("name", ["train", "Training", "dev", "TEST"])
def test_a_class_may_be_called_like_a_split(tmp_path: Path, name: str) -> None:
    write_tree(tmp_path, {"bus/deeper": 4, name: 4})
    assert opened("folder", tmp_path)["train"].classes == tuple(sorted(("bus", name)))


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
        (("train/a", "Eval/a"), {"train": 2, "val": 2}),
        (("train/a", "eval"), {"train": 1, "val": 1}),
    ],
)
def test_which_folders_are_splits(tmp_path: Path, tree: tuple[str, ...], splits: dict[str, int]) -> None:
    write_tree(tmp_path, dict.fromkeys(tree, 2))
    assert {name: len(source) for name, source in opened("folder", tmp_path).items()} == splits


def test_what_counts_as_an_image(tmp_path: Path) -> None:
    folder = tmp_path / "a class"
    (folder / "deeper" / "still").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    wanted = [f"image{extension}" for extension in EXTENSIONS]
    wanted += [
        "UPPER.JPEG", "Mixed.Png", "saved by a browser.jfif", "OLD.JPE", "naïve 图.jpg", "deeper/1.png",
        "deeper/still/2.png",
    ]  # fmt: skip
    for name in [*wanted, "notes.txt", "._image.jpg", ".hidden/3.png", "jpg", "archive.jpg.zip"]:
        (folder / name).write_bytes(b"x")
    source = scan_classes(tmp_path)
    assert below(source, folder) == sorted(wanted, key=os.fsencode)
    assert source.classes == ("a class",)


def test_links_are_followed(tmp_path: Path) -> None:
    write_tree(tmp_path / "elsewhere", {"cats": 2})
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cat").symlink_to(tmp_path / "elsewhere" / "cats")
    (tmp_path / "data" / "cat" / "broken.png").symlink_to(tmp_path / "nowhere.png")
    source = scan_classes(tmp_path / "data")
    assert below(source, tmp_path / "data") == ["cat/0.png", "cat/1.png", "cat/broken.png"]
    with pytest.raises(FileNotFoundError):
        source.read(2)
    # Each folder once, and none above; links to themselves no system call can follow.
    for number, above in enumerate((tmp_path / "data/cat", tmp_path / "data", tmp_path)):
        (tmp_path / f"data/cat/above {number}").symlink_to(above)
    for link in (tmp_path / "data/cat/own.png", tmp_path / "data/cat/own", tmp_path / "data/own"):
        link.symlink_to(link.name)
    source = scan_classes(tmp_path / "data")
    assert below(source, tmp_path / "data") == ["cat/0.png", "cat/1.png", "cat/broken.png", "cat/own.png"]
    with pytest.raises(OSError, match="symbolic links"):
        source.read(3)


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"Val/a": 2, "Testing/a": 2}, "holds Testing, Val, with folders in them but no train/"),
        ({"set/train/a": 2, "set/val/a": 2}, "{root} holds set, with folders in them but no train/"),
        ({"": 3}, "holds no class folders"),
        ({"train/a": 2, "train/b": 2, "val/a": 2, "val/b": 0}, "/val: no images (.jpg"),
        ({"train/a": 2, "val/a": 2, "val/zebra": 1, "val/yak": 1}, "(val): there are images of yak, zebra, but"),
        ({"a": 2, "lonely": 1, "other": 1}, "a single image in the class lonely, other;"),
    ],
)
def test_mistakes(tmp_path: Path, tree: dict[str, int], says: str) -> None:
    write_tree(tmp_path, tree)
    assert says.format(root=tmp_path) in mistake("folder", tmp_path)


def test_a_file_in_place_of_a_folder(tmp_path: Path) -> None:
    archive = tmp_path / "images.zip"
    archive.write_bytes(b"PK")
    assert "images.zip is a file; unpack it, or say what it is: data.source=tar" in mistake("auto", archive)


def test_runs_beside_the_classes_are_no_class(tmp_path: Path) -> None:
    """As `data=.` makes them; a class may have the name, but no run in it, whose charts would be its images."""
    write_tree(tmp_path, {"cat": 2, "dog": 2, "runs/finetune/2026-11-30_12-00-00": 1})
    write_tree(tmp_path, {"runs/mine": 1, "ledgers/quick/runs/base/seed_0": 1})
    for file in ("runs/.DS_Store", "runs/table.csv", "runs/mine/config.yaml", new_file(config_of(), "timings")):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    assert opened("folder", tmp_path)["train"].classes == ("cat", "dog")
    write_tree(tmp_path, {"runs": 2})
    with pytest.raises(UserError, match=r"a run is among the images .* runs/; move it, and give run_dir=PATH"):
        opened("folder", tmp_path)
    (tmp_path / "runs/mine/config.yaml").unlink()
    assert opened("folder", tmp_path)["train"].classes == ("cat", "dog", "runs")


def test_formats_that_are_not_read_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once per node."""
    write_tree(tmp_path, {"cat": 3, "dog": 3})
    for name in ("cat/a.HEIC", "cat/b.heic", "dog/c.avif", "dog/notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert len(scan_classes(tmp_path)) == 6
    assert capsys.readouterr().err.endswith("are left out: 1 .avif, 2 .heic\n")


def test_class_folders_that_are_not_read_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A set under another name, and a second validation set."""
    write_tree(tmp_path, {"train/a": 4, "train/b": 4, "notes/more": 1})
    opened("folder", tmp_path)
    assert not capsys.readouterr().err
    write_tree(tmp_path, {"holdout/a": 2, "val/a": 1, "valid/b": 1})
    assert len(opened("folder", tmp_path)["val"]) == 1
    assert capsys.readouterr().err == (
        f"note: {tmp_path}: images are read from train, val, not from the class folders in holdout, valid\n"
    )


def test_tables_and_archives_beside_class_folders_are_not_read(tmp_path: Path) -> None:
    """Kaggle's own tables, and archives that were left where they were unpacked."""
    write_folder(tmp_path, CONTENT)
    for name in ("LOC_val_solution.csv", "ILSVRC2012_img_train.tar"):
        (tmp_path / name).touch()
    assert len(opened("auto", tmp_path)["train"]) == 16


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
        (root / "val" / f"._{names[-1]}.JPEG").write_bytes(b"of macOS")
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


@pytest.mark.parametrize("place", ["kit", "archive", "kaggle"])
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
        target = tmp_path / "ILSVRC2012_devkit_t12/data"
        target.mkdir(parents=True)
        for name, data in devkit(ids).items():
            (target / name).write_bytes(data)
    splits = opened("auto", tmp_path if place == "kaggle" else root)
    assert samples_of(splits["train"]) == expected(CONTENT["train"])
    # Class after class, as from class folders; within a class by number.
    found = samples_of(splits["val"])
    assert sorted(found) == sorted(expected(CONTENT["val"]))
    assert [name for _, name in found] == [CLASSES[sample.label] for sample in CONTENT["val"]]


def test_flat_validation_images_without_their_labels(tmp_path: Path) -> None:
    names, _ = flat_val(tmp_path)
    assert "ILSVRC2012_devkit_t12.tar.gz or LOC_val_solution.csv" in mistake("auto", tmp_path)
    (tmp_path / "LOC_val_solution.csv").write_text(f"ImageId,PredictionString\n{names[0]},{CLASSES[0]} 1 2 3 4\n")
    assert f"no training class for {names[1]}" in mistake("auto", tmp_path)
    (tmp_path / "LOC_val_solution.csv").write_text("a,b\n1,2\n")
    assert "does not hold ImageNet's validation labels" in mistake("auto", tmp_path)
