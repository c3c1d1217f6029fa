"""A table of many runs: seeds are joined, what differs is shown, damaged folders are named."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest

from pycls_fast.commands.measure import RunsVerb
from pycls_fast.errors import UserError
from pycls_fast.ledger.runs import chosen_keys, differing_keys, find_runs, list_runs, read_run, rows
from pycls_fast.train.folder import RunFolder
from tests.factories import TRAINED, config_of


def make_run(
    path: Path,
    *overrides: str,
    top1: tuple[float, ...] = (70.0, 80.0),
    ends: str = "finished",
    average: bool = False,
    config_name: str = "vit_digits",
) -> Path:
    """A run folder with an evaluation for each number, an epoch of 10 steps each."""
    folder = RunFolder(path)
    folder.create()
    # Composed once for all folders.
    config = config_of(*overrides, name=config_name).model_dump(mode="json")
    folder.write_config({**config, "run_dir": str(path)})
    evaluations = []
    for epoch, score in enumerate(top1, 1):
        folder.add_record("train", 10 * epoch, epoch, **TRAINED | {"images_per_second": 100.0 * epoch})
        numbers = {"split": "val", "top5": 99.0, "loss": 1 / epoch, "count": 10, "class_top1": score - 1}
        evaluations.append(folder.add_record("eval", 10 * epoch, epoch, weights="model", top1=score, **numbers))
        if average:
            evaluations[-1] = folder.add_record("eval", 10 * epoch, epoch, weights="ema", top1=score - 1, **numbers)
    if ends == "finished":
        best = max(evaluations, key=lambda record: record["top1"], default=None)
        folder.write_json("summary.json", {
            "final": evaluations[-1] if evaluations else None, "best": best, "steps": 10 * len(top1),
            "epochs": float(len(top1)), "images_per_second": 500.0, "wall_seconds": 1800.0,
        })  # fmt: skip
    elif ends == "stopped":
        folder.write_json("summary.json", {"stopped": "SIGINT", "final": None, "best": None, "steps": 10 * len(top1)})
        assert not folder.finished
        folder.add_record("event", 10 * len(top1), len(top1), event="stopped", signal="SIGINT")
    elif ends == "killed":
        (path / ".lock").touch()
    return path


def listed(folder: Path, **options: Any) -> dict[str, Any]:
    """The JSON of a table."""
    file = folder.parent / "listed.json"
    list_runs([str(folder)], **{"sort": "best_top1", **options, "output": str(file)})
    return json.loads(file.read_text())  # type: ignore[no-any-return]


def test_runs_that_differ_in_their_seed_alone_share_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "runs"
    for seed, best in ((0, 80.0), (10, 84.0), (2, 82.0)):
        make_run(runs / f"slow_{seed}", f"seed={seed}", "optim.lr=1e-3", top1=(60.0, best))
    make_run(runs / "fast", "seed=0", "optim.lr=2e-3", top1=(83.0, 81.0))
    found = listed(runs)["rows"]
    assert [row["settings"] for row in found] == [{"optim.lr": "0.002"}, {"optim.lr": "0.001"}]
    one, three = found
    assert (one["best_top1"], one["best_top1_half"], one["final_top1"], one["class_top1"]) == (83.0, None, 81.0, 82.0)
    assert (three["seeds"], three["best_top1"], three["hours"]) == (["0", "2", "10"], 82.0, 0.5)
    assert [Path(run).name for run in three["runs"]] == ["slow_0", "slow_2", "slow_10"]
    # Student's t with 2 degrees of freedom: 4.303 standard errors; the standard deviation is 2.
    assert three["best_top1_half"] == pytest.approx(4.303 * 2 / math.sqrt(3), rel=1e-3)
    said = capsys.readouterr().out
    assert "82.00 ± 4.97" in said
    assert "0, 2, 10" in said
    assert f"runs in {runs}" in said
    assert "slow_0 +2" in said
    assert "30.0 min" in said


@pytest.mark.slow
def test_folds_share_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "runs"
    for fold, best in enumerate((80.0, 84.0, 82.0)):
        make_run(runs / f"fold_{fold}", "data.folds=3", f"data.fold={fold}", top1=(60.0, best))
    for seed in (0, 1):
        make_run(runs / f"seed_{seed}", f"seed={seed}", top1=(60.0,))
    folds, seeds = listed(runs)["rows"]
    assert (folds["best_top1"], folds["seeds"], folds["folds"]) == (82.0, ["0", "0", "0"], ["0", "1", "2"])
    assert folds["best_top1_half"] == pytest.approx(4.303 * 2 / math.sqrt(3), rel=1e-3)
    assert (seeds["seeds"], seeds["folds"]) == (["0", "1"], ["0", "0"])
    assert [row["settings"] for row in (folds, seeds)] == [{"data.folds": "3"}, {"data.folds": "null"}]
    assert "mean over the seeds and the folds\n" in capsys.readouterr().out


def test_what_is_not_finished_or_done_again_has_a_row_of_its_own(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    make_run(runs / "a", "seed=0")
    make_run(runs / "again", "seed=0")
    make_run(runs / "b", "seed=1")
    make_run(runs / "killed", "seed=2", ends="killed", average=True)
    found = listed(runs)["rows"]
    assert [[Path(run).name for run in row["runs"]] for row in found] == [["a", "b"], ["again"], ["killed"]]
    assert [row["best_top1_half"] for row in found] == [0.0, None, None]
    # That of the average, though the weights themselves had more.
    assert found[2]["best_top1"] == 79.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ends", "state"),
    [("finished", "finished"), ("stopped", "stopped"), ("killed", "running or killed"), ("failed", "failed")],
)
def test_how_a_run_ended(tmp_path: Path, ends: str, state: str) -> None:
    run = read_run(make_run(tmp_path, ends=ends, average=True))
    assert run.state == state
    expected = {"best_top1": 79.0, "final_top1": 79.0, "class_top1": 79.0, "epoch": 2.0}
    # Of the second interval, where no summary says it: the first one warms up.
    expected |= {"images_per_second": 500.0, "hours": 0.5} if ends == "finished" else {"images_per_second": 200.0}
    assert {key: run.numbers[key] for key in expected} == expected
    assert run.settings.keys() & {"run_dir", "resume"} == set()


def test_a_run_that_goes_on_after_its_end_is_what_it_is_now(tmp_path: Path) -> None:
    folder = RunFolder(make_run(tmp_path, top1=(80.0, 70.0)))
    folder.add_record("train", 30, 3, **TRAINED)
    assert read_run(tmp_path).state == "failed"
    (tmp_path / ".lock").touch()
    checkpoint = tmp_path / "checkpoints" / "step_000000030"
    checkpoint.mkdir()
    (checkpoint / "state.json").write_text('{"seconds": 7200.0}')
    run = read_run(tmp_path)
    assert (run.state, run.numbers["epoch"], run.numbers["hours"]) == ("running or killed", 3, 2.0)
    assert (run.numbers["best_top1"], run.numbers["final_top1"]) == (80.0, 70.0)


def test_damaged_folders_are_named_and_the_others_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "runs"
    make_run(runs / "whole")
    (make_run(runs / "no_config") / "config.yaml").unlink()
    (make_run(runs / "torn_summary") / "summary.json").write_text('{"final": ')
    (make_run(runs / "other_summary") / "summary.json").write_text("{}")
    state = make_run(runs / "\x1b[31mred") / "checkpoints" / "step_000000010" / "state.json"
    state.parent.mkdir()
    state.write_text('{"classes": [1]}')
    (runs / "notes").mkdir()
    assert listed(runs)["rows"][0]["runs"] == [str(runs / "whole")]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1].strip().removeprefix(f"{runs}/") for line in lines] == [
        "\\x1b[31mred",
        "no_config/config.yaml",
        "other_summary",
        "torn_summary/summary.json",
    ]
    assert all(line.startswith("left out: ") for line in lines)
    assert "(classes.0: input should be a valid string)" in lines[0]
    assert "config.yaml: is not a run's" in lines[1]
    # Nothing could be read: a mistake, as in tools/predict.py.
    assert list_runs([str(runs / "no_config")], sort="epoch", output=None) == 2


def test_runs_are_found_at_any_depth_and_once(tmp_path: Path) -> None:
    top = tmp_path / "runs"
    expected = [make_run(top / "out"), make_run(top / "out" / "1"), make_run(top / "exp" / "2026-11-21_15-23-13")]
    for other in ("out/checkpoints/step_000000020", "out/tensorboard", ".hydra", "data/train"):
        (top / other).mkdir(parents=True)
        (top / other / "config.yaml").touch()
    (top / "exp" / "around").symlink_to(top)
    elsewhere = make_run(tmp_path / "disk" / "far")
    (top / "far").symlink_to(elsewhere)
    assert find_runs([str(top), str(top / "out"), str(elsewhere)]) == sorted([*expected, top / "far"])
    with pytest.raises(UserError, match="none: no such folder; give folders that training has written"):
        find_runs([str(top), str(top / "none")])


SGD, ADAMW = ("optim=sgd", "optim.weight_decay=0"), ("optim=adamw", "optim.weight_decay=0.1")


@pytest.mark.parametrize(
    ("given", "differ", "shown"),
    [
        (
            (("vit_digits", *SGD, "optim.lr=0.1"), ("vit_digits", *SGD, "optim.lr=0.2"), ("vit_digits", *ADAMW)),
            {"optim.momentum", "optim.betas", "optim.weight_decay"}, ["optim.name", "optim.lr"],
        ),
        (
            (("vit_digits", "optim.lr=3e-4"), ("vit_digits", "optim.lr=2e-4"), ("resnet_digits",)),
            {"model.kind", "optim.lr"}, ["config_name", "optim.lr"],
        ),
    ],
)  # fmt: skip
def test_what_a_choice_or_an_experiment_brings_along_has_no_column(
    tmp_path: Path, given: tuple[tuple[str, ...], ...], differ: set[str], shown: list[str]
) -> None:
    for number, (name, *overrides) in enumerate(given):
        make_run(tmp_path / str(number), *overrides, "optim.lr_batch_size=null", config_name=name)
    runs = [read_run(path) for path in find_runs([str(tmp_path)])]
    table = rows(runs, "best_top1")
    keys = differing_keys(table)
    assert differ < set(keys)
    assert chosen_keys(table, keys) == shown


def test_the_same_as_csv(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for seed in (0, 1):
        make_run(runs / f"a{seed}", f"seed={seed}", top1=(80.0 + seed,))
    make_run(runs / "b", "data.root='a, b'", ends="killed")
    assert RunsVerb(folders=(str(runs),), output=str(tmp_path / "runs.csv"), sort="epoch")() == 0
    killed, joined = csv.DictReader((tmp_path / "runs.csv").read_text().splitlines())
    assert (killed["data.root"], killed["state"], killed["best_top1_half"]) == ("a, b", "running or killed", "")
    assert joined["runs"] == f"{runs / 'a0'};{runs / 'a1'}"
    assert (joined["seed"], joined["count"], float(joined["best_top1"])) == ("0;1", "2", 80.5)
