"""From training to use, with the tools as a person calls them; and a newcomer's own folder, as it comes from phones."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
from PIL import Image
from safetensors.torch import save_file

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


CLASSES = {"café noir": (150, 90, 60), "[cats] & dogs": (90, 140, 90), "Bob's trucks": (60, 90, 160)}
COUNTS = (27, 18, 9)


def picture(draw: np.random.Generator, colour: tuple[int, int, int]) -> Image.Image:
    width, height = draw.integers(60, 140, 2)
    pixels = np.array(colour) + draw.normal(0, 40, (height, width, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def save(image: Image.Image, folder: Path, number: int) -> None:
    """As one of nine kinds of files."""
    exif = Image.Exif()
    exif[0x0112] = 6
    wide = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    kinds = [
        (image.convert("L"), f"gray {number}.jpg"),
        (image.convert("CMYK"), f"cmyk {number}.JPG"),
        (wide, f"16 bits {number}.png"),
        (image, f"é turned {number}.jpeg"),
        (image.convert("RGBA"), f"alpha {number}.png"),
        (image.convert("P"), f"palette {number}.gif"),
        (image, f"{number}.webp"),
        (image, f"{number}.bmp"),
        (image, f"{number}.tiff"),
    ]
    chosen, name = kinds[number % len(kinds)]
    chosen.save(folder / name, **({"exif": exif} if name.endswith("jpeg") else {}))


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Three uneven classes without a split, with files that are no images and images that are damaged."""
    draw = np.random.default_rng(0)
    root = tmp_path / "My Pictures (2024)"
    for (name, colour), count in zip(CLASSES.items(), COUNTS, strict=True):
        (root / name).mkdir(parents=True)
        for number in range(count):
            save(picture(draw, colour), root / name, number)
        (root / name / "cut off.jpg").write_bytes(next(iter((root / name).glob("*.JPG"))).read_bytes()[:500])
        (root / name / "empty.jpg").touch()
        (root / name / "page.png").write_text("<html>not found</html>")
        for other in ("Thumbs.db", ".DS_Store", "notes.txt"):
            (root / name / other).write_text("no image")
    return root


@pytest.mark.slow
def test_five_commands_from_pictures_to_predictions(tmp_path: Path, pictures: Path) -> None:
    name = "test_efficientnet"
    save_file(timm.create_model(name).state_dict(), tmp_path / f"{name}.safetensors")

    def verb(*words: str) -> str:
        ran = run_process([sys.executable, "-m", "pycls_fast", *words], cwd=tmp_path)
        assert "Traceback" not in ran.stderr
        return ran.stdout + ran.stderr

    # Fewer steps than the default, for time; nothing else is said.
    shown = verb(
        "train", "--config-name", "finetune", f"data.root={pictures}", f"weights={name}.safetensors",
        "schedule.max_steps=4", "run_dir=run",
    )  # fmt: skip
    for damaged in ("cut off.jpg", "empty.jpg", "page.png"):
        # Of each of the three classes, told once.
        assert shown.count(f"{damaged}: ") == len(CLASSES)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 4

    scores = verb("test", "weights=run")
    assert all(each in scores for each in CLASSES)

    verb("predict", "run", str(pictures / "café noir"), "output=predictions.csv")
    with (tmp_path / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == COUNTS[0]

    for file in ("model.onnx", "model.safetensors"):
        verb("export", "weights=run", f"output={file}")
        assert (tmp_path / file).stat().st_size > 10_000
    verb("predict", "model.safetensors", str(pictures / "[cats] & dogs" / "16 bits 2.png"))
