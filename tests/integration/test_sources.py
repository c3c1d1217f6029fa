"""Runs from every kind of source, damaged data, `prepare_data.py`, and further evaluation sets."""

from __future__ import annotations

import io
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image

from pycls_fast.commands.train import PrepareVerb
from pycls_fast.config import load_config
from pycls_fast.data.sources.packed import PackedImages
from pycls_fast.data.to_rgb import orientation_of
from pycls_fast.errors import UserError
from pycls_fast.train import train
from tests.factories import class_folders
from tests.integration.runs import TINY, command, records, run_process, scored, under_torchrun
from tests.unit.data.layouts import CLASSES, LAYOUTS, make_content, write_folder

CONTENT = make_content(train=(8, 10, 7), val=(3, 2, 4))
SETTINGS = (*TINY, "data=auto", "data.global_batch_size=8", "data.num_workers=0", "data.index_cache=off")


def run(run_dir: Path, root: Path | str, *overrides: str) -> list[tuple[str, float]]:
    """Train; every loss and score."""
    settings = [*SETTINGS, f"data.root={root}", f"run_dir={run_dir}", *overrides]
    assert train(load_config("vit_digits", settings)) == 0
    losses = [("train", record["loss"]) for record in records(run_dir, "train")]
    return losses + [("eval", record["loss"]) for record in records(run_dir, "eval")]


@pytest.mark.slow
def test_blocks_are_another_order_that_ranks_agree_on(tmp_path: Path) -> None:
    root = LAYOUTS["tar"](tmp_path / "tar", CONTENT)
    full = run(tmp_path / "full", root, "data.source=tar")
    blocks = run(tmp_path / "blocks", root, "data.source=tar", "data.shuffle=blocks", "data.shuffle_buffer=8")
    assert blocks != full
    settings = [*SETTINGS, f"data.root={root}", f"run_dir={tmp_path / 'two'}"]
    settings += ["data.source=tar", "data.shuffle=blocks", "data.shuffle_buffer=8"]
    run_process(under_torchrun(command(*settings), ranks=2), cwd=tmp_path)
    losses = [record["loss"] for record in records(tmp_path / "two", "train")]
    assert losses == pytest.approx([loss for part, loss in blocks if part == "train"], rel=1e-4)
    with pytest.raises(UserError, match=r"data.shuffle: the order of the images is full now, but blocks-"):
        run(tmp_path / "blocks", root, "data.source=tar", "data.shuffle=full", "data.shuffle_buffer=8")


def prepare(*arguments: str, capsys: pytest.CaptureFixture[str], expect: int = 0) -> str:
    """`prepare_data.py` in this process; what it printed."""
    pairs = (a.partition("=")[::2] for a in arguments[1:] if not a.startswith("data."))
    options: dict[str, Any] = {key: int(value) if value.isdigit() else value for key, value in pairs}
    config = load_config("resnet50", ["data.num_workers=0", *(a for a in arguments if a.startswith("data."))])
    capsys.readouterr()
    assert PrepareVerb(**{"mode": arguments[0], **options})(config) == expect
    return capsys.readouterr().out


def test_raw_pixels_are_packed_as_the_key_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Encoded images keep the tag, so the key does not matter for them; Pillow has turned those in TIFF files."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    for split, label in itertools.product(("train", "val"), ("cat", "dog")):
        folder = tmp_path / "folder" / split / label
        folder.mkdir(parents=True)
        for name in ("a.jpg", "b.tif"):
            Image.new("RGB", (30, 20)).save(folder / name, exif=exif)
    for store, key in itertools.product(("raw", "encoded"), ("true", "false")):
        output = tmp_path / f"{store} {key}"
        where = (f"data.root={tmp_path / 'folder'}", f"output={output}", "short_side=10")
        more = (f"store={store}", f"data.exif_orientation={key}", "data.source=folder")
        printed = prepare("pack", *where, *more, capsys=capsys)
        # To be copied.
        keys = " data.exif_orientation=true" if key == "true" else ""
        assert f"\nuse it with data.source=packed 'data.root={output}'{keys}\n" in printed
        stored, turned = (PackedImages(output / "train").read(index) for index in range(2))
        if isinstance(stored, bytes):
            assert orientation_of(stored) == 6
            assert (orientation_of(turned), Image.open(io.BytesIO(turned)).size) == (1, (10, 15))
        else:
            assert stored.shape == ((15, 10, 3) if key == "true" else (10, 15, 3))
            assert turned.shape == (15, 10, 3)


def test_pack_and_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_folder(tmp_path / "folder", CONTENT)
    pack = ("pack", f"data.root={root}", f"output={tmp_path / 'packed'}", "short_side=12")
    printed = prepare(*pack, capsys=capsys)
    assert "25 images" in printed
    assert f"use it with data.source=packed data.root={tmp_path / 'packed'}" in printed
    packed = run(tmp_path / "run", tmp_path / "packed")
    assert packed != run(tmp_path / "other", root)
    again = prepare(*pack, capsys=capsys).splitlines()
    added = [f"{tmp_path}/packed/{name}: packed before, nothing done; remove it to pack again" for name in CONTENT]
    assert [line for line in again if line not in added] == printed.splitlines()
    assert set(added) <= set(again)


def test_verify_lists_the_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is said of each kind of damage is in tests/unit/data/test_to_rgb.py."""
    root = tmp_path / "images"
    for split in ("train", "val"):
        class_folders(root / split, cat=5, dog=4)
    said = {str(root / "train/cat/image 0.png"): "HTML", str(root / "train/dog/image 1.png"): "empty (0 bytes)"}
    for name, word in said.items():
        Path(name).write_text("<!DOCTYPE html><html>404</html>" if word == "HTML" else "")
    (tmp_path / "file").touch()
    # Told before all images are read.
    with pytest.raises(UserError, match=r"^output: .*file/report.json cannot be written \(.*\); give another path"):
        prepare("verify", f"data.root={root}", f"output={tmp_path / 'file/report.json'}", capsys=capsys)
    assert "images are damaged" not in capsys.readouterr().out
    report_file = tmp_path / "reports/new/report.json"
    printed = prepare("verify", f"data.root={root}", f"output={report_file}", capsys=capsys, expect=2)
    for name, word in said.items():
        assert sum(line.startswith(f"{name}: ") and word in line for line in printed.splitlines()) == 1
    assert "train: 2 of 9 images are damaged" in printed
    assert "val: 0 of 9 images are damaged" in printed
    report = json.loads(report_file.read_text())
    assert {entry["name"] for entry in report["train"]["damaged"]} == set(said)
    assert sum(report["train"]["classes"].values()) == 9
    assert report["copies"].keys() == {"identical", "alike"}
    assert report["left_out"] == {}
    (root / "loose.jpg").touch()
    printed = prepare("verify", f"data.root={root}", "split=val", f"output={report_file}", capsys=capsys)
    assert "left out: 1 .jpg (loose.jpg)" in printed
    assert json.loads(report_file.read_text())["left_out"] == {".jpg": ["loose.jpg"]}


def test_no_name_in_the_data_controls_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split in ("train", "val"):
        class_folders(tmp_path / split, **{"red\x1b[31m": 2, "b": 1})
    (tmp_path / "val" / "b" / "odd\x1b[31m.jpg").write_bytes(b"no image")
    printed = prepare("verify", f"data.root={tmp_path}", capsys=capsys, expect=2)
    assert "\x1b" not in printed
    assert "odd\\x1b[31m.jpg: " in printed
    assert "train: 2 classes: 1 of b, 2 of red\\x1b[31m" in printed


def test_copies_with_several_labels_are_compared_by_their_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tables list the same sets of classes in another order, and one image has others."""
    images = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), dtype=np.uint8)
    rows: dict[str, list[str]] = {"train": ["a;b", "b", ""], "val": ["b", "b;a", "a"]}
    for split, order in (("train", [0, 1, 2]), ("val", [1, 0, 2])):
        for number, own in enumerate(order):
            Image.fromarray(images[own]).save(tmp_path / f"{split}{number}.png")
        lines = [f"{split}{number}.png,{label}" for number, label in enumerate(rows[split])]
        (tmp_path / f"{split}.csv").write_text("\n".join(["path,label", *lines]))
    where = ("data.source=manifest", f"data.root={tmp_path}", "data.label_separator=;")
    printed = prepare("verify", *where, capsys=capsys)
    assert "groups of identical images: 3, 3 across splits, 1 across labels" in printed
    assert "train: 2 classes: 1 of a, 2 of b\n" in printed


@pytest.mark.slow
def test_further_evaluation_sets(tmp_path: Path) -> None:
    """Scored as published, and written down with the preprocessing; ReaL from the validation images."""
    content = make_content(train=(8, 10, 7), val=(3, 2, 4))
    root = Path(write_folder(tmp_path / "imagenet", content))
    numbers = {}
    for number, path in enumerate(sorted((root / "val").rglob("*.JPEG")), start=1):
        path.rename(path.with_name(f"ILSVRC2012_val_{number:08d}.JPEG"))
        numbers[number] = CLASSES.index(path.parent.name)
    run(tmp_path / "run", root)
    settings = [*SETTINGS, f"weights={tmp_path / 'run'}"]

    def on_set(name: str, eval_root: Path, *overrides: str) -> dict[str, object]:
        own = [*settings, f"data.eval_set={name}", f"data.eval_root={eval_root}", *overrides]
        return scored(load_config("vit_digits", own))

    plain = scored(load_config("vit_digits", [*settings, f"data.root={root}"]))
    assert plain["preprocessing"].startswith("covering 8 x 8 (bilinear), centre 8 x 8, mean 0.485 0.456 0.406")
    # ReaL with the single right label is top-1 on the validation set.
    (tmp_path / "real.json").write_text(json.dumps([[numbers[number]] for number in range(1, 10)]))
    real = on_set("real", tmp_path / "real.json", f"data.root={root}")
    assert (real["top1"], real["count"], real["loss"], real["split"]) == (plain["top1"], 9, None, "real")
    # The same images as V2, with folders 0 to 2, score the same; no training data is needed.
    for label, name in enumerate(CLASSES):
        shutil.copytree(root / "val" / name, tmp_path / "v2" / str(label))
    v2 = on_set("v2", tmp_path / "v2")
    assert (v2["top1"], v2["top5"], v2["count"]) == (plain["top1"], plain["top5"], plain["count"])
    assert v2["loss"] == pytest.approx(plain["loss"])
    # Among a single class everything is right; Sketch takes all of them.
    shutil.copytree(root / "val" / CLASSES[2], tmp_path / "a" / CLASSES[2])
    adversarial = on_set("a", tmp_path / "a")
    assert (adversarial["top1"], adversarial["count"]) == (100.0, 4)
    assert "1 classes" in str(adversarial["rule"])
    assert on_set("sketch", tmp_path / "a")["rule"] == "best of all 3 classes"
    with pytest.raises(UserError, match=r"^data.eval_root: not set; give the files of data.eval_set=r"):
        load_config("vit_digits", [*settings, "data.eval_set=r"])
