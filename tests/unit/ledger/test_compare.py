"""Two runs side by side: planted disagreements are found, sets that differ are not compared, the page is whole; and the
page over all folds."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from pycls_fast import build
from pycls_fast.commands.measure import RunsVerb
from pycls_fast.errors import UserError
from pycls_fast.ledger.compare import compare_runs, comparison, read_run_files
from pycls_fast.speed import resolve
from pycls_fast.train.evaluate import Predictions
from pycls_fast.train.folder import RunFolder
from tests.factories import config_of
from tests.unit.ledger.test_page import Page
from tests.unit.ledger.test_runs import make_run as make_any_run

IMAGES = 359
# Position -> (predicted, loss), where a run is wrong.
WRONG_A = {3: (9, 2.0), 10: (8, 4.0), 50: (1, 3.0)}
WRONG_B = {10: (7, 5.0), 20: (6, 1.5), 30: (5, 6.0), 40: (4, 3.0), 359 - 1: (0, 2.5)}


def labels(digits: Path, *overrides: str) -> np.ndarray:
    run = config_of(f"data.root={digits}", *overrides)
    with build.world(run) as world:
        source: Any = build.sources(run, world)["val"]
    return source.labels


def make_run(
    path: Path, digits: Path, wrong: dict[int, tuple[int, float]], *overrides: str, finished: bool = True
) -> Path:
    """A run folder whose latest evaluation was wrong in these images alone."""
    make_any_run(path, f"data.root={digits}", *overrides, ends="finished" if finished else "failed")
    config = config_of(f"data.root={digits}", *overrides)
    # As in `Run.settings`.
    speed = resolve(config.speed, "cpu", config.optim).model_dump()
    RunFolder(path).write_config({**config.model_dump(mode="json"), "speed": speed})
    right = labels(digits, *overrides)
    predicted, losses = right.copy(), np.full(len(right), 0.1, np.float32)
    for position, (label, loss) in wrong.items():
        # Never the right one by chance.
        predicted[position] = label if label != right[position] else (label + 1) % 10
        losses[position] = loss
    predictions = Predictions(np.arange(len(right)), right, predicted, losses, np.full_like(losses, 0.9))
    predictions.save(RunFolder(path).predictions)
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    """Two runs, as they are before a test changes its copies."""
    root = tmp_path_factory.mktemp("runs")
    make_run(root / "a", digits, WRONG_A)
    make_run(root / "b", digits, WRONG_B, "optim.lr=1e-3", "speed=reference")
    return root


@pytest.fixture
def a(runs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs / "a", tmp_path / "a"))


@pytest.fixture
def b(runs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs / "b", tmp_path / "b"))


def test_planted_disagreements(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_runs(str(runs / "a"), str(runs / "b"), output=str(tmp_path / "out"), images=3) == 0
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
    assert re.search(r"balanced accuracy, % +79.00 +79.00 ", said)
    page = Page(tmp_path / "out" / "index.html")
    assert page.pictures == ["svg+xml"] * 2 + ["png"] * 5
    for words in ("Right in A, wrong in B: 3 of 4", "Right in B, wrong in A: 2", "optim.lr", "0.001", "rounding"):
        assert words in page.text
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["compare.json", "index.html"]


def test_changes_at_a_resumption_are_shown(a: Path, b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(b)
    for step, changed in ((6, {"optim.lr": [1, 2]}), (4, {"optim.lr": [0.002, 0.001], "loss.threshold": [None, 0.5]})):
        folder.add_record("event", step, step / 2, event="resumed", asked="auto", changed=changed)
    folder.add_record("event", 8, 4.0, event="resumed", asked="auto", changed={})
    compare_runs(str(a), str(b), output=str(b / "out"), images=0)
    line = "B changed after epoch 2: optim.lr 0.002 -> 0.001, loss.threshold null -> 0.5"
    shown = capsys.readouterr().out
    assert shown.count("changed after") == 1
    assert line in shown
    page = Page(b / "out" / "index.html")
    assert line in page.text


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
    page = Page(tmp_path / "out" / "index.html")
    assert "Not compared image by image: they were evaluated on different images" in page.text
    assert page.pictures == ["svg+xml"] * 2


def test_the_same_data_in_another_place_is_compared(a: Path, b: Path, digits: Path, tmp_path: Path) -> None:
    shutil.copytree(digits, tmp_path / "moved")
    config = yaml.safe_load((b / "config.yaml").read_text())
    config["data"]["root"] = str(tmp_path / "moved")
    (b / "config.yaml").write_text(yaml.safe_dump(config))
    assert reason(a, b) == ""


@pytest.mark.slow
def test_data_that_is_gone(a: Path, b: Path, tmp_path: Path) -> None:
    for run in (a, b):
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["data"] |= {"root": str(tmp_path / "gone"), "source": "folder"}
        (run / "config.yaml").write_text(yaml.safe_dump(config))
    compare_runs(str(a), str(b), output=str(tmp_path / "out"), images=3)
    page = Page(tmp_path / "out" / "index.html")
    assert page.pictures == ["svg+xml"] * 2
    assert f"No pictures: data.root: {tmp_path / 'gone'} cannot be read" in page.text
    assert "image 30" in page.text
    # Then the labels have to do.
    predictions = Predictions.load(b / "predictions.npz")
    replace(predictions, labels_N=predictions.labels_N[::-1]).save(b / "predictions.npz")
    assert "the true class differs for" in reason(a, b)


def test_no_address_is_contacted_that_only_a_run_names(a: Path) -> None:
    config = yaml.safe_load((a / "config.yaml").read_text())
    config["data"]["root"] = "ftp://127.0.0.1/x"
    (a / "config.yaml").write_text(yaml.safe_dump(config))
    missing = read_run_files(str(a)).missing
    assert str(missing).startswith(
        f"data.root: ftp://127.0.0.1/x would be downloaded or written, and only {a / 'config.yaml'} names it"
    )


def test_images_that_one_could_not_read(a: Path, b: Path) -> None:
    whole = Predictions.load(b / "predictions.npz")
    kept = np.arange(IMAGES) != 30
    Predictions(*(getattr(whole, column.name)[kept] for column in fields(whole))).save(b / "predictions.npz")
    record = comparison(read_run_files(str(a)), read_run_files(str(b)), 24)
    assert record["images"]["left_out"] == 1
    assert [each["index"] for each in record["images"]["only_a"]] == [40, 358, 20]


def test_other_classes_are_not_compared(a: Path, b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run, classes in ((a, ["cat", "dog"]), (b, ["cat", "dog", "owl\x1b[31m"])):
        state = run / "checkpoints" / "step_000000010" / "state.json"
        state.parent.mkdir()
        (state.parent / ".metadata").touch()
        state.write_text(json.dumps({"classes": classes}))
    assert reason(a, b) == "their classes differ: A has 2, B has 3 (owl\x1b[31m)"
    compare_runs(str(a), str(b), output=str(b / "out"), images=0)
    assert "B has 3 (owl\\x1b[31m)" in capsys.readouterr().out


def test_scores_that_are_not_numbers(a: Path, b: Path, tmp_path: Path) -> None:
    """A run that went NaN predicts nothing, and has no loss that could be written."""
    p = Predictions.load(b / "predictions.npz")
    none, nan = np.full_like(p.predicted_N, -1), np.full_like(p.losses_N, np.nan)
    replace(p, predicted_N=none, losses_N=nan).save(b / "predictions.npz")
    assert compare_runs(str(a), str(b), output=str(tmp_path / "out"), images=3) == 0
    record = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [(each["b"], each["loss_b"]) for each in record["images"]["only_a"]] == [("none", None)] * 3
    page = Page(tmp_path / "out" / "index.html")
    assert page.text.count("none (-)") == 3


def test_mistakes(a: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="not a run's configuration"):
        compare_runs(str(a), str(tmp_path), output=None, images=3)
    with pytest.raises(UserError, match=r"output: .* cannot be written to"):
        compare_runs(str(a), str(a), output=str(tmp_path / "file" / "x"), images=3)
    (a / "summary.json").write_text("{")
    with pytest.raises(UserError, match=r"summary.json: cannot be read"):
        compare_runs(str(a), str(a), output=None, images=3)


def test_a_page_over_all_folds(digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each image once, in the order of the page, by the run that did not see it."""
    runs = tmp_path / "runs"
    # Losses after which the images of the folds alternate.
    wrong = {(fold, place): 3.0 + fold + 3 * place / 10 for fold in range(3) for place in (10 * fold, 100, 200)}
    names = {}
    for fold in range(3):
        # What is chosen by itself may differ.
        words = ("data.folds=3", f"data.fold={fold}", f"precision={('fp32', 'amp_bf16', 'bf16')[fold]}")
        own = {place: (fold, loss) for (number, place), loss in wrong.items() if number == fold}
        make_run(runs / str(fold), digits, own, *words)
        config = config_of(f"data.root={digits}", *words)
        with build.world(config) as world:
            source = build.sources(config, world)["val"]
        names.update({(fold, place): source.name(place) for place in own})
    assert RunsVerb(folders=(str(runs),), report=str(tmp_path / "page"))() == 0
    html = (tmp_path / "page" / "index.html").read_text()
    assert f"page: {tmp_path}" in capsys.readouterr().out
    shown = re.findall("<small>(.*)</small>", html)
    assert sorted(shown) == sorted(names.values())
    assert shown[0] == names[max(wrong, key=lambda key: wrong[key])]
    assert "<p>9 images" in html
    assert "1,797 of 1,797" in html
    assert "99.50%" in html
    assert re.search(r"balanced accuracy</td>\s*<td[^>]*>99[.]5\d%", html)
    assert "Shown and searched" not in html
    make_run(runs / "again", digits, {}, "data.folds=3", "data.fold=2")
    with pytest.raises(UserError, match=r"^report: these are not runs of different folds"):
        RunsVerb(folders=(str(runs),), report=str(tmp_path / "page"))()
    (runs / "1" / "predictions.npz").unlink()
    with pytest.raises(UserError, match=r"^report: the images of .*/1 cannot be shown: they have several labels, have"):
        RunsVerb(folders=(str(runs / "0"), str(runs / "1")), report=str(tmp_path / "page"))()
