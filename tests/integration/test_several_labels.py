"""Images with several labels: from a table to predictions."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import pycls_fast
from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.data.pack import PackSettings, pack
from pycls_fast.errors import UserError
from pycls_fast.inference.predict import predict
from pycls_fast.ledger.compare import read_run_files, why_not_paired
from pycls_fast.ledger.measure.timing import time_variants
from pycls_fast.ledger.runs import list_runs
from pycls_fast.parallel.world import ALONE
from pycls_fast.train.tasks.combine import calibrate, soup
from pycls_fast.train.tasks.score import score_neighbours
from tests.factories import load_run_config
from tests.integration.runs import TINY, command, records, run_process, scored, under_torchrun

TRAITS = {"even": "02468", "large": "56789", "round": "0689"}
WORDS = (*TINY, "data.num_workers=0", "runtime.device=cpu", "precision=fp32", "schedule.best_metric=map")


@pytest.fixture(scope="module")
def table(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the digits are; 1 and 3 are nothing."""
    file = tmp_path_factory.mktemp("several") / "labels.csv"
    lines = [
        f"{image},{'|'.join(name for name, those in TRAITS.items() if image.parent.name in those)}"
        for image in sorted(digits.glob("*/*.png"))
    ]
    file.write_text("\n".join(["path,label", *lines]))
    return file


def words(table: Path, *more: str) -> list[str]:
    return [*WORDS, "data={source: manifest}", f"data.root={table}", "data.label_separator=|",
            *(word for word in WORDS if word.startswith("data.")), *more]  # fmt: skip


@pytest.fixture(scope="module")
def run(table: Path, tmp_path_factory: pytest.TempPathFactory) -> pycls_fast.Trained:
    where = tmp_path_factory.mktemp("run") / "run"
    return pycls_fast.train_net(
        "vit_digits", words(table, "loss=bce", "loss.label_smoothing=0"), optim__lr=0.004, epochs=4, run_dir=where
    )


def test_from_the_table_to_predictions(
    run: pycls_fast.Trained, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluations = records(run.run_dir, "eval")
    assert run.metrics["map"] == max(record["map"] for record in evaluations) > 75
    assert evaluations[0]["map"] < run.metrics["map"]
    assert 50 < run.metrics["f1"] <= 100
    summary = json.loads((run.run_dir / "classes.json").read_text())
    assert [row["class"] for row in summary["classes"]] == ["even", "large", "round"]
    found = scored(load_run_config(run.run_dir, [f"weights={run.run_dir}"]), report=str(tmp_path))
    row = next(row for row in found["classes"] if row["class"] == "large")
    assert f"<td>{row['precision']:.1f}%</td>" in (tmp_path / "index.html").read_text()
    assert found["map"] == pytest.approx(run.metrics["map"], abs=0.2)
    # scikit-learn refuses a balanced accuracy here: it is the mean recall.
    said = capsys.readouterr().out
    assert "F1, mean of the classes" in said
    assert "recall, mean of the classes" in said
    assert "balanced" not in said
    images = sorted(digits.glob("[68]/*.png"))[:40]
    assert pycls_fast.load(run.run_dir, device="cpu").predict(images, topk=1) == run.predict(images, topk=1)
    guessed = pycls_fast.load(run.best, device="cpu").predict(images, topk=1)
    over = [[guess.class_name for guess in each.over or ()] for each in guessed]
    assert max(map(len, over)) == 3 > min(map(len, over))
    for each in guessed:
        assert len(each.top) == 1
        assert all(guess.probability > 0.5 for guess in each.over or ())
    whole = max(range(len(over)), key=lambda place: len(over[place]))
    how: dict[str, Any] = {"which": "auto", "device": "cpu", "precision": "fp32", "batch_size": None, "num_workers": 0}
    file = tmp_path / "predicted"
    predict(str(run.best), list(map(str, images)), format="csv", output=str(file), topk=2, **how)
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert [row["over"] for row in rows] == list(map(";".join, over))
    predict(str(run.best), [str(images[whole])], format="json", output=str(file), topk=2, **how)
    (one,) = json.loads(file.read_text())["images"]
    assert len(one["top"]) == 2
    assert [guess["class"] for guess in one["over"]] == over[whole]
    predict(str(run.best), [str(images[whole])], format="table", output=str(file), topk=2, **how)
    assert ";".join(over[whole]) in file.read_text()
    # Not among the guesses that follow, too.
    assert file.read_text().count(over[whole][0]) == 1


@pytest.mark.slow
def test_the_head_first_and_mixing(run: pycls_fast.Trained, table: Path, tmp_path: Path) -> None:
    """New classes on the weights of the run: the fitted head is better than chance before the first step. Two tables,
    which have sets of labels in other orders."""
    other = tmp_path / "tables"
    other.mkdir()
    header, *rows = table.read_text().replace("even", "straight").replace("round", "closed").splitlines()
    for name, own in (("train", [row for n, row in enumerate(rows) if n % 5]), ("val", rows[::-5])):
        (other / f"{name}.csv").write_text("\n".join([header, *own]))
    more = [
        "head=probe", f"weights={run.best}", "loss=asymmetric", "loss.class_weights=auto",
        "augment.mixup_alpha=0.2",
        "schedule.warmup_epochs=0",
    ]  # fmt: skip
    tuned = pycls_fast.train_net("vit_digits", words(other, *more), epochs=1, run_dir=tmp_path / "run")
    first, last = records(tuned.run_dir, "eval")
    assert first["step"] == 0
    assert first["map"] > 70
    assert last["map"] > 70
    (event,) = [record for record in records(tuned.run_dir, "event") if record["event"] == "head fitted"]
    assert event["images"] == 1_437


def test_runs_are_compared_and_averaged_by_what_they_are_judged_by(
    run: pycls_fast.Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = read_run_files(str(run.run_dir))
    assert why_not_paired(one, one) == "their images have several labels"
    moved = replace(one, source=None, missing="moved")
    assert why_not_paired(moved, moved) == "their images have several labels"
    list_runs([str(run.run_dir.parent)], sort="map", output=str(tmp_path / "runs.json"))
    (row,) = json.loads((tmp_path / "runs.json").read_text())["rows"]
    assert row["map"] == run.metrics["map"]
    capsys.readouterr()
    config = load_run_config(run.run_dir, [f"weights={run.run_dir}"])
    soup(config, [str(run.best)], str(tmp_path / "soup.safetensors"), method="greedy", split="val", which="auto",
         overwrite=False)  # fmt: skip
    told = capsys.readouterr().out.partition("mAP ")[2].partition("%")[0]
    assert float(told) == pytest.approx(run.metrics["map"], abs=0.02)


def test_from_packed_images_to_calibrated_probabilities(
    run: pycls_fast.Trained, table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = tmp_path / "packed"
    config = load_config("vit_digits", words(table, "loss=bce"))
    for name, source in build.sources(config, ALONE).items():
        pack(source, packed / name, PackSettings(), workers=0, title="")
    more = ["data.source=packed", f"data.root={packed}"]
    sure, calm = tmp_path / "sure.safetensors", tmp_path / "calm.safetensors"
    with safe_open(run.best, "np") as file:
        tensors = {name: file.get_tensor(name) * (5 if name.startswith("head.") else 1) for name in list(file.keys())}
        save_file(tensors, sure, file.metadata())
    config = load_run_config(run.run_dir, [*more, f"weights={sure}"])
    capsys.readouterr()
    assert calibrate(config, str(calm), split="val", overwrite=False) == 0
    told = capsys.readouterr().out
    hot = float(told.partition("temperature")[2].partition(",")[0])
    assert hot > 2
    before, after = (float(number) for number in re.findall(r"[\d.]+", told.partition("loss")[2])[:2])
    assert after < before
    scores = [scored(load_run_config(run.run_dir, [*more, f"weights={weights}"]))
              for weights in (sure, calm)]  # fmt: skip
    assert scores[1]["calibration_error"] < scores[0]["calibration_error"]
    # The order of images, and what is over 0.5, stay.
    assert scores[1]["map"] == pytest.approx(scores[0]["map"], abs=0.01)
    assert scores[1]["f1"] == pytest.approx(scores[0]["f1"], abs=0.01)


@pytest.mark.slow
def test_ranks_train_and_score_as_one_process(table: Path, tmp_path: Path) -> None:
    arguments = [word for word in words(table, "loss=bce", "loss.label_smoothing=0") if "num_workers" not in word]
    arguments += ["schedule.max_steps=4", "schedule.warmup_epochs=0", "model.drop_path=0",
                  "optim.accumulation_steps=1", "augment={}"]  # fmt: skip
    run_process(command(*arguments, f"run_dir={tmp_path / 'one'}"), cwd=tmp_path)
    run_process(under_torchrun(command(*arguments, f"run_dir={tmp_path / 'two'}"), 2), cwd=tmp_path)
    (one,), (two,) = (records(tmp_path / name, "eval") for name in ("one", "two"))
    for name in ("map", "f1", "loss", "count"):
        assert two[name] == pytest.approx(one[name], rel=1e-3)


@pytest.mark.slow
def test_steps_are_timed_with_and_without_images(table: Path, tmp_path: Path) -> None:
    config = load_config("vit_digits", words(table, "loss=bce", "loss.label_smoothing=0"))
    output = str(tmp_path / "times.json")
    counts = {"steps": 1, "warmup_steps": 1, "repeats": 1, "matmul_size": 64}
    assert time_variants([("several", config)], mode="all", output=output, **counts) == 0


def test_neighbours_are_refused(run: pycls_fast.Trained) -> None:
    with pytest.raises(UserError, match=r"^data.label_separator: knn is for images that have one label each"):
        score_neighbours(
            load_run_config(run.run_dir, [f"weights={run.best}"]), k=5, temperature=0.1, split="val", output=None
        )
