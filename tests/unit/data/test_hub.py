"""Parquet files, and datasets of the hub, through `datasets`."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from pycls_fast.data.choices import Given
from pycls_fast.data.sources.arrays import open_given
from pycls_fast.errors import UserError
from pycls_fast.inference.from_python import _overrides
from tests.unit.data.layouts import (
    CLASSES,
    expected,
    hub_datasets,
    make_content,
    mistake,
    opened,
    samples_of,
    write_hub,
    write_hub_parquet,
)

CONTENT = make_content()
datasets.disable_progress_bars()


def write(path: Path, columns: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def test_parquet(tmp_path: Path) -> None:
    root = tmp_path / "a [set]*"
    splits = opened("parquet", write_hub_parquet(root, CONTENT))
    for split, samples in CONTENT.items():
        assert samples_of(splits[split]) == expected(samples)
    source = pickle.loads(pickle.dumps(splits["train"]))
    # In any order.
    for index in (5, 0, 3, 1, 5):
        assert source.read(index) == CONTENT["train"][index].data
    assert source.name(8) == f"{root} (train)[8]"


def test_a_dataset_of_a_program() -> None:
    given, data = hub_datasets(CONTENT), Given(dataset="theirs")
    for split, source in open_given(given, data).items():
        assert samples_of(source) == expected(CONTENT[{"validation": "val"}.get(split, split)])
        assert source.classes == CLASSES
    renamed = given["train"].rename_columns({"image": "img", "label": "labels"})
    assert samples_of(open_given(renamed, data)["all"]) == expected(CONTENT["train"])
    with pytest.raises(UserError, match="items have image, kind; call one label or labels or target"):
        open_given(given["train"].rename_column("label", "kind"), data)
    assert open_given({"test": given["train"].select_columns(["image"])}, data)["test"].labels.max() == -1
    for each in (given, given["train"]):
        assert _overrides("data", each, [])[0] == "data.source=given"


def test_a_row_without_an_image(tmp_path: Path) -> None:
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    (tmp_path / "own.jpg").write_bytes(b"own")
    images = [None, {"bytes": None, "path": None}, {"bytes": None, "path": str(tmp_path / "own.jpg")}]
    write(tmp_path / "train.parquet", {"image": pyarrow.array(images, kind), "label": [0, 0, 0]})
    source = opened("parquet", tmp_path, whole=True)["all"]
    for index in (0, 1):
        with pytest.raises(OSError, match="no image in this row"):
            source.read(index)
    assert source.read(2) == b"own"


def test_plain_binary_columns_and_labels_that_are_names(tmp_path: Path) -> None:
    data = [sample.data for sample in CONTENT["train"][:4]]
    write(tmp_path / "train.parquet", {"jpeg": data, "kind": ["b", "a", "b", "a"]})
    write(tmp_path / "test.parquet", {"jpeg": data[:1], "kind": ["b"]})
    splits = opened("parquet", tmp_path, label_column="kind")
    assert samples_of(splits["train"]) == list(zip(data, ["b", "a", "b", "a"], strict=True))
    assert samples_of(splits["val"]) == [(data[0], "b")]
    assert "choose one with data.source=parquet data.label_column=NAME" in mistake("auto", tmp_path / "train.parquet")
    # So are numbers too large to count classes: dates, or numbers of products.
    write(tmp_path / "train.parquet", {"image": data, "label": [20260101001, 7, 20260101001, 7]})
    source = opened("parquet", tmp_path / "train.parquet", whole=True)["all"]
    assert (source.classes, source.labels.tolist()) == (("7", "20260101001"), [1, 0, 1, 0])


def test_a_column_of_groups(tmp_path: Path) -> None:
    write(tmp_path / "all.parquet", {"image": [b"?"] * 6, "label": [0, 1] * 3, "eye": [7, 7, None, None, 7, 7]})
    splits = opened("parquet", tmp_path, group_by="eye", folds=2, fold=1)
    assert [splits["val"].name(index)[-3:] for index in range(2)] == ["[2]", "[3]"]


@pytest.mark.parametrize(
    ("labels", "classes"), [([1.0, 0.0, 1.0, 0.0], ("0", "1")), ([True, False, True, False], ("False", "True"))]
)
def test_labels_that_are_whole_floats_or_truth_values(tmp_path: Path, labels: list[Any], classes: Any) -> None:
    """pandas makes floats of a column with gaps. Parquet, and the same as a table."""
    write(tmp_path / "images.parquet", {"image": [sample.data for sample in CONTENT["train"][:4]], "label": labels})
    (tmp_path / "list.csv").write_text("\n".join(["path,label", *(f"{label}.jpg,{label}" for label in labels)]))
    (tmp_path / f"{labels[0]}.jpg").touch()
    for kind, file in (("parquet", "images.parquet"), ("manifest", "list.csv")):
        source = opened(kind, tmp_path / file, whole=True)["all"]
        assert (source.classes, source.labels.tolist()) == (classes, [1, 0, 1, 0])


@pytest.mark.parametrize(
    ("columns", "options", "says"),
    [
        ({"x": [b"1"], "y": [1]}, {}, "has no column 'label'; it has x, y: choose one with data.source=parquet data"),
        ({"path": ["a"], "label": [1]}, {}, "columns of images are none"),
        ({"x": [b"1"], "z": [b"1"], "label": [1]}, {}, "columns of images are x, z"),
        ({"x": [b"1"], "label": [1]}, {"image_column": "label"}, "columns of images are x"),
        ({"x": [b"1", b"2"], "label": [1, None]}, {}, "1 of 2 images have no label"),
        ({"x": [b"1", b"2"], "label": [1.5, 2.0]}, {}, "the label 1.5 is no whole number or name"),
    ],
)
def test_parquet_with_mistakes(tmp_path: Path, columns: dict[str, Any], options: dict[str, str], says: str) -> None:
    write(tmp_path / "train.parquet", columns)
    assert says in mistake("parquet", tmp_path, **options)


def test_a_shard_that_is_no_parquet(tmp_path: Path) -> None:
    write_hub_parquet(tmp_path, CONTENT, shards=3)
    first = min((tmp_path / "data").glob("train-*"))
    first.write_bytes(first.read_bytes()[:-30])
    assert f"{tmp_path} cannot be loaded by datasets" in mistake("parquet", tmp_path)


@pytest.mark.parametrize("labels", [{}, {"label": [-1, -1]}, {"label": pyarrow.array([None, None], pyarrow.int64())}])
def test_test_files_without_labels_are_left_out(tmp_path: Path, labels: dict[str, Any]) -> None:
    write_hub_parquet(tmp_path, CONTENT)
    images = [{"bytes": sample.data, "path": None} for sample in CONTENT["val"][:2]]
    write(tmp_path / "data/test-00000-of-00001.parquet", {"image": images, **labels})
    assert set(opened("parquet", tmp_path)) == {"train", "val"}
    for file in (tmp_path / "data").glob("validation*"):
        file.unlink()
    assert sum(map(len, opened("parquet", tmp_path).values())) == len(CONTENT["train"])


def test_saved_datasets(tmp_path: Path) -> None:
    both = write_hub(tmp_path / "both", CONTENT)
    assert "data.train: must be one of train, validation;" in mistake("hub", both, train="training")
    assert "has no column 'kind'; it has image, label" in mistake("hub", both, label_column="kind")
    saved, val = datasets.load_from_disk(both).values()
    # Test images without labels are left out.
    for number, test in enumerate((val.map(lambda row: {"label": -1}), val.remove_columns("label"))):
        root = tmp_path / str(number)
        datasets.DatasetDict({"train": saved, "test": test}).save_to_disk(str(root))
        assert sum(map(len, opened("hub", root).values())) == len(CONTENT["train"])
    # Rows in another order than on disk.
    saved.select(range(len(saved) - 1, -1, -1)).save_to_disk(str(tmp_path / "one"))
    source = opened("hub", tmp_path / "one", whole=True)["all"]
    assert samples_of(source) == expected(CONTENT["train"][::-1])
    splits = opened("hub", tmp_path / "one", val_fraction=0.25)
    assert len(splits["train"]) + len(splits["val"]) == len(CONTENT["train"])


def test_splits_of_other_names_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train, val = hub_datasets(CONTENT).values()
    datasets.DatasetDict({"train": train, "holdout": val, "eval": val}).save_to_disk(str(tmp_path / "known"))
    assert len(opened("hub", tmp_path / "known")["val"]) == len(CONTENT["val"])
    datasets.DatasetDict({"train": train, "holdout": val}).save_to_disk(str(tmp_path / "other"))
    assert len(opened("hub", tmp_path / "other", val="holdout")["val"]) == len(CONTENT["val"])
    assert "note" not in capsys.readouterr().err
    assert sum(map(len, opened("hub", tmp_path / "other").values())) == len(CONTENT["train"])
    assert "other: splits that are not read: holdout; data.val=NAME" in capsys.readouterr().err


def test_names_and_revisions_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, asked = datasets.load_from_disk(write_hub(tmp_path / "me/cats", CONTENT)), []

    def load(name: str, config: str | None, *, revision: str | None) -> object:
        asked.append((name, config, revision))
        if name == "nobody/nothing":
            raise ConnectionError("Couldn't reach 'nobody/nothing' on the Hub (offline)")
        return saved

    monkeypatch.setattr(datasets, "load_dataset", load)
    for root in ("me/cats", "me/cats@v1"):
        assert opened("hub", root, hub_config="small")["val"].classes == CLASSES
    assert asked == [("me/cats", "small", None), ("me/cats", "small", "v1")]
    assert "nobody/nothing cannot be loaded by datasets (Conn" in mistake("hub", "nobody/nothing")
