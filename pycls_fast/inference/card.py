"""The README.md of an exported folder: what the hub shows of a model, with the numbers that were measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pycls_fast.files import BEST
from pycls_fast.train.export import preprocessing
from pycls_fast.train.folder import RunFolder
from pycls_fast.train.weights import Weights

_HEADER = """---
library_name: timm
pipeline_tag: image-classification
tags: [image-classification, timm]
---
"""
# The scores of an evaluation, by the keys of its record.
_SCORES = {
    "map": ("mAP", "{:.2f}%"),
    "f1": ("F1, mean of the classes", "{:.2f}%"),
    "top1": ("top-1", "{:.2f}%"),
    "top5": ("top-5", "{:.2f}%"),
    "class_top1": ("balanced accuracy", "{:.2f}%"),
    "loss": ("loss", "{:.4f}"),
    "count": ("validation images", "{:,}"),
}


def model_card(weights: Weights) -> str:
    """Markdown: where the weights come from, their scores in their run's own evaluation, classes and preprocessing."""
    assert weights.config is not None
    assert weights.classes is not None
    origin, source = weights.origin, str(weights.config.get("weights"))
    # A path is of no use to others.
    tuned = f", fine-tuned from `{source}`" if source.startswith(("timm:", "torchvision:", "hf:")) else ""
    average = "the moving average of the weights" if origin.kind == "ema" else "the weights"
    text = f"{_HEADER}\nTrained by pycls_fast{tuned}: {average}, after step {origin.step}.\n"
    measured = _measured(weights)
    if measured:
        text += "\n| measured in training | |\n|---|---|\n"
        for key, (name, form) in _SCORES.items():
            text += f"| {name} | {form.format(measured[key])} |\n" if measured.get(key) is not None else ""
    about = {"classes": weights.classes, "preprocessing": preprocessing(weights.config)}
    for title, value in about.items():
        # On one line, so that no name ends the block.
        text += f"\n{title.capitalize()}:\n\n```json\n{json.dumps(value, ensure_ascii=False)}\n```\n"
    return text


def _measured(weights: Weights) -> Mapping[str, Any]:
    """The evaluation of these weights, if they lie in their run's folder."""
    path, asked = Path(weights.origin.path), (weights.origin.step, weights.origin.kind, "val")
    if path.is_dir() or path.name == f"{BEST}.safetensors":
        run = path.parents[1] if path.is_dir() else path.parent
        for record in RunFolder(run).records("eval"):
            if (record["step"], record.get("weights"), record.get("split")) == asked:
                return record
    return {}
