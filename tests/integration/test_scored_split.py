"""Scoring a run on images of the user's own, and on a split that is not the run's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pycls_fast
from pycls_fast.config import load_config
from pycls_fast.errors import UserError
from pycls_fast.inference.export import export
from pycls_fast.train import train
from tests.conftest import Typed
from tests.factories import class_folders, load_run_config
from tests.integration.runs import scored as scores_of

NAMES = ("bird", "cat", "dog")
SMALL = (
    "data=folder", "data.image_size=8", "augment.eval_crop_ratio=1.0", "data.num_workers=0",
    "data.global_batch_size=16", "model.width=16", "model.depth=1", "model.heads=2", "model.mlp_width=16",
    "runtime.device=cpu", "trackers=[]", "runtime.progress=plain", "schedule.max_steps=2",
)  # fmt: skip


def rename_cats(root: Path) -> None:
    for path in sorted((root / "cat").iterdir()):
        path.rename(path.with_stem(f"new {path.stem}"))


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return class_folders(tmp_path / "images", bird=15, cat=20, dog=15)


@pytest.fixture
def run(tmp_path: Path, images: Path) -> Path:
    """A run of two steps on these images."""
    where = tmp_path / "run"
    assert train(load_config("vit_digits", [*SMALL, f"data.root={images}", f"run_dir={where}"])) == 0
    return where


def scored(run: Path, split: str, *overrides: str) -> dict[str, Any]:
    return scores_of(load_run_config(run, [f"weights={run}", *overrides]), split)


@pytest.mark.slow
@pytest.mark.parametrize(
    "counts", [{"bird": 5, "cat": 1, "dog": 7}, {"bird": 5, "cat": 4}, {"cat": 4, "dog": 3}, {"dog": 6}]
)
def test_all_images_of_a_folder(run: Path, tmp_path: Path, counts: dict[str, int]) -> None:
    """Some classes have no images, or only one."""
    root = class_folders(tmp_path / "mine", **counts)
    found = scored(run, "all", f"data.root={root}")
    assert (found["count"], found["split"]) == (sum(counts.values()), "all")
    predicted = list(pycls_fast.load(run).predict(root))
    right = [item.class_name == Path(str(item.image)).parent.name for item in predicted]
    assert found["top1"] == pytest.approx(100 * np.mean(right))
    assert [row["class"] for row in found["classes"]] == list(NAMES)
    assert [row["images"] for row in found["classes"]] == [counts.get(name, 0) for name in NAMES]


@pytest.mark.slow
def test_classes_of_another_name(run: Path, tmp_path: Path) -> None:
    root = class_folders(tmp_path / "mine", cat=4, dog=3)
    (root / "dog").rename(root / "horse")
    line = r"^data\.root: there are images of horse, but the classes of .* are .*bird, cat, dog; name"
    with pytest.raises(UserError, match=line):
        scored(run, "all", f"data.root={root}")


def test_splits_that_there_are(run: Path, images: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^split: must be one of train, val, all; got dev$"):
        scored(run, "dev")
    for split in ("train", "val"):
        shutil.copytree(images, tmp_path / "both" / split)
    with pytest.raises(UserError, match=r"^split: must be one of train, val; got all$"):
        scored(run, "all", f"data.root={tmp_path / 'both'}")
    (tmp_path / "both/val").rename(tmp_path / "both/test")
    with pytest.raises(UserError, match=r"train, val \(test/ is val if there is no val/\); got test$"):
        scored(run, "test", f"data.root={tmp_path / 'both'}")


@pytest.mark.slow
def test_notes_on_another_split(run: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other, part = (
        "the random split is not the one that",
        "split at random, so 10 of its 50 images are scored; split=all",
    )

    def notes(*overrides: str, split: str = "val") -> list[bool]:
        capsys.readouterr()
        scored(run, split, *overrides)
        shown = " ".join(capsys.readouterr().out.split())
        return [text in shown for text in (other, part)]

    assert notes() == [False, False]
    assert notes("data.split_seed=1") == [True, False]
    # The same images elsewhere are known by their names; others are not.
    shutil.copytree(images, tmp_path / "copy")
    assert notes(f"data.root={tmp_path / 'copy'}") == [False, False]
    rename_cats(tmp_path / "copy")
    assert notes(f"data.root={tmp_path / 'copy'}") == [False, True]
    assert notes(f"data.root={tmp_path / 'copy'}", split="all") == [False, False]
    rename_cats(images)
    assert notes() == [True, False]


@pytest.mark.parametrize(("override", "told"), [("seed=1", False), ("data.split_seed=1", True)])
def test_training_from_weights_that_have_seen_its_validation_images(
    run: Path, images: Path, tmp_path: Path, override: str, told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, f"data.root={images}", f"weights={run}", f"run_dir={tmp_path / 'next'}", override]
    assert train(load_config("vit_digits", words)) == 0
    assert ("was trained on another random split" in " ".join(capsys.readouterr().out.split())) == told


@pytest.mark.slow
@pytest.mark.parametrize(("format_name", "ending"), [("onnx", "onnx"), ("openvino", "xml")])
def test_an_exported_file_is_scored(
    run: Path, images: Path, tmp_path: Path, typed: Typed, format_name: str, ending: str
) -> None:
    """It alone: the run and its weights are gone."""
    file, numbers, own = tmp_path / f"model.{ending}", tmp_path / "numbers.json", scored(run, "val")
    export(str(run), str(file), format=format_name)
    shutil.rmtree(run)
    words = [f"weights={file}", f"data.root={images}"]
    assert typed("test", *words, f"output={numbers}")[0] == 0
    found = json.loads(numbers.read_text())
    assert found["loss"] == pytest.approx(own["loss"], rel=1e-6)
    assert (found["top1"], found["step"], found["config_name"]) == (own["top1"], 2, "vit_digits")
    with pytest.raises(UserError, match="is a program, which only test runs"):
        train(load_config("vit_digits", [*SMALL, *words]))


def test_a_program_of_torch_export_is_not_opened(tmp_path: Path) -> None:
    (file := tmp_path / "model.pt2").touch()
    config = load_config("vit_digits", [*SMALL, f"weights={file}", f"data.root={tmp_path / 'no images'}"])
    with pytest.raises(UserError, match=r"model\.pt2 is a program, which may run code"):
        scores_of(config)
