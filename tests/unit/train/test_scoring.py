"""Scoring on another machine than training's: its batch and its memory are its own."""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

from pycls_fast import build
from pycls_fast.config.run import RunConfig
from pycls_fast.data.sources.arrays import SyntheticImages
from pycls_fast.data.to_rgb import Conversion
from pycls_fast.errors import UserError
from pycls_fast.models.vit import VisionTransformer
from pycls_fast.train.display import plain_table, wide_console
from pycls_fast.train.evaluate import Evaluation, Predictions, predictions_csv
from pycls_fast.train.pictures import write_report
from pycls_fast.train.tasks.score import score, score_neighbours
from tests.factories import config_of, randomise

TOOLS: dict[str, Callable[[RunConfig], int]] = {
    "score": lambda config: score(config, "val", None),
    "knn": lambda config: score_neighbours(config, k=1, temperature=1.0, split="val", output=None),
}


BASE = [
    "data=synthetic", "data.image_size=8", "data.num_workers=0", "data.synthetic_train_images=200",
    "data.synthetic_val_images=150", "data.synthetic_classes=3", "data.global_batch_size=4096",
    "data.eval_batch_size=null", "model.width=16", "model.heads=2", "model.depth=1", "model.mlp_width=16",
    "runtime.threads=1", "runtime.device=cpu", "runtime.progress=plain", "precision=fp32",
]  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """A large batch for several machines."""
    network = build.model(config_of(*BASE), 3, build.switches(config_of(*BASE), torch.device("cpu")))
    torch.save(randomise(network).float().state_dict(), tmp_path / "weights.pt")
    return config_of(*BASE, f"weights={tmp_path / 'weights.pt'}")


@pytest.mark.parametrize("tool", TOOLS)
def test_memory_that_does_not_suffice(tool: str, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
    monkeypatch.setattr(VisionTransformer, "forward", Mock(side_effect=full))
    with pytest.raises(UserError) as caught:
        TOOLS[tool](config)
    assert caught.value.lines == (
        "data.eval_batch_size: cpu is out of memory with 128 images at a time; use a smaller one",
    )


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (
            0,
            r"^data\.max_damaged: 30 images cannot be read, more than 0:(?s:.*)\nand 10 more; pycls-fast prepare",
        ),
        (5, r"^data\.max_damaged: 6 images cannot be read, more than 5:"),
        (6, r": no image can be read; repair"),
    ],
)
def test_images_that_cannot_be_read(
    tool: str, limit: int, message: str, config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is named once: in the error, or in a warning."""
    count = 30 if limit == 0 else 6
    for number in range(count):
        for split in ("train", "val"):
            file = tmp_path / "images" / split / f"class{number % 3}" / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    keys = [key for key in BASE if "synthetic" not in key]
    folder = [f"data.root={tmp_path / 'images'}", f"data.max_damaged={limit}", f"weights={config.weights}"]
    config = config_of(*keys, "data=folder", *folder)
    with pytest.raises(UserError, match=message) as caught:
        TOOLS[tool](config)
    assert len(caught.value.lines) == {0: 22, 5: 7, 6: 1}[limit]
    warned = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(set(warned)) == len(warned) == (6 if limit == 6 else 0)
    assert all(line.endswith("; left out") for line in warned)


def read_table(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.read_text().splitlines()))


def test_a_table_of_the_predictions(config: RunConfig, tmp_path: Path) -> None:
    output, table = tmp_path / "scores.json", tmp_path / "new" / "worst.csv"
    assert score(config, "train", str(output), predictions=str(table)) == 0
    rows = read_table(table)
    record = json.loads(output.read_text())
    assert len({row["image"] for row in rows}) == len(rows) == record["count"] == 200
    right = [row["label"] == row["predicted"] for row in rows]
    assert 100 * sum(right) / 200 == pytest.approx(record["top1"])
    losses = [float(row["loss"]) for row in rows]
    assert losses == sorted(losses, reverse=True)
    assert sum(losses) / 200 == pytest.approx(record["loss"], rel=1e-4)
    # The loss of an image that is right is that of its probability.
    assert any(right)
    for row, is_right in zip(rows, right, strict=True):
        assert 0.33 < float(row["probability"]) <= 1
        if is_right:
            assert -math.log(float(row["probability"])) == pytest.approx(float(row["loss"]), abs=1e-4)
    with build.world(config) as world:
        source = build.sources(config, world)["train"]
    first = next(index for index in range(200) if source.name(index) == rows[0]["image"])
    assert rows[0]["label"] == str(source.labels[first])
    assert rows[0]["class"] == source.classes[int(rows[0]["label"])]


def test_mirror_images_with_several_labels_are_averaged_class_by_class(config: RunConfig, tmp_path: Path) -> None:
    """Also by a configuration for one label: symmetric images have the same scores with and without."""
    lines = ["path,label"]
    for number, labels in enumerate(["cat;dog", "cat", "dog;cow", "cow"] * 2):
        Image.new("RGB", (8, 8), (30 * number, 255 - 30 * number, 99)).save(tmp_path / f"{number}.png")
        lines.append(f"{number}.png,{labels}")
    (tmp_path / "table.csv").write_text("\n".join(lines))
    table = ["data=manifest", f"data.root={tmp_path / 'table.csv'}", "data.label_separator=;"]
    keys = [key for key in BASE if "synthetic" not in key]
    config = config_of(*keys, *table, f"weights={config.weights}")
    plain, averaged = tmp_path / "plain.json", tmp_path / "averaged.json"
    assert score(config, "all", str(plain)) == score(config, "all", str(averaged), tta="flip") == 0
    found, expected = (json.loads(file.read_text()) for file in (averaged, plain))
    assert expected["f1"] > 0
    for name in ("map", "f1", "calibration_error", "loss"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name


def test_rows_of_images_without_a_class_or_a_number() -> None:
    source = SyntheticImages(150, 8, 3, seed=0)
    labels, predicted = np.array([0, -1, 1, 2]), np.array([5, 1, -1, 2])
    losses, probabilities = np.array([0.5, 0.0, np.nan, 2.0]), np.array([0.9, 0.8, np.nan, 0.25])
    text = predictions_csv(Predictions(np.array([3, 4, 5, 6]), labels, predicted, losses, probabilities), source)
    names = [source.name(index) for index in (5, 6, 3, 4)]
    c = source.classes
    assert list(csv.reader(text.splitlines()))[1:] == [
        [names[0], "1", c[1], "", "", "", "nan"],
        [names[1], "2", c[2], "2", c[2], "0.25", "2"],
        [names[2], "0", c[0], "5", "output 5", "0.9", "0.5"],
        [names[3], "", "", "1", c[1], "0.8", ""],
    ]
    # Of images with several labels, those without any have a loss, too: predicted classes are wrong.
    source.label_sets, losses[1] = np.eye(3, dtype=bool), 1.5
    text = predictions_csv(Predictions(np.array([3, 4, 5, 6]), labels, predicted, losses, probabilities), source)
    rows = list(csv.reader(text.splitlines()))[1:]
    assert [(row[0], row[-1]) for row in rows[2:]] == [(names[3], "1.5"), (names[2], "0.5")]


def test_formulas_and_control_characters_in_a_table_of_images() -> None:
    """Names that a spreadsheet computes and a terminal obeys."""
    one, source = np.ones(1), SyntheticImages(4, 8, 2, seed=0)
    source.classes, source.name = ("=1+1", "\x1b[31m"), lambda index: f"@{index}"
    text = predictions_csv(Predictions(np.array([3]), np.array([0]), np.array([1]), one, one), source)
    assert text.splitlines()[1:] == ["'@3,0,'=1+1,1,\\x1b[31m,1,1"]
    console = wide_console(file := io.StringIO())
    console.print(plain_table([{"class": "\x1b[31mred"}]))
    assert "\x1b" not in file.getvalue()


def test_a_page_of_the_wrong_predictions(config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "scores.json"
    table = tmp_path / "worst.csv"
    assert score(config, "val", str(output), predictions=str(table), report=str(tmp_path / "report")) == 0
    record = json.loads(output.read_text())
    html = (tmp_path / "report" / "index.html").read_text()
    assert set(record["intervals"]) == {"top1", "top5", "class_top1", "f1", "auc", "calibration_error"}
    low, high = record["intervals"]["f1"]
    shown = f"{record['f1']:.2f}% ({low:.2f}% to {high:.2f}%)"
    assert shown in html
    assert shown in capsys.readouterr().out
    wrong = sum(row["images"] - row["right"] for row in record["classes"])
    assert wrong > 0
    assert f"<p>{wrong} images" in html
    assert html.count("<figure") == html.count("data:image/png") - 1 == wrong
    rows = read_table(table)
    own = {row["image"]: math.exp(-float(row["loss"])) for row in rows}
    usual = {
        row["class"]: np.mean([own[each["image"]] for each in rows if each["class"] == row["class"]]) for row in rows
    }
    wrongs = [row for row in rows if row["label"] != row["predicted"]]
    expected = sorted(wrongs, key=lambda row: own[row["image"]] / usual[row["class"]])
    assert re.findall("<small>(.*)</small>", html) == [row["image"] for row in expected]
    assert (tmp_path / "report" / "confusion.png").is_file()


def test_a_page_says_that_it_shows_the_first_and_names_are_text(tmp_path: Path) -> None:
    source = SyntheticImages(150, 8, 3, seed=0)
    source.classes = ("<script>", "b", "c")
    many = np.arange(201) % len(source)
    labels, losses = np.zeros(201, np.int64), np.ones(201)
    found = Predictions(many, labels, labels + 1, losses, losses)
    write_report(tmp_path / "index.html", Evaluation(0.0, 0.0, 1.0, 201, found), source, "a & b", [], classes=[])
    html = (tmp_path / "index.html").read_text()
    assert "<p>201 images" in html
    assert "<p>Shown and searched are the first 200.</p>" in html
    assert html.count("<figure>") == html.count("labelled <b>&lt;script&gt;</b>") == 200
    assert "<script" not in html


def test_a_page_of_images_with_several_labels_that_are_turned(tmp_path: Path) -> None:
    """In the order of the class that is the least probable to be as labelled; each image upright."""
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (20, 10)).save(file, "JPEG", exif=exif)
    source = SimpleNamespace(
        classes=("a", "b", "c"), labels=np.array([0, 1, 2, 1]), label_sets=np.array([[1, 0, 0], [1, 1, 0], [0, 0, 0]]),
        read=lambda index: file.getvalue(), name=lambda index: f"{index}.jpg",
    )  # fmt: skip
    scores_NK = np.array([[3.0, -1, -1], [2, -1, -3], [-1, -2, 1.5], [-1, -1, -1]])
    found = Predictions(np.arange(4), np.array([0, 0, -1, 0]), np.array([0, 0, 2, 0]), *np.zeros((2, 4)))
    rows = [{"class": "a", "images": 3, "top1": 66.7, "precision": 100.0, "f1": 80.0, "times": 0}]
    write_report(
        tmp_path / "index.html", Evaluation(0.0, 0.0, 1.0, 4, found, scores_NK), source, "several", [], classes=rows,
        convert=Conversion(upright=True),
    )  # fmt: skip
    html = (tmp_path / "index.html").read_text()
    assert "<td>66.7%</td>" in html
    assert "<p>3 images" in html
    told = [
        " ".join(re.sub("<[^>]*>", " ", each).split())
        for each in re.findall("<figcaption>(.*?)</figcaption>", html, re.DOTALL)
    ]
    assert told == [
        "labelled none predicted c 82% 2.jpg",
        "labelled a, b predicted a 88% 1.jpg",
        "labelled a, b predicted none 3.jpg",
    ]
    tile = re.search('base64,([^"]*)', html).group(1)
    # A third of the square, in its middle, is beside the upright image.
    row = np.asarray(Image.open(io.BytesIO(base64.b64decode(tile))))[88]
    assert (row.any(axis=1) == (np.abs(np.arange(176) - 87.5) > 44)).all()
    assert not (tmp_path / "confusion.png").exists()
