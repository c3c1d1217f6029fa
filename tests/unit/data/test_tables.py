"""Manifests: tables of paths and labels."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pycls_fast.data.choices import Source
from pycls_fast.data.sources import tables
from pycls_fast.data.sources.base import match_classes
from tests.unit.data.layouts import expected, make_content, mistake, opened, said, samples_of, write_manifest

ROOT = Path(__file__).parents[3]
CONTENT = make_content()


@pytest.fixture(autouse=True)
def tables_need_no_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_LOOKED_FOR", 0)


def counts(root: Path, **keys: Any) -> dict[str, int]:
    return {split: len(source) for split, source in opened("manifest", root, **keys).items()}


@pytest.mark.parametrize("extension", [".csv", ".tsv", ".parquet"])
def test_manifests_of_every_kind(tmp_path: Path, extension: str) -> None:
    splits = opened("manifest", write_manifest(tmp_path, CONTENT, extension=extension))
    for split, samples in CONTENT.items():
        assert samples_of(splits[split]) == expected(samples)


def test_one_manifest_with_a_column_that_says_the_split(tmp_path: Path) -> None:
    rows = ["file,kind,split,other"]
    for number, split in enumerate(["train", "val", "train", "test", "validation"]):
        (tmp_path / f"{number}.jpg").write_bytes(CONTENT["train"][number].data)
        rows.append(f"{number}.jpg,{'ab'[number % 2]},{split},x")
    (tmp_path / "list.csv").write_text("\n".join(rows))
    splits = opened("manifest", tmp_path / "list.csv", path_column="file", label_column="kind")
    assert [splits[name].name(0) for name in ("train", "val", "test")] == [
        str(tmp_path / f"{n}.jpg") for n in (0, 1, 3)
    ]
    assert [label for _, label in samples_of(splits["val"])] == ["b", "a"]
    assert splits["test"].classes == ("a", "b")


def test_tables_and_names_from_other_programs(tmp_path: Path) -> None:
    """Marks before the text, blanks around commas, Windows' line ends, semicolons."""
    (tmp_path / "list.csv").write_text(
        'path, label\r\n"a, b.jpg", 1\r\nc.jpg   , 0\r\nd.jpg, 1\r\ne.jpg, 0\r\n', "utf-8-sig"
    )
    (tmp_path / "classes.txt").write_text("cat\r\ndog\r\n", "utf-8-sig")
    splits = opened("manifest", tmp_path / "list.csv", val_fraction=0.5)
    assert splits["train"].classes == ("cat", "dog")
    names = sorted(source.name(index) for source in splits.values() for index in range(len(source)))
    assert names == [str(tmp_path / name) for name in ("a, b.jpg", "c.jpg", "d.jpg", "e.jpg")]
    (tmp_path / "list.csv").write_text("path;label\na, b.jpg;1\nc, d.jpg;1\n")
    assert opened("manifest", tmp_path / "list.csv", val_fraction=0.5)["val"].name(0).endswith((", b.jpg", ", d.jpg"))
    (tmp_path / "list.tsv").write_text("path\tlabel, fine\na, b.jpg\t1\nc.jpg\t1\n")
    splits = opened("manifest", tmp_path / "list.tsv", val_fraction=0.5, label_column="label, fine")
    assert sum(map(len, splits.values())) == 2
    (tmp_path / "list.csv").write_text("cat,möwe\n", "latin-1")
    assert "is no table in UTF-8" in mistake("manifest", tmp_path / "list.csv")


@pytest.mark.parametrize("test", ["path\nc\n", "path,label\nc,\n", "path,label\nc,-1\n", "id,x\n1,2\n"])
def test_a_test_table_without_labels_is_left_out(tmp_path: Path, test: str) -> None:
    (tmp_path / "train.csv").write_text("path,label\na,x\nb,y\n")
    (tmp_path / "val.csv").write_text("path,label\na,x\n")
    (tmp_path / "test.csv").write_text(test)
    assert set(opened("manifest", tmp_path)) == {"train", "val"}
    # It is no validation split either.
    (tmp_path / "val.csv").unlink()
    (tmp_path / "train.csv").write_text("path,label\na,x\nb,x\n")
    assert counts(tmp_path) == {"train": 1, "val": 1}
    (tmp_path / "test.csv").write_text("path,label\nc,-1\nd,0\n")
    assert "1 of 2 images have no label" in mistake("manifest", tmp_path)


@pytest.mark.parametrize(
    ("rows", "splits"),
    [
        ("a,x,train b,x,test c,y,train d,y,train e,x,train", {"train": 4, "val": 1}),
        ("a,x,train c,x,train", {"train": 1, "val": 1}),
        # Test images without labels are left out.
        ("a,x,train b,,test c,y,train d,x,val e,,test", {"train": 2, "val": 1}),
        ("a,x,train b,-1,test c,y,train d,x,val e,-1,test", {"train": 2, "val": 1}),
    ],
)
def test_a_column_that_says_the_split(tmp_path: Path, rows: str, splits: dict[str, int]) -> None:
    (tmp_path / "all.csv").write_text("\n".join(["path,label,split", *rows.split()]))
    assert counts(tmp_path) == splits


@pytest.mark.parametrize(
    ("test", "keys", "splits"),
    [
        # Also without labels, and where the column says the same of all.
        ("path\ne\n", {}, {"train": 3, "val": 1}),
        ("path,label,split\ne,x,train\nf,y,train\n", {}, {"train": 3, "val": 1, "test": 2}),
        # Tables that are named stay whole.
        ("path,label\ne,x\n", {"train": "train.csv", "val": "test.csv"}, {"train": 4, "val": 1}),
    ],
)
def test_a_column_that_says_the_split_beside_another_table(
    tmp_path: Path, test: str, keys: dict[str, str], splits: dict[str, int]
) -> None:
    (tmp_path / "train.csv").write_text("path,label,split\na,x,train\nb,x,val\nc,y,train\nd,y,train\n")
    (tmp_path / "test.csv").write_text(test)
    assert counts(tmp_path, **keys) == splits


def test_validation_images_in_two_tables(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("path,label,split\na,x,train\nb,x,val\n")
    (tmp_path / "val.csv").write_text("path,label\nc,x\n")
    assert "val.csv: another table has val images, too" in mistake("manifest", tmp_path)


def test_numbers_are_labels_and_classes_txt_names_them(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("path,label\na.jpg,2\nb.jpg,0\n")
    (tmp_path / "val.csv").write_text("path,label\nc.jpg,1\n")
    assert opened("manifest", tmp_path)["val"].classes == ("0", "1", "2")
    (tmp_path / "classes.txt").write_text("cat\ndog\nemu\n\n")
    assert opened("manifest", tmp_path)["train"].classes == ("cat", "dog", "emu")
    (tmp_path / "train.csv").write_text("path,label\na.jpg,3\n")
    assert "the label 3: labels count the classes" in mistake("manifest", tmp_path)
    (tmp_path / "train.csv").write_text("path,label\na.jpg,gnu\n")
    assert "the label gnu is not among the 3 class names" in mistake("manifest", tmp_path)
    # A name that is there twice is one class.
    (tmp_path / "classes.txt").write_text("cat\ncat\ngnu\n")
    assert opened("manifest", tmp_path)["train"].classes_of(0) == {"gnu"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("path,label\n", "images without labels, or none"),
        (
            "path,kind\na,b\n",
            "has no column 'label'; it has kind, path: choose one with data.source=manifest data.label_column=NAME",
        ),
        ("path,label\na,b,c\n", "is no table in UTF-8 with as many values in each line as columns"),
        ("path;label\na,b\n", "as columns, separated by commas, semicolons or tabs"),
        ("path,label\na,x\nb,nan\n", "1 of 2 images have no label (the first is number 2)"),
        ("path,label\na,x\nb,\n", "1 of 2 images have no label (the first is number 2); leave them out"),
        ("path,label\nb,1\nc,100200300\n", "the label 100,200,300: labels count the classes"),
        ("path,label,split\nx.jpg,a,never\n", "the column split: must be one of train, "),
        ("path,label,split\na,x,test\n", "no training images, only"),
    ],
)
def test_manifests_with_mistakes(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "list.csv").write_text(text)
    assert says in mistake("manifest", tmp_path / "list.csv")


def test_images_that_are_not_where_the_table_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_LOOKED_FOR", 2)
    (tmp_path / "train.csv").write_text("path,label\na,x\nb,y\nc,x\n")
    (tmp_path / "test.csv").write_text("path,label\nd,x\n")
    for name, found in [("a.txt", None), ("c", None), ("b.PNG", "a.PNG"), ("b", "a")]:
        (tmp_path / name).touch()
        if found is None:
            assert f"train.csv: no {tmp_path / 'a'}, with or without" in mistake("manifest", tmp_path)
        else:
            train = opened("manifest", tmp_path)["train"]
            assert [train.name(0), len(train)] == [str(tmp_path / found), 3]


def test_the_index_of_a_manifest_is_kept_until_it_changes(tmp_path: Path) -> None:
    options: dict[str, Any] = {"index_cache": str(tmp_path / "index"), "index_all": True, "val_fraction": 0.5}
    (tmp_path / "list.csv").write_text("path,label\na.jpg,x\nb.jpg,x\n")
    assert counts(tmp_path / "list.csv", **options)["train"] == 1
    (kept,) = (tmp_path / "index").rglob("*.npz")
    inode = kept.stat().st_ino
    counts(tmp_path / "list.csv", **options)
    assert kept.stat().st_ino == inode
    (tmp_path / "list.csv").write_text("path,label\na.jpg,x\nb.jpg,x\nc.jpg,x\nd.jpg,x\n")
    assert counts(tmp_path / "list.csv", **options)["train"] == 2


def test_every_source_has_its_row() -> None:
    table = (ROOT / "data" / "README.md").read_text().partition("| `data.source` | what |")[2].partition("\n\n")[0]
    ours = [name for name, source in Source.choices().items() if source.__module__.startswith("pycls_fast.")]
    assert [name for name in ours if f"`{name}`" not in table] == []


def test_a_column_of_groups(tmp_path: Path) -> None:
    """Of zeros and ones it is no class; test images without labels, which are left out, count in no group."""
    table, cache = tmp_path / "all.csv", {"index_cache": str(tmp_path / "index"), "index_all": True}
    rows = [f"{number}.jpg,{number // 5 % 2}" for number in range(20)]
    labels = [f"{number % 2},{number % 3 % 2}" for number in range(20)]
    table.write_text("\n".join(["path,patient,c0,c1", *map(",".join, zip(rows, labels, strict=True))]))
    splits = opened("manifest", table, group_by="patient", label_separator=";", folds=2, fold=1, **cache)
    assert splits["val"].classes == ("c0", "c1")
    assert [int(Path(splits["val"].name(index)).stem) for index in range(10)] == [*range(5, 10), *range(15, 20)]
    # What is known of the table does not hold the other column.
    assert "data.group_by: patent is no column of" in mistake(
        "manifest", table, group_by="patent", label_separator=";", **cache
    )
    labels = [f"{'ab'[number % 2]},train" if number < 16 else ",test" for number in range(20)]
    table.write_text("\n".join(["path,patient,label,split", *map(",".join, zip(rows, labels, strict=True))]))
    assert counts(table, group_by="patient", folds=2, fold=0) == {"train": 6, "val": 10}
    table.write_text(table.read_text().replace(",test", "a,val"))
    assert "has a validation split; use data.group_by=null" in mistake("manifest", table, group_by="patient")


def test_images_with_several_labels(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("path,label\na,dog; cat\nb,\nc,cat;dog\nd,cat;;cat\ne,zebra\nf,nan\n")
    (tmp_path / "val.csv").write_text("path,label\nf,zebra;dog\ng,dog\n")
    splits = opened("manifest", tmp_path, label_separator=";")
    train, val = splits["train"], splits["val"]
    assert train.classes == val.classes == ("cat", "dog", "zebra")
    assert said(train) == [{"cat", "dog"}, set(), {"cat", "dog"}, {"cat"}, {"zebra"}, set()]
    assert train.labels[0] == train.labels[2]
    assert train.class_counts().tolist() == [3, 2, 1]
    # The validation table alone has other classes in other places.
    assert said(val) == [{"dog", "zebra"}, {"dog"}]
    assert said(match_classes(val, ("zebra", "horse", "dog"), where="val", of="train")) == said(val)
    (tmp_path / "val.csv").write_text("path,label\nf,horse;dog\n")
    said_of_val = "(val): there are images of horse, but the classes of train are cat, dog, zebra; name the classes"
    assert said_of_val in mistake("manifest", tmp_path, label_separator=";")
    (tmp_path / "val.csv").write_text("path,label\nf,\n")
    assert "(val): images without labels, or none" in mistake("manifest", tmp_path, label_separator=";")


def test_several_labels_as_numbers_lists_and_a_random_split(tmp_path: Path) -> None:
    # Each image has a set of its own, so that the split cannot be class by class.
    wanted = [{f"c{k}" for k in range(4) if number >> k & 1} for number in range(10)]
    numbers = [[str(k) for k in range(4) if number >> k & 1] for number in range(10)]
    names = [f"{number}.jpg" for number in range(10)]
    (tmp_path / "classes.txt").write_text("c0\nc1\nc2\nc3\n")
    lines = [f"{name},{'|'.join(own)}" for name, own in zip(names, numbers, strict=True)]
    (tmp_path / "all.csv").write_text("\n".join(["path,label", *lines]))
    pq.write_table(pa.table({"path": names, "label": numbers}), tmp_path / "all.parquet")
    marked = [
        ",".join([name, *("01"[f"c{k}" in own] for k in range(4))]) for name, own in zip(names, wanted, strict=True)
    ]
    (tmp_path / "marked.csv").write_text("\n".join(["path,c0,c1,c2,c3", *marked]))
    pq.write_table(
        pa.table({"path": names, **{f"c{k}": [f"c{k}" in own for own in wanted] for k in range(4)}}),
        tmp_path / "marked.parquet",
    )
    for file in ("all.csv", "all.parquet", "marked.csv", "marked.parquet"):
        splits = opened("manifest", tmp_path / file, label_separator="|")
        found = {source.name(index): own for source in splits.values() for index, own in enumerate(said(source))}
        assert {Path(name).name: own for name, own in found.items()} == dict(zip(names, wanted, strict=True))
        assert {name: len(source) for name, source in splits.items()} == {"train": 8, "val": 2}
    # A column for each class is labels of test images, too.
    (tmp_path / "both").mkdir()
    for name in ("train", "test"):
        shutil.copy(tmp_path / "marked.csv", tmp_path / "both" / f"{name}.csv")
    assert counts(tmp_path / "both", label_separator="|") == {"train": 10, "val": 10}
