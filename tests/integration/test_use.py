"""From training to use, with the tools as a person calls them: predict, export, look, compare."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pycls_fast.train.evaluate import Predictions
from tests.factories import load_run_config
from tests.integration.runs import TINY, command, environment, run_process

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> tuple[Path, Path]:
    """Two short runs of the digits with different seeds."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        arguments = (*TINY, f"data.root={digits}", "data.num_workers=0", "optim.lr=0.002", f"seed={seed}")
        run_process(command(*arguments, "schedule.epochs=3", f"run_dir={folder / str(seed)}"), cwd=folder)
    return folder / "0", folder / "1"


def tool(name: str, *arguments: object, cwd: Path, expect: int = 0) -> str:
    done = run_process(command(*map(str, arguments), tool=name, config_name=None), cwd=cwd, expect=expect)
    assert "Traceback" not in done.stderr
    return done.stdout if expect == 0 else done.stderr


def test_predictions_are_those_of_the_evaluation(runs: tuple[Path, Path], digits: Path, tmp_path: Path) -> None:
    """All validation images by their paths, from the run and from an exported file."""
    from pycls_fast import build

    scored = Predictions.load(runs[0] / "predictions.npz")
    config = load_run_config(runs[0])
    with build.world(config) as world:
        source = build.sources(config, world)["val"]
    listing = tmp_path / "list.txt"
    listing.write_text("".join(f"{source.name(index)}\n" for index in scored.indices_N))
    newest = max((runs[0] / "checkpoints").glob("step_*"))
    tool("export_net", f"weights={newest}", "output=net.safetensors", cwd=tmp_path)
    found = []
    for weights in (newest, tmp_path / "net.safetensors"):
        arguments = command(str(weights), "-", "format=json", "output=out.json", tool="predict", config_name=None)
        import subprocess

        with listing.open() as stdin:
            subprocess.run(arguments, cwd=tmp_path, env=environment(), stdin=stdin, check=True)
        found.append(json.loads((tmp_path / "out.json").read_text()))
    labels = [row["label"] for row in found[0]["images"]]
    assert labels == scored.predicted_N.tolist()
    assert np.mean(np.array(labels) == scored.labels_N) > 0.3
    assert found[0]["images"] == found[1]["images"]


def test_looking_and_comparing(runs: tuple[Path, Path], digits: Path, tmp_path: Path) -> None:
    said = tool("compare", *runs, "output=compared", cwd=tmp_path)
    assert "only A right" in said
    record = json.loads((tmp_path / "compared" / "compare.json").read_text())
    assert [row["key"] for row in record["settings"]] == ["seed"]
    assert record["a"]["count"] == record["images"]["pair"]["images"] == 359
    assert record["images"]["only_a"]
    assert "data:image/png" in (tmp_path / "compared" / "index.html").read_text()
    tool("feature_maps", runs[0], digits / "3" / "0003.png", "output=maps.png", cwd=tmp_path)
    assert np.asarray(Image.open(tmp_path / "maps.png")).ndim == 3


@pytest.mark.parametrize(
    ("name", "arguments", "line"),
    [
        ("predict", ["nowhere", "setup.py"], "error: images: setup.py is not a file, a folder or a pattern"),
        ("compare", ["nowhere", "nothing"], "error: nowhere: not a run folder (it has no config.yaml)"),
        ("compare", ["a", "b", "c"], "error: c: one argument too many; the keys are run_a, run_b, output, images"),
        (
            "feature_maps",
            ["run", "x.png", "kind=all"],
            "error: kind: must be one of attention, rollout, features, class",
        ),
    ],
)
def test_mistakes_are_one_line_and_status_2(tmp_path: Path, name: str, arguments: list[str], line: str) -> None:
    said = tool(name, *arguments, cwd=tmp_path, expect=2)
    assert said.startswith(line)
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["predict", "feature_maps", "compare", "export_net"])
def test_help(tmp_path: Path, name: str) -> None:
    said = tool(name, "--help", cwd=tmp_path)
    assert f"tools/{name}.py" in said
    assert "output=" in said
