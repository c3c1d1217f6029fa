"""Which images a random split holds out: few others when images come or go."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pycls_fast.data.choices import Folder
from pycls_fast.data.sources.base import Images, Labels
from pycls_fast.data.sources.files import FileImages
from pycls_fast.data.sources.folders import scan_classes
from pycls_fast.data.sources.splits import as_splits, split_at_random
from pycls_fast.data.sources.texts import Texts
from pycls_fast.errors import UserError
from pycls_fast.seeds import counter_seed, frozen_generator
from tests.unit.data.conftest import write_tree
from tests.unit.data.layouts import CLASSES, LAYOUTS, make_content, mistake, opened


def fnv(data: bytes) -> int:
    """FNV-1a as its authors write it."""
    found = 0xCBF29CE484222325
    for byte in data:
        found = (found ^ byte) * 0x100000001B3 % 2**64
    return found


def test_hashes_of_texts() -> None:
    # One of the test vectors published with it.
    assert fnv(b"foobar") == 0x85944171F73967E8
    names = ["", "a", "foobar", "Übergröße/é 🐻.png", "x" * 300, "a/1.jpg", "a/11.jpg"]
    encoded = [os.fsencode(name) for name in names] * 20_000
    # More than are hashed at a time.
    found = Texts.of(encoded).hashes()
    assert found.dtype == np.uint64
    assert found[:7].tolist() == [fnv(name) for name in encoded[:7]]
    assert np.array_equal(found, np.tile(found[:7], 20_000))
    assert len(Texts.of([]).hashes()) == 0
    assert Texts.of([b""]).hashes().tolist() == [fnv(b"")]


def source_of(names: Sequence[str], classes: tuple[str, ...] = ("cat", "dog")) -> FileImages:
    """Files that are not there; the class is the name's first part."""
    labels = [classes.index(name.partition("/")[0]) for name in names]
    found = Labels(classes, np.array(labels, dtype=np.int32))
    return FileImages(Path("/nowhere"), Texts.of(map(os.fsencode, names)), found)


def test_names_of_splits() -> None:
    """Of a user's own source, or a dictionary of datasets."""
    train, val = source_of(["cat/1", "dog/2"]), source_of(["dog/3"])
    for name in ("val", "validation", "testing"):
        assert as_splits({"training": train, name: val}, Folder(), where="here")["val"] is val
    with pytest.raises(UserError, match=r"here: the name of a split: must be one of .*; got vall; did you mean val\?"):
        as_splits({"train": train, "vall": val}, Folder(), where="here")


def held_out(source: Images, seed: int = 0, **how: Any) -> set[str]:
    splits = split_at_random(source, Folder(split_seed=seed, **how), where="here")
    parts = {name: {part.name(index) for index in range(len(part))} for name, part in splits.items()}
    assert not parts["train"] & parts["val"]
    assert len(parts["train"]) + len(parts["val"]) == len(source)
    return parts["val"]


NAMES = [f"cat/image {number}.jpg" for number in range(60)] + [f"dog/{number * 7:05d}.png" for number in range(43)]


@pytest.mark.parametrize(
    "how", [{"val_fraction": 0.2}, {"folds": 5, "fold": 0}, {"folds": 5, "fold": 2}, {"folds": 5, "fold": 4}]
)
def test_an_image_that_goes_moves_at_most_one_other_at_each_end(how: dict[str, float]) -> None:
    """The reverse of an image that is added."""
    before = held_out(source_of(NAMES), **how)
    ends = 1 if "val_fraction" in how else 2
    for gone in range(len(NAMES)):
        names = [*NAMES[:gone], *NAMES[gone + 1 :]]
        after = held_out(source_of(names), **how)
        there = {f"/nowhere/{name}" for name in names}
        assert len((before ^ after) & there) <= ends
        # The counts are those of the fraction.
        if "val_fraction" in how:
            cats = sum(name.startswith("cat/") for name in names)
            assert len(after) == int(cats * 0.2 + 0.5) + int((len(names) - cats) * 0.2 + 0.5)


def test_the_order_of_the_images_does_not_matter() -> None:
    expected = held_out(source_of(NAMES))
    shuffled = [NAMES[row] for row in np.random.default_rng(0).permutation(len(NAMES))]
    assert held_out(source_of(shuffled)) == expected
    assert held_out(source_of(shuffled, ("dog", "cat"))) == expected
    assert held_out(source_of(NAMES), seed=1) != expected


def test_every_image_is_held_out_as_often() -> None:
    """A poor hash would hold out some images with more seeds than others."""
    source, draws = source_of(NAMES[:40]), 1_000
    counts = dict.fromkeys((f"/nowhere/{name}" for name in NAMES[:40]), 0)
    for seed in range(draws):
        for name in held_out(source, seed=seed):
            counts[name] += 1
    found = np.array(list(counts.values()))
    # The sum over 40 images is fixed: 39 degrees of freedom, mean 39, standard deviation 9.
    statistic = float(((found - draws * 0.2) ** 2).sum() / (draws * 0.2 * 0.8)) * 39 / 40
    assert 15 < statistic < 75


def test_images_with_numbers_are_drawn_by_position(tmp_path: Path) -> None:
    """The results of the embedded digits are of this split."""
    write_tree(tmp_path, {"3": 20, "8": 11})
    source = scan_classes(tmp_path)
    source.numbered = True
    val = split_at_random(source, Folder(split_seed=5), where="here")["val"]
    own = [Path(val.name(index)) for index in range(len(val))]
    for name, count, size in (("3", 20, 4), ("8", 11, 2)):
        files = sorted(str(number) for number in range(count))
        drawn = frozen_generator(counter_seed(5, zlib.crc32(name.encode()))).permutation(count)[:size]
        assert [path.stem for path in own if path.parent.name == name] == [files[row] for row in sorted(drawn)]
    by_name = opened("folder", tmp_path, split_seed=5)["val"]
    assert [Path(by_name.name(index)) for index in range(len(by_name))] != own


def test_folds(tmp_path: Path) -> None:
    """Each image is held out once; classes are spread evenly, and so are the larger parts."""
    counts = {f"c{number}": 6 for number in range(20)} | {"few": 2, "many": 33}
    write_tree(tmp_path, counts)
    held: list[str] = []
    sizes = []
    for fold in range(5):
        val = held_out(scan_classes(tmp_path), folds=5, fold=fold)
        for name, count in counts.items():
            assert sum(Path(file).parent.name == name for file in val) in (count // 5, count // 5 + 1)
        held += val
        sizes.append(len(val))
    assert sorted(held) == sorted(str(path) for path in tmp_path.rglob("*.png"))
    assert max(sizes) - min(sizes) < 10


def test_folds_that_cannot_be(tmp_path: Path) -> None:
    found = []
    for fold in range(3):
        try:
            found.append(len(held_out(source_of(["cat/1", "cat/2"], ("cat",)), folds=3, fold=fold)))
        except UserError as error:
            assert "use fewer than data.folds=3" in str(error)  # noqa: PT017  # one fold of three has no image
    assert found == [1, 1]
    write_tree(tmp_path, {"train/a": 2, "val/a": 2})
    assert "has a validation split; use data.folds=null" in mistake("folder", tmp_path, folds=3)


def patients_held_out(names: Sequence[str], **how: Any) -> set[str]:
    """`names` are CLASS/PATIENT_IMAGE; a patient is held out as a whole."""
    val = held_out(source_of(names), group_by=r"/(p\d+)_", **how)
    patients = {Path(name).stem.partition("_")[0] for name in val}
    assert len(val) == sum(Path(name).stem.partition("_")[0] in patients for name in names)
    return patients


def test_groups_are_held_out_as_a_whole() -> None:
    random = np.random.default_rng(0)
    # Most patients have images of both classes, of which one is rare.
    sizes = random.integers(1, 12, 60)
    names = [
        f"{'cat' if random.random() < 0.1 + 0.4 * (patient % 3 == 0) else 'dog'}/p{patient}_{image}"
        for patient, size in enumerate(sizes)
        for image in range(size)
    ]
    patients = patients_held_out(names)
    of_class = {name: [each for each in names if each.startswith(name)] for name in ("cat", "dog")}
    for own in of_class.values():
        share = np.mean([Path(name).stem.partition("_")[0] in patients for name in own])
        assert share == pytest.approx(0.2, abs=0.03)
    assert patients_held_out([names[row] for row in random.permutation(len(names))]) == patients
    assert patients_held_out(names, seed=1) != patients
    folds = [patients_held_out(names, folds=5, fold=fold) for fold in range(5)]
    assert sorted(patient for fold in folds for patient in fold) == sorted(f"p{patient}" for patient in range(60))


def test_groups_that_are_the_folds_of_somebody_else() -> None:
    names = [f"{'cat' if image % 3 else 'dog'}/p{image % 4}_{image}" for image in range(50)]
    assert [patients_held_out(names, folds=4, fold=fold) for fold in range(4)] == [{"p0"}, {"p1"}, {"p2"}, {"p3"}]


def test_few_groups() -> None:
    """The smallest is held out if all would have been trained on, and trained on if all would have been held out."""
    names = ["cat/p1_1", "cat/p1_2", "cat/p1_3", "dog/p2_1", "dog/p2_2", "cat/p2_3", "cat/p3_1", "dog/p3_2"]
    assert patients_held_out(names, val_fraction=0.1) == {"p3"}
    assert patients_held_out(names, val_fraction=0.9) == {"p1", "p2"}


@pytest.mark.parametrize(
    ("names", "group_by", "says"),
    [
        (["cat/a", "cat/b1"], r"\d", r"\d is no column of here, and is not found in the names cat/a"),
        (["cat/a", "cat/b"], "(a", "(a is no column of here, and no regular expression (error: missing )"),
        (["cat/a", "cat/b"], "cat", "the images of here all share the same cat; use data.group_by=null"),
    ],
)
def test_groups_that_cannot_be(names: Sequence[str], group_by: str, says: str) -> None:
    with pytest.raises(UserError) as error:
        held_out(source_of(names), group_by=group_by)
    assert f"data.group_by: {says}" in str(error.value)


def test_the_whole_of_a_dataset(tmp_path: Path) -> None:
    write_tree(tmp_path / "plain", {"a": 1, "b": 3})
    write_tree(tmp_path / "above", {"train/a": 1, "train/b": 3})
    for name in ("plain", "above"):
        (source,) = opened("folder", tmp_path / name, whole=True).values()
        assert (len(source), source.classes, source.drawn) == (4, ("a", "b"), False)
    LAYOUTS["tar"](tmp_path / "tar", {"train": make_content()["train"]})
    splits = opened("tar", tmp_path / "tar", whole=True)
    assert set(splits) == {"all"}
    assert (len(splits["all"]), splits["all"].classes) == (16, CLASSES)
    write_tree(tmp_path / "both", {"train/a": 1, "train/b": 3, "val/a": 1})
    assert set(opened("folder", tmp_path / "both", whole=True)) == {"train", "val"}
