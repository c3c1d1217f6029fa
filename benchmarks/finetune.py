"""Fine-tuning by default against simple alternatives: `python benchmarks/finetune.py DATA WEIGHTS OUT [key=value ...]`.

DATA holds CIFAR-10's images in class folders (`train/`, `test/`) and ImageNet's, one of each class, in
`imagenet_sample/train/`; WEIGHTS is timm's tf_efficientnet_lite0 as safetensors. OUT is a folder: each result is a line
of `OUT/results.jsonl`, and what is there is not run again. `tasks=A,B`, `seeds=1` and `columns=kNN,finetune` run a
part of all; `rules=true` also scores the checkpoint that each rule would take for the best.

A task is CLASSESxIMAGES@PIXELS, IMAGES of each class for training, or 10x200:20@PIXELS for every other class with 20.
An eighth as many again, at least 5, are for choosing (the epoch, the plain loop's setting); 100 of each class from
`test/` are scored. `imagenet@PIXELS` tells the first half of ImageNet's sample (animals) from the second (mostly
things), with 50 images of each for training and 38 to score. NAME@PIXELS is any folder of DATA with `train/` and
`test/` (or `val/`), which is scored. `vit:` tasks begin with a small ViT that this command trains on the first seven
classes of CIFAR-10, and use the other three.

Columns: kNN and linear probe on the same features; `finetune` with nothing but data, weights and size given; a plain
loop (timm's random head, all layers, batch norm trained, 160 steps of 32, cosine) with the best of 8 settings; and that
loop with the optimizers of torchvision's references (SGD 0.1 x batch / 256, weight decay 1e-4) and of timm's train.py
(SGD 0.05, weight decay 2e-5).
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision import transforms
from torchvision.transforms import InterpolationMode
from words import command_words

import pycls_fast
from pycls_fast.network import Network
from pycls_fast.train.evaluate import places
from pycls_fast.train.features import knn_votes
from pycls_fast.train.head import fit_logistic
from pycls_fast.train.validation import best_evaluation

ROOT = Path(__file__).resolve().parents[1]
TASKS = (
    *("3x20@64", "10x5@64", "10x20@64", "2x100@96", "imagenet@128", "vit:3x20@32", "vit:3x100@32", "10x200:20@64"),
    *("10x100@64", "2x20@160", "vit:3x600@32", "2x600@96", "10x600@64"),
)
SEEN = 7
STEPS, BATCH = 160, 32
TUNED = [("adamw", lr) for lr in (1e-4, 3e-4, 1e-3, 3e-3)] + [("sgd", lr) for lr in (1e-3, 3e-3, 1e-2, 3e-2)]
# The checkpoint that is taken for the best, by the evaluations of a run (`rules=true`).
RULES: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "the head alone": lambda records: 0,
    "the first highest": partial(best_evaluation, metric="top1"),
    "the lowest loss": partial(best_evaluation, metric="loss"),
    "the last within an error": partial(best_evaluation, metric="top1", tolerance=1.0),
    "the last": lambda records: -1,
}
PATHS = ("DATA", "WEIGHTS", "OUT")
COLUMNS = ("kNN", "linear probe", "finetune", "best of 8 plain loops", "torchvision's recipe", "timm's defaults")


def link(at: Path, file: Path) -> None:
    """Make a link, and its folder."""
    at.parent.mkdir(parents=True, exist_ok=True)
    if not at.exists():
        at.symlink_to(file)


def call(folder: Path, *words: str) -> None:
    """Run a verb in a folder, with the package of this checkout."""
    command = [sys.executable, "-m", "pycls_fast", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env=environment)


def split(root: Path, task: str, seed: int) -> dict[str, list[tuple[Path, int]]]:
    """(file, label) of train, val and test."""
    shape = task.removeprefix("vit:").partition("@")[0]
    draw = random.Random(seed)
    parts: dict[str, list[tuple[Path, int]]] = {"train": [], "val": [], "test": []}
    if shape == "imagenet":
        files = sorted((root / "imagenet_sample/train").glob("*/*"))
        for label, half in enumerate((files[: len(files) // 2], files[len(files) // 2 :])):
            draw.shuffle(half)
            for name, images in zip(parts, (half[:50], half[50:62], half[62:]), strict=True):
                parts[name] += [(file, label) for file in images]
        return parts
    if (folder := root / shape).is_dir():
        scored = folder / ("test" if (folder / "test").is_dir() else "val")
        for label, own in enumerate(sorted((folder / "train").iterdir())):
            files = sorted(own.iterdir())
            draw.shuffle(files)
            held = max(len(files) // 8, 5)
            parts["val"] += [(file, label) for file in files[:held]]
            parts["train"] += [(file, label) for file in files[held:]]
            parts["test"] += [(file, label) for file in sorted((scored / own.name).iterdir())]
        return parts
    classes, _, each = shape.partition("x")
    many, _, few = each.partition(":")
    folders = sorted((root / "train").iterdir())[SEEN if task.startswith("vit:") else 0 :]
    for label, folder in enumerate(folders[: int(classes)]):
        count = int(few) if few and label % 2 else int(many)
        files, held = sorted(folder.iterdir()), max(int(many) // 8, 5)
        draw.shuffle(files)
        parts["train"] += [(file, label) for file in files[:count]]
        parts["val"] += [(file, label) for file in files[count : count + held]]
        files = sorted((root / "test" / folder.name).iterdir())
        draw.shuffle(files)
        parts["test"] += [(file, label) for file in files[:100]]
    return parts


def read(items: list[tuple[Path, int]], size: int) -> tuple[Tensor, Tensor]:
    """Images in -1 ... 1 (N, 3, size, size), the short side resized to size / 0.875 (not below 64 px), and labels."""
    images = []
    crop = transforms.Compose([transforms.Resize(round(size / 0.875) if size >= 64 else size,
                                                 InterpolationMode.BICUBIC), transforms.CenterCrop(size)])  # fmt: skip
    for file, _ in items:
        images.append(np.asarray(crop(Image.open(file).convert("RGB"))))
    images_NCHW = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 127.5 - 1
    return images_NCHW, torch.tensor([label for _, label in items])


def network(weights: Path, classes: int) -> Any:
    """timm's network with timm's own new head; a run's with torch's."""
    if weights.is_dir():
        ours = pycls_fast.load(weights)
        made: Any = ours.network
        setattr(made, made.head_name, nn.Linear(made.last_layer().in_features, classes))
        mean, std = (torch.tensor(values) for values in (ours.config.data.mean, ours.config.data.std))
        normalize: Any = transforms.Normalize((2 * mean - 1).tolist(), (2 * std).tolist())
        made.register_forward_pre_hook(lambda module, inputs: (normalize(inputs[0]),))
        made.requires_grad_(True)
        return made
    made = timm.create_model("tf_efficientnet_lite0", num_classes=1000)
    made.load_state_dict(load_file(weights))
    made.reset_classifier(classes)
    return made


@torch.no_grad()
def outputs(net: Any, images_NCHW: Tensor, *, features: bool = False) -> Tensor:
    net.eval()
    last = net.last_layer() if isinstance(net, Network) else net.get_classifier()
    seen: list[Tensor] = []
    handle = last.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    scores = [net(part) for part in images_NCHW.split(64)]
    handle.remove()
    return torch.cat(seen if features else scores)


def seven_classes(root: Path, out: Path) -> Path:
    """The run of a small ViT on 2,000 images of each of CIFAR-10's first seven classes."""
    run, data = out / "vit", out / "seven"
    if not (run / "summary.json").is_file():
        for part, name, count in (("train", "train", 2000), ("test", "val", 100)):
            for folder in sorted((root / part).iterdir())[:SEEN]:
                for file in sorted(folder.iterdir())[:count]:
                    link(data / name / folder.name / file.name, file)
        small = ["schedule.epochs=6", "model.width=128", "model.depth=4", "model.heads=2", "model.mlp_width=256"]
        small += ["model.stem=patch", "model.stem_widths=[]", "model.stem_strides=[]"]
        call(out, "train", "--config-name", "vit_cifar10", f"run_dir={run}", f"data.root={data}", *small)
    return run


def top1(scores_NK: Tensor, labels_N: Tensor) -> float:
    return 100.0 * (scores_NK.argmax(1) == labels_N).double().mean().item()


def augmented(images_BCHW: Tensor, generator: torch.Generator) -> Tensor:
    """Crops of half the area or more, and flips, as `configs/augment/finetune.yaml`."""
    count = len(images_BCHW)
    side = torch.empty(count).uniform_(0.5, 1.0, generator=generator).sqrt()
    theta = torch.zeros(count, 2, 3)
    theta[:, 0, 0] = side * torch.where(torch.rand(count, generator=generator) < 0.5, -1.0, 1.0)
    theta[:, 1, 1] = side
    theta[:, :, 2] = (torch.rand(count, 2, generator=generator) * 2 - 1) * (1 - side[:, None])
    grid = F.affine_grid(theta, list(images_BCHW.shape), align_corners=False)
    return F.grid_sample(images_BCHW, grid, align_corners=False)


def plain_loop(net: nn.Module, images: Tensor, labels: Tensor, name: str, lr: float, decay: float, seed: int) -> None:
    """What one writes in an afternoon."""
    generator = torch.Generator().manual_seed(seed)
    if name == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=decay)
    else:
        optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    net.train()
    for _ in range(STEPS):
        rows = torch.randint(len(labels), (min(BATCH, len(labels)),), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(net(augmented(images[rows], generator)), labels[rows]).backward()
        optimizer.step()
        schedule.step()


def place(folder: Path, part: str, file: Path, label: int) -> Path:
    """Where a folder has an image: those to be scored are in `tested`."""
    return folder / ("tested" if part == "test" else f"data/{part}") / str(label) / file.name


def lay_out(folder: Path, parts: dict[str, list[tuple[Path, int]]], weights: Path, size: int) -> list[str]:
    """Link the images and the weights into a folder; returns the keys that tell `train` of them there."""
    for part, items in parts.items():
        for file, label in items:
            link(place(folder, part, file, label), file)
    name = str(weights)
    if weights.is_file():
        link(folder / "tf_efficientnet_lite0.safetensors", weights)
        name = "timm:tf_efficientnet_lite0"
    return [f"weights={name}", "data.root=data", f"data.image_size={size}"]


TESTED = ("data.root=tested", "split=all")


def scores_of(folder: Path, weights: str, *options: str, data: Sequence[str] = TESTED) -> dict[str, float]:
    """The numbers of `pycls-fast test` on all test images."""
    call(folder, "test", f"weights={weights}", *data, *options, "output=score.json")
    return dict(json.loads((folder / "score.json").read_text()))


def by_rule(folder: Path) -> dict[str, float]:
    """Test top-1 of the checkpoint that each rule picks in a run that kept all of them."""
    lines = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    records = [line for line in lines if line["kind"] == "eval" and line["split"] == "val"]
    steps = {rule: records[pick(records)]["step"] for rule, pick in RULES.items()}
    top1_of = {step: scores_of(folder, f"run/checkpoints/step_{step:09d}")["top1"] for step in set(steps.values())}
    return {rule: top1_of[step] for rule, step in steps.items()}


def measure(
    root: Path,
    weights: Path,
    task: str,
    seed: int,
    folder: Path,
    done: set[str],
    asked: Mapping[str, str],
    record: Callable[[str, float, float], None],
) -> None:
    """Record test top-1 and seconds of each column that is not done."""
    size, parts = int(task.partition("@")[2]), split(root, task, seed)
    (images, labels), (val, val_labels), (test, test_labels) = (read(parts[name], size) for name in parts)
    classes = int(labels.max()) + 1

    def take(column: str, run: Callable[[], float]) -> None:
        if column not in done:
            torch.manual_seed(seed)
            began = time.perf_counter()
            score = run()
            record(column, score, time.perf_counter() - began)

    def knn() -> float:
        net = network(weights, classes)
        seen, held = outputs(net, images, features=True), outputs(net, test, features=True)
        k = min(20, len(labels))
        votes = torch.cat(list(knn_votes(held, seen, labels, classes=classes, k=k, temperature=0.07)))
        return 100.0 * (places(votes, test_labels) < 1).double().mean().item()

    def probe() -> float:
        net = network(weights, classes)
        head = fit_logistic(outputs(net, images, features=True), labels, classes)
        return top1(outputs(net, test, features=True) @ head.weight_KD.T + head.bias_K, test_labels)

    def loop(name: str, lr: float, decay: float) -> tuple[float, float]:
        net = network(weights, classes)
        plain_loop(net, images, labels, name, lr, decay, seed)
        return top1(outputs(net, val), val_labels), top1(outputs(net, test), test_labels)

    def tuned() -> float:
        scores = [loop(name, lr, 0.05 if name == "adamw" else 1e-4) for name, lr in TUNED]
        return max(scores, key=lambda pair: pair[0])[1]

    take("kNN", knn)
    take("linear probe", probe)

    def finetune() -> float:
        given = lay_out(folder, parts, weights, size)
        keep = ["run_dir=run", "runtime.keep_checkpoints=1000"]
        call(folder, "train", "--config-name", "finetune", *given, f"seed={seed}", *keep)
        return scores_of(folder, "run")["top1"]

    take("finetune", finetune)
    if asked["rules"] and not set(RULES) <= done:
        for rule, score in by_rule(folder).items():
            record(rule, score, 0.0)
    take("torchvision's recipe", lambda: loop("sgd", 0.1 * BATCH / 256, 1e-4)[1])
    take("timm's defaults", lambda: loop("sgd", 0.05, 2e-5)[1])
    take("best of 8 plain loops", tuned)


def table(lines: list[dict[str, object]], columns: Sequence[str]) -> str:
    """A row for each task, means over seeds; what is missing was not run."""
    tasks = list(dict.fromkeys(str(line["task"]) for line in lines))
    text = ["| task | seeds | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2) + "|"]
    for task in tasks:
        cells = []
        for column in columns:
            of = [line for line in lines if (line["task"], line["column"]) == (task, column)]
            score, seconds = (float(np.mean([line[key] for line in of])) if of else 0.0 for key in ("top1", "seconds"))
            cells.append(f"{score:.1f} ({seconds:.0f} s, {len(of)})" if of else "not run")
        seeds = len({line["seed"] for line in lines if line["task"] == task})
        text.append(f"| {task} | {seeds} | " + " | ".join(cells) + " |")
    return "\n".join(text)


def main() -> None:
    paths, asked = command_words(__doc__, *PATHS, tasks=",".join(TASKS), seeds="3", columns=",".join(COLUMNS), rules="")
    root, weights, out = (Path(path).resolve() for path in paths)
    columns = asked["columns"].split(",")
    out.mkdir(parents=True, exist_ok=True)
    file = out / "results.jsonl"
    for seed in range(int(asked["seeds"])):
        for task in asked["tasks"].split(","):
            lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
            done = {str(line["column"]) for line in lines if (line["task"], line["seed"]) == (task, seed)}
            done |= set(COLUMNS) - set(columns)
            folder = out / f"{task.replace(':', '-')}_{seed}"

            def record(column: str, score: float, seconds: float, task: str = task, seed: int = seed) -> None:
                row = {"task": task, "seed": seed, "column": column, "top1": score, "seconds": seconds}
                print(row, flush=True)
                with file.open("a") as results:
                    results.write(json.dumps(row) + "\n")

            start = seven_classes(root, out) if task.startswith("vit:") else weights
            measure(root, start, task, seed, folder, done, asked, record)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    print(table(lines, COLUMNS))
    if asked["rules"]:
        print(table(lines, tuple(RULES)))


if __name__ == "__main__":
    main()
