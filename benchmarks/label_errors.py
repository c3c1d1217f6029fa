"""How many planted label errors are first on the error page: `python benchmarks/label_errors.py DATA WEIGHTS PAGE`.

DATA is a folder of class folders (CIFAR-10's training images), WEIGHTS timm's tf_efficientnet_lite0 as safetensors. A
tenth of one class's images get other labels. Each fold's images are predicted by a logistic head on the features of the
others, as `finetune` begins. The planted ones are counted in the order of the page, which is left in the folder PAGE;
`pycls-fast runs RUN... report=` writes such a page of all folds. `images=5000` of each class, `size=128` pixels,
`class=3`.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from torchvision import transforms
from words import command_words

from pycls_fast.train.by_class import class_scores
from pycls_fast.train.evaluate import Evaluation, Predictions
from pycls_fast.train.pictures import write_report

FIRST, FOLDS = 100, 5
# Per image, of features with a variance of 1: what `fit_logistic` chooses for 1,000 images of each class.
PENALTY = 0.03


@torch.no_grad()
def features(files: list[Path], weights: Path, size: int) -> Tensor:
    """The last layer's inputs, float32 (N, D)."""
    net: Any = timm.create_model("tf_efficientnet_lite0", num_classes=1000)
    net.load_state_dict(load_file(weights))
    net.reset_classifier(0)
    net.eval().to(memory_format=torch.channels_last)
    prepare = transforms.Compose([
        transforms.Resize((size, size), transforms.InterpolationMode.BICUBIC),
        transforms.ToTensor(),
        transforms.Normalize([0.5] * 3, [0.5] * 3),
    ])  # fmt: skip
    parts = []
    for first in range(0, len(files), 64):
        images = [prepare(Image.open(file).convert("RGB")) for file in files[first : first + 64]]
        with torch.autocast("cpu", torch.bfloat16):
            parts.append(net(torch.stack(images).contiguous(memory_format=torch.channels_last)).float())
    return torch.cat(parts)


def predicted(features_ND: Tensor, labels_N: Tensor, classes: int) -> Predictions:
    """Each image by a head that was fitted to the other folds."""
    scaled = ((features_ND - features_ND.mean(0)) / features_ND.std()).numpy()
    labels, fold = labels_N.numpy(), np.arange(len(labels_N)) % FOLDS
    logits_NK = torch.empty(len(labels), classes)
    for held_out in (fold == number for number in range(FOLDS)):
        head = LogisticRegression(C=1 / (PENALTY * (~held_out).sum()), tol=1e-3)
        head.fit(scaled[~held_out], labels[~held_out])
        logits_NK[held_out] = torch.from_numpy(head.decision_function(scaled[held_out])).float()
    losses_N = torch.nn.functional.cross_entropy(logits_NK, labels_N, reduction="none")
    probability_N, predicted_N = logits_NK.softmax(1).max(1)
    return Predictions(
        np.arange(len(labels_N)), labels_N.numpy(), predicted_N.numpy(), losses_N.numpy(), probability_N.numpy()
    )


def shown(files: list[Path], classes: list[str], predictions: Predictions, folder: Path) -> list[Path]:
    """Write the page; returns the images on it, in its order."""
    source: Any = SimpleNamespace(
        classes=classes, label_sets=None, read=lambda index: files[index].read_bytes(),
        name=lambda index: str(files[index]),
    )  # fmt: skip
    top1 = 100 * float(predictions.right.mean())
    result = Evaluation(top1, float("nan"), None, len(files), predictions)
    folder.mkdir(parents=True, exist_ok=True)
    page, rows = folder / "index.html", class_scores(predictions, classes)["classes"]
    write_report(page, result, source, "planted label errors", [("top-1", f"{top1:.1f}%")], classes=rows)
    return [Path(html.unescape(name)) for name in re.findall("<small>(.*)</small>", page.read_text(encoding="utf-8"))]


def main() -> None:
    """Plant, predict, count."""
    paths, asked = command_words(__doc__, "DATA", "WEIGHTS", "PAGE", **{"images": "5000", "size": "128", "class": "3"})
    root, weights, page = map(Path, paths)
    options = {key: int(value) for key, value in asked.items()}
    folders = sorted(folder for folder in root.iterdir() if folder.is_dir())
    items = [
        (file, label) for label, folder in enumerate(folders) for file in sorted(folder.iterdir())[: options["images"]]
    ]
    draw = np.random.default_rng(0)
    order = draw.permutation(len(items))
    files, true_N = [items[place][0] for place in order], np.array([items[place][1] for place in order])
    own = np.flatnonzero(true_N == options["class"])
    planted = draw.choice(own, len(own) // 10, replace=False)
    labels_N = true_N.copy()
    labels_N[planted] = (true_N[planted] + draw.integers(1, len(folders), len(planted))) % len(folders)
    predictions = predicted(features(files, weights, options["size"]), torch.from_numpy(labels_N), len(folders))
    right = 100 * (predictions.predicted_N == true_N).mean()
    wrong = {files[place] for place in planted}
    found = [file in wrong for file in shown(files, [folder.name for folder in folders], predictions, page)[:FIRST]]
    name = folders[options["class"]].name
    print(f"{len(items):,} images, {len(planted)} of {name} with other labels; top-1 {right:.1f}")
    print(f"{sum(found)} of the first {FIRST} of the page are planted")


if __name__ == "__main__":
    main()
