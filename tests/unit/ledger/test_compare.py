"""Two runs side by side: planted disagreements are found, sets that differ are not compared, the page is whole."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import ExifTags, Image

from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.errors import UserError
from pycls_fast.ledger.compare import _pictures, compare_runs, comparison, differing, read_run_files
from pycls_fast.ledger.report.comparison import notes, verdict
from pycls_fast.ledger.runs import OF_THE_PLACE
from pycls_fast.speed import resolve
from pycls_fast.train.evaluate import Predictions
from pycls_fast.train.folder import RunFolder
from tests.unit.ledger.test_page import Tags

IMAGES = 359
# Position -> (predicted, loss), where a run is wrong.
WRONG_A = {3: (9, 2.0), 10: (8, 4.0), 50: (1, 3.0)}
WRONG_B = {10: (7, 5.0), 20: (6, 1.5), 30: (5, 6.0), 40: (4, 3.0), 359 - 1: (0, 2.5)}


class Page(Tags):
    """As the ledger's, but for pictures, which are inside of the page."""

    def __init__(self) -> None:
        super().__init__()
        self.pictures = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            self.pictures += 1
            assert str(dict(attrs)["src"]).startswith("data:image/")
            return
        super().handle_starttag(tag, attrs)


def labels(digits: Path, *overrides: str) -> np.ndarray:
    run = load_config("vit_digits", [f"data.root={digits}", *overrides])
    with build.world(run) as world:
        source: Any = build.sources(run, world)["val"]
    return np.array([source.read(index)[1] for index in range(len(source))])


def make_run(
    path: Path, digits: Path, wrong: dict[int, tuple[int, float]], *overrides: str, finished: bool = True
) -> Path:
    """A run folder whose latest evaluation was wrong in these images alone."""
    config = load_config("vit_digits", [f"data.root={digits}", *overrides])
    folder = RunFolder(path)
    folder.create()
    settings = config.model_dump(mode="json")
    # As in `Run.settings`.
    settings["speed"] = resolve(config.speed, "cpu", config.optim).model_dump()
    folder.write_config(settings)
    for step in range(1, 11):
        folder.add_record("train", step, step / 2, loss=2 - 0.1 * step, images_per_second=1e3, memory_peak_bytes=10**9)
    right = labels(digits, *overrides)
    predicted, losses = right.copy(), np.full(len(right), 0.1, np.float32)
    for position, (label, loss) in wrong.items():
        # Never the right one by chance.
        predicted[position] = label if label != right[position] else (label + 1) % 10
        losses[position] = loss
    Predictions(np.arange(len(right)), right, predicted, losses, np.full_like(losses, 0.9)).save(folder.predictions)
    top1 = 100.0 * float((predicted == right).mean())
    for epoch in (2, 5):
        final = folder.add_record(
            "eval",
            2 * epoch,
            epoch,
            split="val",
            weights="model",
            top1=top1 - 5 + epoch,
            top5=100.0,
            loss=0.2,
            count=359,
        )
    if finished:
        folder.write_json("summary.json", {
            "final": final, "steps": 10, "epochs": 5.0, "images_per_second": 1000.0 + len(wrong), "wall_seconds": 60.0,
            "step_seconds_p50": 0.01, "memory_peak_bytes": 10**9, "parameters": 10**5, "world_size": 1, "device": "cpu",
            "forward_flops_per_image": 10**6,
        })  # fmt: skip
    return path


@pytest.fixture
def a(tmp_path: Path, digits: Path) -> Path:
    return make_run(tmp_path / "a", digits, WRONG_A)


@pytest.fixture
def b(tmp_path: Path, digits: Path) -> Path:
    return make_run(tmp_path / "b", digits, WRONG_B, "optim.lr=1e-3", "speed=reference")


def test_planted_disagreements(a: Path, b: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_runs(str(a), str(b), output=str(tmp_path / "out"), images=3) == 0
    record = json.loads((tmp_path / "out" / "compare.json").read_text())
    pair, found = record["images"]["pair"], record["images"]
    assert (pair["only_first"], pair["only_second"], pair["changed"], pair["images"]) == (4, 2, 7, IMAGES)
    assert pair["difference"] == pytest.approx(-100 * 2 / IMAGES)
    assert (found["both_wrong"], found["both_wrong_otherwise"], record["not_paired"]) == (1, 1, None)
    # The clearest first, and no more than were asked for.
    assert [each["index"] for each in found["only_a"]] == [30, 40, 358]
    assert [each["index"] for each in found["only_b"]] == [50, 3]
    first = found["only_a"][0]
    assert (first["loss_a"], first["loss_b"]) == pytest.approx((0.1, 6.0))
    assert first["a"] == first["class"] != first["b"]
    assert f"/{first['class']}/" in first["name"]
    changed = {row["class"]: row["difference"] for row in found["classes"] if row["difference"]}
    right = labels(Path(first["name"]).parents[1])
    assert set(changed) <= {str(right[position]) for position in (*WRONG_A, *WRONG_B)}
    assert sum(row["images"] for row in found["classes"]) == IMAGES
    said = capsys.readouterr().out
    assert "only A right: 4; only B right: 2; both wrong: 1" in said
    assert "No difference that 359 images can show: -0.56 points" in said
    assert "speed.attention" in said


def test_the_page(a: Path, b: Path, tmp_path: Path) -> None:
    compare_runs(str(a), str(b), output=str(tmp_path / "out"), images=3)
    page = Page()
    page.feed((tmp_path / "out" / "index.html").read_text())
    assert not page.open
    assert len(page.ids) == len(set(page.ids))
    assert set(page.references) <= set(page.ids)
    assert (page.pictures, page.seen.count("svg")) == (5, 3)
    for words in ("Right in A, wrong in B: 3 of 4", "Right in B, wrong in A: 2", "optim.lr", "0.001", "rounding"):
        assert words in page.text
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["compare.json", "index.html"]


def test_a_place_that_cannot_be_written(a: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "index.html").mkdir(parents=True)
    with pytest.raises(UserError, match=r"output: .*out cannot be written to \(Is a directory\); give another"):
        compare_runs(str(a), str(a), output=str(tmp_path / "out"), images=3)


def test_the_same_run_twice(a: Path) -> None:
    record = comparison(read_run_files(str(a)), read_run_files(str(a)), 24)
    assert verdict(record) == "Every prediction is the same on all 359 images."
    assert record["settings"] == []
    assert record["images"]["only_a"] == record["images"]["only_b"] == []


@pytest.mark.slow
def test_a_difference_that_is_one(a: Path, tmp_path: Path, digits: Path) -> None:
    worse = make_run(tmp_path / "worse", digits, dict.fromkeys(range(0, 60, 2), (5, 2.0)))
    record = comparison(read_run_files(str(worse)), read_run_files(str(a)), 24)
    assert verdict(record).startswith("B is right more often on these 359 images: +")
    assert len(record["images"]["only_b"]) == 24


def test_settings_that_differ() -> None:
    fast = ["speed=fast", "speed.attention=sdpa", "speed.decode=pillow"]
    slow = ["speed=reference", "speed.attention=reference", "speed.decode=pillow", "optim=sgd", "optim.lr=0.1"]
    a, b = (load_config("vit_digits", overrides).model_dump(mode="json") for overrides in (fast, slow))
    found = {row["key"]: row for row in differing(a, b, OF_THE_PLACE)}
    assert found["speed.preset"] == {"key": "speed.preset", "a": "fast", "b": "reference"}
    assert (found["speed.attention"]["a"], found["speed.attention"]["b"]) == ("sdpa", "reference")
    assert "speed.decode" not in found
    assert (found["optim.momentum"]["a"], found["optim.momentum"]["b"]) == ("-", "0.9")
    assert (found["optim.name"]["a"], found["optim.name"]["b"]) == ("adamw", "sgd")
    assert "run_dir" not in found


def test_changes_at_a_resumption_are_shown(a: Path, b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(b)
    for step, changed in ((6, {"optim.lr": [1, 2]}), (4, {"optim.lr": [0.002, 0.001], "loss.threshold": [None, 0.5]})):
        folder.add_record("event", step, step / 2, event="resumed", changed=changed)
    folder.add_record("event", 8, 4.0, event="resumed", changed={})
    compare_runs(str(a), str(b), output=str(b / "out"), images=0)
    line = "B changed after epoch 2: optim.lr 0.002 -> 0.001, loss.threshold null -> 0.5"
    shown = capsys.readouterr().out
    assert shown.count("changed after") == 1
    assert line in shown
    page = Page()
    page.feed((b / "out" / "index.html").read_text())
    assert line in page.text


def ran_with(run: Path, torch: str, commit: str, processor: str, cores: int = 2) -> None:
    RunFolder(run).write_json("environment.json", {
        "command": f"python tools/train_net.py run_dir=<{run.name}>", "versions": {"python": "3.12.1", "torch": torch},
        "git": {"commit": commit, "changed": False}, "processor": processor, "threads": 2, "cpu_count": cores,
        "memory_bytes": len(torch),
        "device": "cpu", "world_size": 1,
    })  # fmt: skip


@pytest.mark.slow
def test_other_versions_and_machines_are_told(a: Path, b: Path, tmp_path: Path) -> None:
    said = "The runs had different devices, ranks, machines or threads: their speeds are not comparable."
    ran_with(a, "2.11.0", "0123", "one processor")
    # Of one of the two nothing is known.
    record = comparison(read_run_files(str(a)), read_run_files(str(b)), 3)
    assert (record["environment"], record["b"]["environment"]) == ([], {})
    ran_with(b, "2.15.0+cpu", "0123", "one processor")
    record = comparison(read_run_files(str(a)), read_run_files(str(b)), 3)
    assert record["environment"] == [{"key": "versions.torch", "a": "2.11.0", "b": "2.15.0+cpu"}]
    assert said not in notes(record)
    ran_with(b, "2.11.0", "4567", "another")
    record = comparison(read_run_files(str(a)), read_run_files(str(b)), 3)
    assert [row["key"] for row in record["environment"]] == ["git.commit", "processor"]
    assert said in notes(record)
    compare_runs(str(a), str(b), output=str(tmp_path / "out"), images=3)
    page = Page()
    page.feed((tmp_path / "out" / "index.html").read_text())
    for words in ("Versions and machine", "4567", "A: python tools/train_net.py run_dir=<a>", said):
        assert words in page.text


def reason(a: Path, b: Path) -> str:
    record = comparison(read_run_files(str(a)), read_run_files(str(b)), 24)
    assert (record["images"] is None) == (record["not_paired"] is not None)
    return record["not_paired"] or ""


@pytest.mark.slow
def test_other_images_are_not_compared(a: Path, tmp_path: Path, digits: Path) -> None:
    other = make_run(tmp_path / "other", digits, {}, "data.split_seed=1")
    assert " where B has " in reason(a, other)
    fewer = make_run(tmp_path / "fewer", digits, {}, "data.val_fraction=0.1")
    assert reason(a, fewer).startswith("they were evaluated on different images: 359 and 1")
    compare_runs(str(a), str(other), output=str(tmp_path / "out"), images=3)
    page = Page()
    page.feed((tmp_path / "out" / "index.html").read_text())
    assert "Not compared image by image: they were evaluated on different images" in page.text
    assert (page.pictures, page.seen.count("svg")) == (0, 2)


def test_the_same_data_in_another_place_is_compared(a: Path, b: Path, digits: Path, tmp_path: Path) -> None:
    shutil.copytree(digits, tmp_path / "moved")
    config = yaml.safe_load((b / "config.yaml").read_text())
    config["data"]["root"] = str(tmp_path / "moved")
    (b / "config.yaml").write_text(yaml.safe_dump(config))
    assert reason(a, b) == ""


@pytest.mark.slow
@pytest.mark.parametrize("follows", [False, True])
def test_pictures_are_turned_as_in_the_runs(a: Path, b: Path, tmp_path: Path, follows: bool) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    for split, label in itertools.product(("train", "val"), ("cat", "dog")):
        place = tmp_path / "data" / split / label
        place.mkdir(parents=True)
        Image.new("RGB", (30, 20)).save(place / "0.jpg", exif=exif)
    keys = ["data=auto", f"data.root={tmp_path / 'data'}", f"data.exif_orientation={follows}".lower()]
    for run in (a, b):
        (run / "config.yaml").write_text(yaml.safe_dump(load_config("vit_digits", keys).model_dump(mode="json")))
        # Of other images.
        (run / "predictions.npz").unlink()
    found = _pictures(
        read_run_files(str(a)), read_run_files(str(b)), {"images": {"only_a": [{"index": 0}], "only_b": []}}
    )
    assert found[0].size == ((20, 30) if follows else (30, 20))


@pytest.mark.slow
def test_data_that_is_gone(a: Path, b: Path, tmp_path: Path) -> None:
    for run in (a, b):
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["data"] |= {"root": str(tmp_path / "gone"), "source": "folder"}
        (run / "config.yaml").write_text(yaml.safe_dump(config))
    compare_runs(str(a), str(b), output=str(tmp_path / "out"), images=3)
    page = Page()
    page.feed((tmp_path / "out" / "index.html").read_text())
    assert page.pictures == 0
    assert f"No pictures: data.root: {tmp_path / 'gone'} cannot be read" in page.text
    assert "image 30" in page.text
    # Then the labels have to do.
    predictions = Predictions.load(b / "predictions.npz")
    replace(predictions, labels_N=predictions.labels_N[::-1]).save(b / "predictions.npz")
    assert "the true class differs for" in reason(a, b)


@pytest.mark.slow
def test_data_that_has_changed(a: Path, b: Path, digits: Path, tmp_path: Path) -> None:
    """Positions no longer tell which images were evaluated."""
    data = tmp_path / "data"
    images = sorted(digits.rglob("*.png"))[:20]
    for label in "01":
        (data / label).mkdir(parents=True)
        for place, image in enumerate(images):
            shutil.copy(image, data / label / f"{place:02}.png")
    config = load_config("vit_digits", ["data=auto", f"data.root={data}"])
    for run in (a, b):
        (run / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
        labels_N, losses_N = np.arange(8) // 4, np.zeros(8, np.float32)
        predicted_N = labels_N if run is a else 1 - labels_N
        Predictions(np.arange(8), labels_N, predicted_N, losses_N, losses_N).save(run / "predictions.npz")
    with build.world(config) as world:
        names = build.sources(config, world)["train"].names_id()
    (b / "checkpoints" / "step_000000010").mkdir(parents=True)
    (b / "checkpoints" / "step_000000010" / "state.json").write_text(json.dumps({"train_names": names}))
    assert read_run_files(str(a)).missing is read_run_files(str(b)).missing is None
    # Another image is held out instead, or none is missed: only the checkpoint knows.
    next(data.glob("0/*.png")).rename(data / "0" / "new.png")
    assert read_run_files(str(b)).missing == "the images have changed since the evaluation"
    assert reason(a, b) == "the images of B have changed since its evaluation"
    for image in data.glob("1/1*.png"):
        image.unlink()
    assert read_run_files(str(a)).missing == "the images have changed since the evaluation"
    compare_runs(str(a), str(b), output=str(tmp_path / "out"), images=3)
    assert "No pictures: the images have changed since the evaluation" in (tmp_path / "out" / "index.html").read_text()


def test_images_that_one_could_not_read(a: Path, b: Path) -> None:
    whole = Predictions.load(b / "predictions.npz")
    kept = np.arange(IMAGES) != 30
    Predictions(*(getattr(whole, column.name)[kept] for column in fields(whole))).save(b / "predictions.npz")
    record = comparison(read_run_files(str(a)), read_run_files(str(b)), 24)
    assert record["images"]["left_out"] == 1
    assert [each["index"] for each in record["images"]["only_a"]] == [40, 358, 20]


@pytest.mark.slow
def test_runs_on_their_way(tmp_path: Path, a: Path, digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    going = make_run(tmp_path / "going", digits, {}, finished=False)
    assert reason(a, going) == ""
    (going / "predictions.npz").unlink()
    (going / "metrics.jsonl").write_text("")
    assert reason(a, going) == "B has no predictions yet: it has not been evaluated"
    assert compare_runs(str(going), str(a), output=str(tmp_path / "out"), images=3) == 0
    said = capsys.readouterr().out
    assert "A has no predictions yet" in said
    assert "A is not finished." in said


def test_other_classes_are_not_compared(a: Path, b: Path) -> None:
    for run, classes in ((a, ["cat", "dog"]), (b, ["cat", "dog", "owl"])):
        state = run / "checkpoints" / "step_000000010" / "state.json"
        state.parent.mkdir()
        (state.parent / ".metadata").touch()
        state.write_text(json.dumps({"classes": classes}))
    assert reason(a, b) == "their classes differ: A has 2, B has 3 (owl among them)"


def test_scores_that_are_not_numbers(a: Path, b: Path, tmp_path: Path) -> None:
    """A run that went NaN predicts nothing, and has no loss that could be written."""
    p = Predictions.load(b / "predictions.npz")
    none, nan = np.full_like(p.predicted_N, -1), np.full_like(p.losses_N, np.nan)
    replace(p, predicted_N=none, losses_N=nan).save(b / "predictions.npz")
    assert compare_runs(str(a), str(b), output=str(tmp_path / "out"), images=3) == 0
    record = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [(each["b"], each["loss_b"]) for each in record["images"]["only_a"]] == [("none", None)] * 3
    page = Page()
    page.feed((tmp_path / "out" / "index.html").read_text())
    assert page.text.count("none (-)") == 3


@pytest.mark.slow
def test_runs_of_the_same_name_have_places_of_their_own(
    tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a/run", "b/run", "c/run"):
        make_run(tmp_path / name, digits, WRONG_A)
    # The second time into the same folder, though the path is different.
    for first, second in (("a/run", "b/run"), (str(tmp_path / "a" / "run"), "b/run"), ("c/run", "b/run")):
        compare_runs(first, second, output=None, images=0)
    made = [folder.name.rpartition("-")[0] for folder in (tmp_path / "comparisons").iterdir()]
    assert sorted(made) == ["a_run--b_run", "c_run--b_run"]


def test_mistakes(a: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for arguments, line in (
        ((str(a), str(tmp_path)), "not a run's configuration"),
        ((str(tmp_path / "nowhere"), str(a)), "not a run's configuration"),
    ):
        with pytest.raises(UserError, match=line):
            compare_runs(*arguments, output=None, images=3)
    with pytest.raises(UserError, match=r"output: .* cannot be written to"):
        compare_runs(str(a), str(a), output=str(tmp_path / "file" / "x"), images=3)
    (a / "config.yaml").rename(a / "kept")
    (a / "config.yaml").write_bytes(b"seed: \xff")
    with pytest.raises(UserError, match=r"config\.yaml: is not a run's configuration"):
        compare_runs(str(a), str(a), output=None, images=3)
    (a / "kept").rename(a / "config.yaml")
    for name, text in (("summary.json", "{"), ("environment.json", "[1]")):
        (a / name).write_text(text)
        with pytest.raises(UserError, match=rf"{name}: .*; remove it to compare without it$"):
            compare_runs(str(a), str(a), output=None, images=3)
        (a / name).unlink()
    assert compare_runs(str(a), str(a), output=str(tmp_path / "compared"), images=0) == 0
