"""Image-classification training with every optimization a measured switch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn

    from pycls_fast.data.policies import Policy as Policy
    from pycls_fast.data.source import Source as Source
    from pycls_fast.inference import Classifier
    from pycls_fast.inference.from_python import Trained
    from pycls_fast.models.choices import Model as Model
    from pycls_fast.observers import Callback as Callback
    from pycls_fast.observers import Tracker as Tracker
    from pycls_fast.optim.choices import Loss as Loss
    from pycls_fast.optim.choices import Optimizer as Optimizer
    from pycls_fast.optim.schedule import Schedule as Schedule

__version__ = "0.1.0"

# The families that a file of the user's own can add a class to (docs/extend.md), and the place of each.
_FAMILIES = {
    "Callback": "observers",
    "Loss": "optim.choices",
    "Model": "models.choices",
    "Optimizer": "optim.choices",
    "Policy": "data.policies",
    "Schedule": "optim.schedule",
    "Source": "data.source",
    "Tracker": "observers",
}


def __getattr__(name: str) -> object:
    if name == "train":
        # A room that can be called; `import pycls_fast` alone does not import it.
        return importlib.import_module("pycls_fast.train")
    if name not in _FAMILIES:
        raise AttributeError(f"module pycls_fast has no attribute {name}")
    # When it is asked for: pydantic takes a tenth of a second to import.
    return getattr(importlib.import_module(f"pycls_fast.{_FAMILIES[name]}"), name)


def load(
    run: str | Path,
    *,
    which: str = "auto",
    device: str = "auto",
    precision: str = "fp32",
    fast: bool = True,
    model: nn.Module | None = None,
) -> Classifier:
    """A trained classifier, ready for images: `pycls_fast.load(run).predict(images)`; see `inference.load`."""
    # torch takes seconds to import, and most importers of this package use a part that does not need it.
    from pycls_fast.inference import load as load_classifier

    return load_classifier(run, which=which, device=device, precision=precision, fast=fast, model=model)


def train_net(
    experiment: str = "finetune", overrides: Sequence[str] = (), *, config_dir: str | Path | None = None, **values: Any
) -> Trained:
    """Train in this process, as `pycls_fast.train(data="my_images", weights=...)`; see `inference.from_python`."""
    from pycls_fast.inference.from_python import train_net as train_network

    return train_network(experiment, overrides, config_dir=config_dir, **values)
