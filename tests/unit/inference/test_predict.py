"""`predict` and `maps`, from their arguments to what they write; contact sheets, looked at by their pixels."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import pycls_fast
from pycls_fast.cli import find_verb
from pycls_fast.config.launch import read_options
from pycls_fast.errors import UserError
from pycls_fast.inference import predict
from pycls_fast.inference.images import GivenImages, find_images
from pycls_fast.inference.predict import percent
from pycls_fast.models.vit import VisionTransformer
from pycls_fast.train.contact_sheet import Cell, draw_sheet, tile, write_sheets
from tests.unit.inference.conftest import make_run
from tests.unit.inference.test_images import write_clip

TOOLS = Path(__file__).parents[3] / "tools"


def run_tool(name: str, *arguments: object) -> int:
    return read_options([str(a) for a in arguments], find_verb(name))()


@pytest.fixture
def bad(folder: Path) -> Path:
    """Among the images one that is none."""
    (folder / "bad[red].png").write_bytes(b"GIF89a, not really")
    return folder


def test_json(run_dir: Path, bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tool("predict", run_dir, bad, "format=json", "topk=2") == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    wanted = pycls_fast.load(run_dir).predict(sorted(bad.rglob("[0-9].png")), topk=2)
    assert [row["image"] for row in found["images"]] == [each.image for each in wanted]
    assert [(row["label"], row["class"], row["probability"]) for row in found["images"]] == [
        (each.label, each.class_name, each.probability) for each in wanted
    ]
    assert [len(row["top"]) for row in found["images"]] == [2] * 5
    assert (found["step"], [row["image"] for row in found["unreadable"]]) == (7, [str(bad / "bad[red].png")])
    assert found["weights"].startswith(f"{run_dir}/")
    assert found["preprocessing"] == pycls_fast.load(run_dir).preprocessing
    assert said.err.splitlines()[-1] == "1 of 6 images could not be read"
    assert f"unreadable: {bad / 'bad[red].png'}: " in said.err
    assert run_tool("predict", run_dir, bad / "bad[[]red].png") == 2


def test_frames_of_videos_and_damaged_ones(run_dir: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = [folder / "clips" / name for name in ("clip.mp4", "cut.mkv", "picture.png")]
    where[0].parent.mkdir()
    write_clip(where[0], 3)
    where[1].write_bytes(where[0].read_bytes()[:300])
    where[2].write_bytes((folder / "0.png").read_bytes())
    given = (where[0].parent, "format=csv", "every=1.5", "num_workers=2", "batch_size=1")
    assert run_tool("predict", run_dir, *given) == 0
    said = capsys.readouterr()
    rows = list(csv.DictReader(io.StringIO(said.out)))
    assert [row["image"] for row in rows] == [f"{where[0]}@0.0s", f"{where[0]}@1.5s", str(where[2])]
    frames = [GivenImages(find_images([str(where[0])], 1.5)).read(index) for index in range(2)]
    assert [row["class"] for row in rows[:2]] == [each.class_name for each in pycls_fast.load(run_dir).predict(frames)]
    assert re.search(r"unreadable: .*cut.mkv@0.0s: cannot be read: no video that can be read", said.err)
    assert said.err.splitlines()[-1] == "1 of 4 images could not be read"


def test_memory_that_does_not_suffice(run_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    monkeypatch.setattr(VisionTransformer, "forward", full)
    with pytest.raises(UserError) as caught:
        run_tool("predict", run_dir, folder)
    line = "batch_size: cpu is out of memory with 64 images at a time; use a smaller one"
    assert caught.value.lines == (line,)


def test_csv(run_dir: Path, bad: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tool("predict", run_dir, bad / "1.png", bad / "0.png", "format=csv", f"output={tmp_path / 'x.csv'}") == 0
    assert capsys.readouterr() == ("", "")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "x.csv").read_text())))
    wanted = pycls_fast.load(run_dir).predict([bad / "1.png", bad / "0.png"])
    assert [Path(row["image"]).name for row in rows] == ["1.png", "0.png"]
    for row, each in zip(rows, wanted, strict=True):
        assert (int(row["label"]), row["class"]) == (each.label, each.class_name)
        assert (int(row["label_5"]), row["class_5"]) == (each.top[4].label, each.top[4].class_name)
        assert float(row["probability_2"]) == pytest.approx(each.top[1].probability, rel=1e-5)


def test_a_threshold_tells_images_of_no_class(run_dir: Path, folder: Path, tmp_path: Path) -> None:
    found = pycls_fast.load(run_dir).predict(folder, topk=1)
    sure = sorted(each.probability for each in found)
    assert sure[0] < sure[3]
    named = [[each.class_name] * (each.probability > sure[2]) for each in found]
    given = (run_dir, folder, f"threshold={sure[2]}", "topk=1")
    for suffix in ("csv", "json", "txt"):
        assert run_tool("predict", *given, f"output={tmp_path / 'x'}.{suffix}") == 0
    rows = csv.DictReader((tmp_path / "x.csv").read_text().splitlines())
    assert [(row["class"], row["over"]) for row in rows] == [
        (each.class_name, ";".join(own)) for each, own in zip(found, named, strict=True)
    ]
    images = json.loads((tmp_path / "x.json").read_text())["images"]
    assert [[guess["class"] for guess in row["over"]] for row in images] == named
    assert (tmp_path / "x.txt").read_text().count(" none ") == sum(not own for own in named) == 3


def test_rows_are_there_before_the_last_image(
    run_dir: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error in the third batch loses that batch only."""
    done: list[int] = []
    forward = VisionTransformer.forward

    def failing(network: VisionTransformer, images: torch.Tensor) -> torch.Tensor:
        done.append(len(images))
        if len(done) == 3:
            raise KeyError("third batch")
        return forward(network, images)

    for output in ([f"output={tmp_path / 'x.csv'}"], []):
        done.clear()
        monkeypatch.setattr(VisionTransformer, "forward", failing)
        with pytest.raises(KeyError, match="third batch"):
            run_tool("predict", run_dir, folder, "format=csv", "batch_size=2", "topk=2", *output)
        monkeypatch.undo()
        text = (tmp_path / "x.csv").read_text() if output else capsys.readouterr().out
        rows = list(csv.DictReader(io.StringIO(text)))
        assert [Path(row["image"]).name for row in rows] == ["0.png", "1.png", "2.png", "3.png"]
        assert rows[3].keys() == {"image", "label", "class", "probability", "label_2", "class_2", "probability_2"}


def test_the_table(run_dir: Path, bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tool("predict", run_dir, bad, "topk=3", "output=-") == 0
    lines = capsys.readouterr().out.splitlines()
    (each, *_) = pycls_fast.load(run_dir).predict(bad / "0.png")
    (line,) = [line for line in lines if "/0.png" in line or "0.png " in line]
    # Class names with brackets are names and no markup.
    assert each.class_name in line
    assert f"{100 * each.probability:.1f}" in line
    assert each.top[2].class_name in line
    assert each.top[3].class_name not in line


def test_each_picture_on_the_sheet_has_its_own_words(
    run_dir: Path, bad: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind one that could not be read."""
    drawn: list[Cell] = []
    monkeypatch.setattr(predict, "write_sheets", lambda cells, path: drawn.extend(cells) or [path])
    shutil.copy(bad / "3.png", bad / "more")
    names = ["1.png", "bad[red].png", "3.png", "more/4.png", "more/3.png"]
    files = [bad / name for name in names]
    arguments = ["format=sheet", f"output={tmp_path / 'sheet.png'}", "topk=4"]
    assert run_tool("predict", run_dir, *files, *arguments) == 0
    del files[1]
    # Where two end with the same, their folders tell them apart.
    shown = ["1.png", f"{bad.name}/3.png", "4.png", "more/3.png"]
    wanted = pycls_fast.load(run_dir).predict(files)
    for cell, file, name, each in zip(drawn, files, shown, wanted, strict=True):
        assert np.array_equal(np.asarray(cell.picture), np.asarray(Image.open(file)))
        words = [f"{percent(guess.probability)}%  {guess.class_name}" for guess in each.top[:3]]
        assert (cell.title, [*cell.lines]) == (words[0], [name, *words[1:]])
    assert len({cell.title for cell in drawn}) == 3
    # A thousand photographs do not fit into memory.
    Image.new("RGB", (800, 600)).save(bad / "photograph.png")
    assert run_tool("predict", run_dir, bad / "photograph.png", *arguments) == 0
    assert drawn[-1].picture.size == (192, 144)


def test_a_list_on_standard_input(
    run_dir: Path, bad: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def give(text: str) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    give(f"{bad / '3.png'}\n\n{bad / 'gone.png'}\n{bad / '1.png'}\n")
    assert run_tool("predict", run_dir, "-", "format=json") == 0
    said = capsys.readouterr()
    assert [Path(row["image"]).name for row in json.loads(said.out)["images"]] == ["3.png", "1.png"]
    assert "gone.png: cannot be read: No such file or directory" in said.err
    give(f"{bad / '3.png'}\0file://{bad / '1.png'}\0")
    assert run_tool("predict", run_dir, "-", "format=json") == 0
    assert [Path(row["image"]).name for row in json.loads(capsys.readouterr().out)["images"]] == ["3.png", "1.png"]


def test_what_a_value_is() -> None:
    """A path is text, whatever it looks like; null is none, and no file of this name."""
    for text, value in (("7", "7"), ("null", None), ("of (two), [3].json", "of (two), [3].json")):
        assert dict(read_options(["run", "1.png", f"output={text}"], find_verb("predict")))["output"] == value
    assert dict(read_options(["runs", "output=of (two).csv"], find_verb("runs")))["output"] == "of (two).csv"


@pytest.mark.parametrize(
    ("tool", "arguments", "line"),
    [
        ("predict", [], "weights: missing; set it with weights=VALUE"),
        ("predict", ["RUN"], "images: missing; set it with images=VALUE"),
        ("predict", ["RUN", "IMAGES", "topk=0"], "topk: must be greater than 0; got 0"),
        (
            "predict",
            ["RUN", "IMAGES", "output=x.xlsx"],
            "output, its ending: must be one of .json, .csv, .png, .txt without format=NAME; got .xlsx",
        ),
        ("predict", ["RUN", "IMAGES", "format=sheet", "output=-"], "output: - cannot be written (unknown file"),
        ("predict", ["RUN", "IMAGES", "format=sheet", "output=x.abc"], "output: x.abc cannot be written (unknown file"),
        ("maps", ["RUN", "IMAGES", "output="], "output: string should have at least 1 character"),
        ("maps", ["RUN", "IMAGES", "kind=class"], "kind: class is for ResNets, and for timm"),
        ("maps", ["RUN", *["IMAGES"] * 41], "images: 205 are more than the 200 that are drawn at once"),
    ],
)
def test_mistakes_get_a_line(
    run_dir: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str, arguments: Any, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"RUN": str(run_dir), "IMAGES": str(folder)}
    with pytest.raises(UserError) as caught:
        run_tool(tool, *(names.get(argument, argument) for argument in arguments))
    assert any(told.startswith(line) for told in caught.value.lines), caught.value.lines
    assert not list(tmp_path.glob("*.png"))


def test_names_that_are_no_utf_8(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the image, of the classes, and of what is written; from the command line on."""
    coffee = os.fsdecode(b"caf\xe9")
    run, output = make_run(tmp_path / "run", classes=[coffee] * 10), folder / f"out {coffee}"
    image = (folder / "0.png").rename(folder / f"{coffee}.png")

    def said(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["predict.py", str(run), str(image), *arguments])
        with pytest.raises(SystemExit) as done:
            runpy.run_path(str(TOOLS / "predict.py"), run_name="__main__")
        told = capsys.readouterr()
        assert (done.value.code, told.err) == (0, "")
        return told.out

    assert re.search(r"caf\\xe9\.png.*caf\\udce9", said())
    said(f"output={output}.json")
    (found,) = json.loads(Path(f"{output}.json").read_text(encoding="utf-8"))["images"]
    assert (found["class"], Path(found["image"]).name) == (coffee, "caf\\xe9.png")
    assert said(f"output={output}.png").endswith("out caf\\udce9.png\n")
    Image.open(f"{output}.png").load()


@pytest.mark.parametrize(
    ("config_name", "kind", "columns"),
    [
        ("vit_digits", "attention", 5),
        pytest.param("vit_digits", "rollout", 2, marks=pytest.mark.slow),
        pytest.param("resnet_digits", "features", 2, marks=pytest.mark.slow),
        pytest.param("resnet_digits", "class", 2, marks=pytest.mark.slow),
    ],
)
def test_maps(tmp_path: Path, bad: Path, config_name: str, kind: str, columns: int) -> None:
    run, output = make_run(tmp_path / "run", config_name=config_name), tmp_path / "maps.png"
    assert run_tool("maps", run, bad, f"kind={kind}", f"output={output}") == 0
    sheet = np.asarray(Image.open(output)).astype(int)
    cells = sheet[:, 8:].shape[1] // 200
    assert cells == columns
    if kind in ("attention", "class"):
        assert run_tool("maps", run, bad, f"output={output}") == 0
        assert np.array_equal(np.asarray(Image.open(output)), sheet)
    first = np.asarray(Image.open(bad / "0.png"))
    assert np.array_equal(sheet[8:152:24, 8:200:24], first[:6])
    for column in range(1, columns):
        drawn = sheet[8:150, 8 + 200 * column :][:, :190]
        assert (drawn.max(axis=2) - drawn.min(axis=2)).max() > 30, "no colour over the picture"
    if kind == "attention":
        assert run_tool("maps", run, bad, "heads=false", f"output={output}") == 0
        assert np.asarray(Image.open(output)).shape[1] == 2 * 200 + 8


RED = (200, 30, 30)


def cell(title: str = "99.0%  a cat", color: tuple[int, int, int] = RED, size: tuple[int, int] = (40, 40)) -> Cell:
    return Cell(Image.new("RGB", size, color), title, ["file.png", "dog"])


def test_pictures_with_words_below_them() -> None:
    colors = [(0, 100, 20 * i) for i in range(5)]
    sheet = np.asarray(draw_sheet([cell(color=color) for color in colors], columns=3, side=100))
    # 3 columns of 100 and margins of 8; 2 rows of 100, a bar of 24 and two lines of 17 each
    assert sheet.shape == (2 * (100 + 24 + 8 + 34) + 8, 3 * 108 + 8, 3)
    for place, color in enumerate(colors):
        row, column = divmod(place, 3)
        drawn = sheet[8 + row * 166 :, 8 + column * 108 :][:158, :100]
        assert (drawn[:100] == color).all(), "the whole picture"
        strip = drawn[100:124]
        assert (strip == 20).all(axis=2).mean() > 0.5
        assert (strip > 200).all(axis=2).any(), "white letters"
        assert (drawn[124:] < 150).any(), "letters under the bar"
    assert (sheet[8 + 166 :, 8 + 2 * 108 :] == 255).all()


def test_a_long_title_stays_below_its_picture() -> None:
    for title in ("w" * 300, "語" * 200, "été [red] \\u"):
        sheet = np.asarray(draw_sheet([cell(title), cell("")], columns=2, side=100))
        assert (sheet[8:108, 116:] == [*[[*RED]] * 100, *[[255] * 3] * 8]).all()
        assert (sheet[108:132, 116:] == 255).all()
        assert (sheet[:, 108:116] == 255).all()


def test_a_picture_keeps_its_proportions_and_small_ones_their_pixels() -> None:
    small = np.arange(2 * 4 * 3, dtype=np.uint8).reshape(2, 4, 3)
    square = np.asarray(tile(Image.fromarray(small), 40))
    assert (square[:10] == 225).all()
    assert (square[30:] == 225).all()
    assert np.array_equal(square[10:30], small.repeat(10, axis=0).repeat(10, axis=1))
    wide = np.asarray(tile(Image.new("RGB", (300, 8), RED), 40))
    assert (wide == RED).all(axis=2).sum() == 40


@pytest.mark.parametrize(("count", "files"), [(1, 1), (6, 1), (7, 2), (13, 3)])
def test_more_pictures_go_to_more_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, files: int
) -> None:
    monkeypatch.setattr("pycls_fast.train.contact_sheet._MOST", 7)
    written = write_sheets([cell()] * count, tmp_path / "sheet.png", columns=3, side=30)
    assert [file.name for file in written] == ["sheet.png", "sheet_2.png", "sheet_3.png"][:files]
    heights = [np.asarray(Image.open(file)).shape[0] for file in written]
    assert heights[:-1] == [2 * (30 + 24 + 8 + 34) + 8] * (files - 1)
    assert sum((height - 8) // 96 for height in heights) == -(-count // 3)
