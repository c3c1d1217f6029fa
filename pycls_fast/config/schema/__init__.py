"""The typed configuration of a run: strict, frozen, and the only list of keys that exist.

YAML files and the command line override the defaults here. Unknown keys, wrong types and values out of range are
refused (`extra="forbid"`, `strict=True`); what cannot be together is a row in `conflicts.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from pycls_fast.choice import Section
from pycls_fast.config.schema.execution import Parallel, Precision, Runtime
from pycls_fast.config.schema.network import Model, ResNetModel, TimmModel, ViTModel
from pycls_fast.data.choices import Augment, Data
from pycls_fast.observers import Callback, TensorBoard, Tracker
from pycls_fast.optim.choices import Loss, Optimizer, SoftmaxLoss
from pycls_fast.optim.schedule import Cosine, Schedule
from pycls_fast.speed import Speed
from pycls_fast.values import ModuleNames, Several, Text


class RunConfig(Section):
    """The complete configuration of a run."""

    config_name: Text
    """The experiment."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """The seed of initial values, order, augmentation and mixing."""
    run_dir: Text | None = None
    """The run's folder; null: runs/<config_name>/<time>."""
    resume: Text = "auto"
    """auto: from the newest intact checkpoint in run_dir, if there is one; never; or the path of a checkpoint."""
    weights: Text | None = None
    """What the weights are taken from: a run folder, a checkpoint, a file of another project, timm:NAME,
    torchvision:NAME or hf:ORG/NAME[@REVISION], which a run records with the commit."""
    weights_allow: tuple[Text, ...] = ()
    """Tensors, with * for any part of a name, that may be missing, unexpected or of another shape in the weights."""
    head: Literal["probe", "zero", "small"] = "small"
    """How a head begins that the weights do not fill: fitted to their features (logistic regression, before the first
    step), with zeros, or with small random values. A ViT's own values count as small."""
    needs_weights: bool = False
    """Training does not start without weights: the recipe is for fine-tuning."""
    imports: ModuleNames = ()
    """Python modules that are imported before anything is built, from the current folder or where Python looks: they
    can register models with timm (timm.models.register_model) for model=timm. They are saved with a run, so every tool
    that builds the network of a run's folder or checkpoint imports them: load only those that you trust. Exported files
    never import anything."""
    model: Model
    data: Data = Data()
    augment: Augment = Augment()
    loss: Loss = SoftmaxLoss()
    optim: Optimizer
    schedule: Schedule = Cosine()
    precision: Precision = Precision()
    parallel: Parallel = Parallel()
    speed: Speed = Speed()
    runtime: Runtime = Runtime()
    trackers: Annotated[tuple[Tracker, ...], Several] = (TensorBoard(),)
    """What records the run's numbers besides metrics.jsonl: a list of names, or of {name: ..., project: ...}."""
    callbacks: Annotated[tuple[Callback, ...], Several] = ()
    """The user's code that is called during the run, from imports: a list of names, or of {name: ..., KEY: ...}."""

    @property
    def begins_with_probe(self) -> bool:
        """Whether the weights, with a head that is fitted to them, are evaluated before the first step."""
        return self.head == "probe" and self.weights is not None

    def with_values(self, **sections: Mapping[str, object]) -> RunConfig:
        """A copy with other values in some sections; not checked: for values computed from checked ones."""
        changed = {name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        return self.model_copy(update=changed)


__all__ = [
    "Augment",
    "Data",
    "Loss",
    "Model",
    "Optimizer",
    "Parallel",
    "Precision",
    "ResNetModel",
    "RunConfig",
    "Runtime",
    "Schedule",
    "Section",
    "Speed",
    "TimmModel",
    "ViTModel",
]
