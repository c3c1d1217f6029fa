"""From training to use, with the tools as a person calls them: predict, export, look, compare."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pycls_fast import build
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


def tool(name: str, *arguments: object, cwd: Path) -> str:
    return run_process(command(*map(str, arguments), tool=name, config_name=None), cwd=cwd).stdout


def test_predictions_are_those_of_the_evaluation(runs: tuple[Path, Path], digits: Path, tmp_path: Path) -> None:
    """All validation images by their paths, from the run and from an exported file."""
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
