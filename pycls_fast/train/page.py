"""What a run shows of itself: `first_batch.jpg`, and the page `index.html` with its result and its pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image
from torch import Tensor

from pycls_fast.data.batch import Batch
from pycls_fast.reading import read_json
from pycls_fast.train.display import duration, epochs, human, told
from pycls_fast.train.folder import writing
from pycls_fast.train.run import Run

_MOST_PICTURES = 32
_PICTURES = {
    "curves.png": "Loss, accuracy, learning rate and speed",
    "confusion.png": "True and predicted classes",
    "first_batch.jpg": "Training images as the network got them in the first step",
}
_FILES = {
    "best.safetensors": "the best weights",
    "checkpoints": "to resume from",
    "config.yaml": "every setting",
    "environment.json": "versions and hardware",
    "log.txt": "what was printed",
    "metrics.jsonl": "all numbers",
    "summary.json": "the scores",
    "classes.json": "the scores of each class",
    "predictions.npz": "the prediction for each image",
}


def render(template: Path, **values: Any) -> str:
    """A page; all that is shown is escaped, but for what is marked as safe."""
    environment = Environment(
        loader=FileSystemLoader(template.parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.get_template(template.name).render(values)


def write_page(run: Run, summary: Mapping[str, Any]) -> None:
    """Write `index.html` into the run's folder, from the values of `summary.json` and what lies there."""
    folder, config = run.folder, run.config
    final, best, metric = summary["final"], summary["best"], config.schedule.best_metric
    scored = [] if best is None else [("best, by " + metric, best), ("last", final)]
    facts = {
        "state": f"stopped by {summary['stopped']}" if summary["stopped"] else "done",
        **{name: f"{told(record)} at epoch {epochs(record['epoch'])}" for name, record in scored},
        "model": f"{config.model.called}, {human(summary['parameters'])} parameters",
        "weights": config.weights or "random",
        "trained": f"{summary['steps']:,} steps, {epochs(summary['epochs'])} epochs",
        "time": duration(summary["wall_seconds"]),
        "device": summary["device"],
        "command": read_json(folder.path / "environment.json")["command"],
    }
    classes = folder.path / "classes.json"
    html = render(
        Path(__file__).with_name("run.html.j2"),
        title=f"{config.config_name}: {folder.path.name}",
        facts=facts,
        classes=read_json(classes)["classes"] if classes.is_file() else [],
        pictures={name: text for name, text in _PICTURES.items() if (folder.path / name).is_file()},
        files={name: text for name, text in _FILES.items() if (folder.path / name).exists()},
    )
    folder.write_text("index.html", html)


def draw_batch(run: Run, batch: Batch) -> None:
    """Draw the first microbatch of the run's first step as the network gets it: cropped, erased, mixed."""
    # matplotlib, whose fonts it uses, is slow to import.
    from pycls_fast.train.contact_sheet import Cell, write_sheets

    step, data = run.parts.step, run.config.data
    images_BCHW, targets = step.inputs(0, 0, batch)
    mean_C11, std_C11 = (torch.tensor(values).reshape(-1, 1, 1) for values in (data.mean, data.std))
    shown_BCHW = images_BCHW[:_MOST_PICTURES].float().cpu() * std_C11 + mean_C11
    images_BHWC = (shown_BCHW * 255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()
    names, others = _names(run.classes, targets.labels_B), list[list[str]]()
    if targets.mixed_B is not None:
        share = 1.0 - float(targets.lam)
        others = [[f"and {share:.0%} {name}"] for name in _names(run.classes, targets.mixed_B)]
    cells = [
        Cell(Image.fromarray(image), name, lines)
        for image, name, lines in zip(images_BHWC, names, others or repeat([]), strict=False)
    ]
    file = run.folder.path / "first_batch.jpg"
    with writing(file):
        write_sheets(cells, file, columns=8, side=128)


def _names(classes: Sequence[str], labels: Tensor) -> list[str]:
    """The class of each image, (B,), or the classes, (B, K)."""
    if labels.ndim == 1:
        return [classes[label] for label in labels.tolist()]
    return [", ".join(classes[k] for k in row.nonzero()[:, 0].tolist()) for row in labels.cpu()]
