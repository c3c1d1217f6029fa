"""What `pip install` leaves, and what a newcomer does with it: from a folder as it comes from phones to predictions."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
from PIL import Image
from safetensors.torch import save_file

from tests.integration.runs import ROOT, installed, run_process

pytestmark = pytest.mark.slow


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


@pytest.fixture(scope="module")
def unpacked_and_installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """From a clone, the sources of an archive and the package of a wheel."""
    pytest.importorskip("setuptools", minversion="77")
    return installed(tmp_path_factory.mktemp("wheel"))


def test_the_whole_package_is_installed_with_its_configurations(
    unpacked_and_installed: tuple[Path, Path], tmp_path: Path
) -> None:
    sources, site = unpacked_and_installed

    def run(folder: Path, *arguments: str) -> str:
        return run_process([sys.executable, *arguments], cwd=folder, package=site).stdout

    def files(folder: Path, *suffixes: str) -> set[str]:
        return {str(file.relative_to(folder)) for suffix in suffixes for file in folder.rglob(f"*.{suffix}")}

    assert files(site / "pycls_fast" / "configs", "yaml") == files(ROOT / "configs", "yaml")
    assert files(site / "pycls_fast", "py", "c") == files(ROOT / "pycls_fast", "py", "c")
    # Others install a folder of that name, too.
    (site / "configs").mkdir()
    code = "from pycls_fast.config import load_config; print(load_config('vit_b16', ['data.root=/']).model.width)"
    assert run(tmp_path, "-c", code) == "768\n"
    assert "depth: 3\n" in run(sources, "tools/train_net.py", "model.depth=3", "--cfg", "job")


def test_five_commands_from_pictures_to_predictions(
    unpacked_and_installed: tuple[Path, Path], tmp_path: Path, pictures: Path
) -> None:
    """By the installed wheel, without a key beyond data and weights (and a number of steps, for time)."""
    _, site = unpacked_and_installed
    name = "test_efficientnet"
    save_file(timm.create_model(name).state_dict(), tmp_path / f"{name}.safetensors")

    def verb(*words: str) -> str:
        ran = run_process([str(site / "bin" / "pycls-fast"), *words], cwd=tmp_path, package=site)
        assert "Traceback" not in ran.stderr
        return ran.stdout + ran.stderr

    shown = verb("train", f"data={pictures}", f"weights={name}.safetensors", "schedule.max_steps=4")
    for damaged in ("cut off.jpg", "empty.jpg", "page.png"):
        # Of each of the three classes, told once.
        assert shown.count(f"{damaged}: ") == len(CLASSES)
    (run,) = (str(each.relative_to(tmp_path)) for each in tmp_path.glob("runs/finetune/*"))
    summary = json.loads((tmp_path / run / "summary.json").read_text())
    assert summary["steps"] == 4

    scores = verb("test", f"weights={run}")
    assert all(each in scores for each in CLASSES)

    verb("predict", run, str(pictures / "café noir"), "output=predictions.csv")
    with (tmp_path / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == COUNTS[0]

    for file in ("model.onnx", "model.safetensors"):
        verb("export", f"weights={run}", f"output={file}")
        assert (tmp_path / file).stat().st_size > 10_000
    # Without this package, each kind of file becomes the same class.
    done = run_process([sys.executable, "run_onnx.py", "model.onnx", *(row["image"] for row in rows)], cwd=tmp_path)
    told = [re.fullmatch(r"(.*): (.*) \((.*)%\)", line) for line in done.stdout.splitlines()]
    assert [(each[1], each[2]) for each in told] == [(row["image"], row["class"]) for row in rows]
    probabilities = [100 * float(row["probability"]) for row in rows]
    assert [float(each[3]) for each in told] == pytest.approx(probabilities, abs=0.1)
    picture = str(pictures / "[cats] & dogs" / "16 bits 2.png")
    verb("predict", "model.safetensors", picture)

    # And to look closer.
    assert "Their settings are the same." in verb("compare", run, run, "output=compared")
    assert "Accuracy by class" in (tmp_path / "compared" / "index.html").read_text()
    verb("maps", run, picture, "output=maps.png")
    assert np.asarray(Image.open(tmp_path / "maps.png")).ndim == 3
