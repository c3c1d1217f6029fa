"""What experiments should reach, and what weights score, as published (`published.yaml`): ImageNet-1k, top-1, %."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

IMAGENET_TRAINING_IMAGES = 1_281_167


@dataclass(frozen=True)
class Published:
    """The published numbers of an experiment.

    Attributes:
        parameters: millions, with 1,000 classes.
        gmacs: billions of multiply-adds for one image of `size` pixels, half of the FLOPs that a run reports.
        top1: None if nothing was published for this recipe.
        source: where `top1` comes from, in a few words; the experiment's file has it in full.
        weights: a value for `weights=` that reaches it; empty if none can be downloaded by name or as one file.
    """

    parameters: float
    gmacs: float
    size: int
    top1: float | None
    source: str
    weights: str


@dataclass(frozen=True)
class Score:
    """The accuracy of published weights on the 50,000 validation images at this size."""

    top1: float
    size: int
    source: str


_numbers = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
EXPERIMENTS: dict[str, Published] = {name: Published(*row) for name, row in _numbers["experiments"].items()}
WEIGHTS: dict[str, Score] = {name: Score(*row) for name, row in _numbers["weights"].items()}
