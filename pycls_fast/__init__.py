"""Image-classification training with every optimization a measured switch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pycls_fast.data.policies import Policy as Policy
    from pycls_fast.data.source import Source as Source
    from pycls_fast.inference import load as load
    from pycls_fast.inference.from_python import train_net as train_net
    from pycls_fast.loss_choices import Loss as Loss
    from pycls_fast.models.choices import Model as Model
    from pycls_fast.observers import Callback as Callback
    from pycls_fast.observers import Tracker as Tracker
    from pycls_fast.optim.choices import Optimizer as Optimizer
    from pycls_fast.optim.schedule import Schedule as Schedule

__version__ = "0.1.0"

# The place of each name: the families that a file of the user's own can add a class to (docs/extend.md), and what a
# Python program calls.
_PLACES = {
    "Callback": "observers",
    "Loss": "loss_choices",
    "Model": "models.choices",
    "Optimizer": "optim.choices",
    "Policy": "data.policies",
    "Schedule": "optim.schedule",
    "Source": "data.source",
    "Tracker": "observers",
    "load": "inference",
    "train_net": "inference.from_python",
}


def __getattr__(name: str) -> object:
    if name == "train":
        # A room that can be called; `import pycls_fast` alone does not import it.
        return importlib.import_module("pycls_fast.train")
    if name not in _PLACES:
        raise AttributeError(f"module pycls_fast has no attribute {name}")
    # When it is asked for: pydantic takes a tenth of a second to import, and torch seconds.
    return getattr(importlib.import_module(f"pycls_fast.{_PLACES[name]}"), name)
