"""Image-classification training with every optimization a measured switch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pycls_fast.files import name_user

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pycls_fast.inference import Classifier
    from pycls_fast.train import Trained

__version__ = "0.1.0"

# Before anything imports torchvision.
name_user()


def load(
    run: str | Path, *, which: str = "auto", device: str = "auto", precision: str = "fp32", fast: bool = True
) -> Classifier:
    """A trained classifier, ready for images: `pycls_fast.load(run).predict(images)`; see `inference.load`."""
    # torch takes seconds to import, and most importers of this package use a part that does not need it.
    from pycls_fast.inference import load as load_classifier

    return load_classifier(run, which=which, device=device, precision=precision, fast=fast)


def train_net(experiment: str, overrides: Sequence[str] = (), *, config_dir: str | Path | None = None) -> Trained:
    """Train in this process: `pycls_fast.train_net("vit_digits", ["seed=1"]).run_dir`; see `train.train_net`."""
    from pycls_fast.train import train_net as train_network

    return train_network(experiment, overrides, config_dir=config_dir)
