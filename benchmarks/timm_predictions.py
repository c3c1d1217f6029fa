"""Predictions from a weights file alone, beside timm's: `python benchmarks/timm_predictions.py FILE NAME IMAGES`.

FILE is a safetensors file of timm's model NAME with 1,000 classes; the first 1,000 images below IMAGES are scored by
`tools/test_net.py weights=FILE model=NAME` (no key for mean, standard deviation, crop or interpolation) and by timm
with the transform of its `pretrained_cfg`. Prints how many predicted classes and which probabilities differ.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from words import command_words

ROOT = Path(__file__).resolve().parents[1]
CLASSES = 1000


def ours(weights: Path, name: str, images: list[Path], folder: Path) -> list[tuple[int, float]]:
    """(class, probability) of each image, by the tool. The labels in its table say nothing."""
    (folder / "classes.txt").write_text("".join(f"{label}\n" for label in range(CLASSES)))
    with (folder / "images.csv").open("w", newline="") as table:
        csv.writer(table).writerows([("path", "label"), *((file, 0) for file in images)])
    command = [sys.executable, str(ROOT / "tools/test_net.py"), "--config-name", "finetune", f"weights={weights}",
               f"model={name}", "data.source=manifest", "data.root=images.csv", "split=all", "precision=fp32",
               "predictions=seen.csv"]  # fmt: skip
    # Scores against those labels would mislead.
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    with (folder / "seen.csv").open() as lines:
        rows = {row["image"]: row for row in csv.DictReader(lines)}
    return [(int(rows[str(file)]["predicted"]), float(rows[str(file)]["probability"])) for file in images]


@torch.no_grad()
def theirs(weights: Path, name: str, images: list[Path]) -> list[tuple[int, float]]:
    """The same by timm, an image at a time."""
    network: Any = timm.create_model(name)
    network.load_state_dict(load_file(weights))
    network.eval()
    transform: Any = timm.data.create_transform(**timm.data.resolve_data_config(network.pretrained_cfg))
    found = []
    for file in images:
        scores_K = network(transform(Image.open(file).convert("RGB"))[None])[0].softmax(0)
        found.append((int(scores_K.argmax()), float(scores_K.max())))
    return found


def main() -> None:
    (file, name, folder_of_images), _ = command_words(__doc__, "FILE", "NAME", "IMAGES")
    weights, images = Path(file).resolve(), Path(folder_of_images).resolve()
    files = sorted(file for file in images.rglob("*") if file.suffix.lower() in {".jpg", ".jpeg", ".png"})[:CLASSES]
    with tempfile.TemporaryDirectory() as folder:
        pairs = list(zip(ours(weights, name, files, Path(folder)), theirs(weights, name, files), strict=True))
    same = [(a, b) for a, b in pairs if a[0] == b[0]]
    largest = max(abs(a[1] - b[1]) for a, b in same)
    print(f"{len(same)} of {len(pairs)} classes are timm's; their probabilities differ by at most {largest:.1e}")


if __name__ == "__main__":
    main()
