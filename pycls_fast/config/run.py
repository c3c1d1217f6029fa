"""The typed configuration of a run: strict, frozen, and the only list of keys that exist.

YAML files and the command line override the defaults here. Unknown keys, wrong types and values out of range are
refused (`extra="forbid"`, `strict=True`); what cannot be together is a row in `conflicts.py`. Options of groups without
a file, such as `model=vit_b16` and `precision=fp32`, are here too; a file of the same name wins.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from hydra.core.config_store import ConfigStore
from pydantic import Field

from pycls_fast import precision, strategies
from pycls_fast.choice import FAMILIES, Section
from pycls_fast.data.choices import Augment, Auto, Source
from pycls_fast.loss_choices import Loss, SoftmaxLoss
from pycls_fast.models.choices import PRESETS as MODELS
from pycls_fast.models.choices import Model
from pycls_fast.observers import Callback, TensorBoard, Tracker
from pycls_fast.optim.choices import Optimizer
from pycls_fast.optim.schedule import Cosine, Schedule
from pycls_fast.speed import Speed
from pycls_fast.strategies import Parallel
from pycls_fast.values import (
    Bytes,
    LossScale,
    ModuleNames,
    PositiveFloat,
    PositiveInt,
    PositiveIntOrAuto,
    Probability,
    Several,
    Text,
)


class Precision(Section):
    """Number formats of the step (`pycls_fast/precision.py`, `docs/speed.md`).

    The `loss_scale` keys are for the float16 levels, the `fp8` keys for `fp8`.
    """

    name: precision.Name = "auto"
    """The level: the formats of weights, products and gradients (docs/speed.md)."""
    loss_scale: LossScale = "dynamic"
    """The factor on the loss: changed as gradients overflow or not, or a constant."""
    loss_scale_start: PositiveFloat = 65536.0
    """The dynamic factor at the start."""
    loss_scale_growth: Annotated[float, Field(gt=1.0)] = 2.0
    """Multiplies the dynamic factor after loss_scale_interval steps without an overflow."""
    loss_scale_backoff: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Multiplies the dynamic factor after an overflow; the step is skipped."""
    loss_scale_interval: PositiveInt = 2000
    """Steps without an overflow after which the dynamic factor grows."""
    loss_scale_floor: PositiveFloat = 2.0**-14
    """A dynamic factor that falls below this ends the run: the gradients are not finite at any scale."""
    fp8_recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """torchao's scaling: a factor for each tensor, for each row, or for each row with gradients of weights in high
    precision."""
    fp8_skip: tuple[Text, ...] = ("head", "pooling")
    """What stays in 16 bits: head, and qualified names of layers or of what they are in, with * for any part of a name.
    So do layers with a side that is not a multiple of 16."""
    fp8_emulate: bool = False
    """Round to float8 on hardware without it, slowly."""


class Distill(Section):
    """A trained network as a second teacher besides the labels."""

    teacher: Text | None = None
    """The trained network, as weights names one; its classes are the data's. null: none. Only training has it, not
    pycls-fast time or plan."""
    targets: Literal["soft", "hard"] = "soft"
    """The teacher's probabilities (Hinton et al., 2015), or its class (DeiT, Touvron et al., 2021)."""
    share: Probability = 0.5
    """The teacher's part of the loss; the labels' has the rest."""
    temperature: PositiveFloat = 2.0
    """targets=soft: divides both networks' logits."""


class Runtime(Section):
    """The device, and how often to log, evaluate and save."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto: cuda if there is one."""
    device_memory: Bytes | None = None
    """Plan for so much memory on each device, such as 24GB, whatever it has; null: a GPU's own, and no plan on a
    CPU."""
    # Far more threads than any machine has would crash the process.
    threads: Annotated[int, Field(gt=0, le=1024)] | None = None
    """CPU threads; null: torch's choice, but at most a container's CPU limit; with speed.param_offload under torchrun,
    the rank's share of the cores."""
    log_every_steps: PositiveInt = 10
    """Steps between two records of loss and speed."""
    eval_every_epochs: PositiveIntOrAuto = 1
    """Epochs between two evaluations; auto: at most 20 evaluations in a run."""
    eval_every_steps: PositiveInt | None = None
    """Steps between two evaluations, instead of epochs; null: by epochs."""
    checkpoint_every_steps: PositiveInt | None = None
    """Steps between two checkpoints, besides those of the evaluations; null: only those."""
    keep_checkpoints: Annotated[int, Field(ge=2)] = 2
    """The number of newest checkpoints that are kept, besides the best."""
    checkpoint_async: bool = True
    """Continue training while a copy of the state is written; it takes as much host memory as a rank's share of the
    state."""
    deterministic: bool = False
    """Only deterministic kernels: the same bits on the same hardware, slower on CUDA."""
    watchdog: bool = False
    """Name the first module whose output or gradient is not finite; makes every step slower."""
    profile_step: PositiveInt | None = None
    """The first of three steps, counted from 1, of which rank 0 writes a profile (profile/); null: none."""
    progress: Literal["auto", "bar", "plain"] = "auto"
    """A live bar, or lines; auto: a bar on a terminal."""


class RunConfig(Section):
    """The complete configuration of a run."""

    config_name: Text
    """The experiment."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """The seed of initial values, order, augmentation and mixing."""
    run_dir: Text | None = None
    """The run's folder; null: runs/<config_name>/<time>_<settings>."""
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
    """Python modules of your own (docs/extend.md) that are imported before anything is built, from the current folder
    or where Python looks. They are code: what a run has saved here is imported only if it is typed again."""
    model: Model
    data: Source = Auto()
    augment: Augment = Augment()
    loss: Loss = SoftmaxLoss()
    distill: Distill = Distill()
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
        return self.head == "probe" and (self.weights is not None or self.model.kind == "given")

    def with_values(self, **sections: Mapping[str, object]) -> RunConfig:
        """A copy with other values in some sections; not checked: for values computed from checked ones."""
        changed = {name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        return self.model_copy(update=changed)


def _named(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    return {name: {"name": name} for name in names}


PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "model": MODELS,
    # What data.root holds is recognised (auto), or class folders, or random images in memory.
    "data": {name: {"source": name} for name in ("auto", "folder", "synthetic")},
    "loss": _named(FAMILIES["loss"].choices()),
    # step: a tenth of the rate after every 30 epochs (He et al. 2016; torchvision's references).
    "schedule": {
        **_named(FAMILIES["schedule"].choices()),
        "step": {"name": "step", "step_epochs": 30, "step_factor": 0.1},
    },
    "precision": _named(precision.LEVELS),
    "parallel": _named(typing.get_args(strategies.Name)),
    "speed": {name: {"preset": name} for name in ("reference", "fast")},
    "runtime": {"default": {"device": "auto"}},
}
"""Group -> option -> its values."""


# The folder of the ledger's plans, which are not part of a configuration.
LADDERS = "ladders"


def groups(folders: Sequence[Path]) -> set[str]:
    """The names of groups, which choose an option (`model=vit_b16`) rather than set a value."""
    return {*PRESETS, *(file.parent.name for folder in folders for file in folder.glob("*/*.yaml"))} - {LADDERS}


def options(group: str, folders: Sequence[Path]) -> list[str]:
    """The names that `group=NAME` (or `ladder=NAME`) takes: of presets, and of files in folders of configurations."""
    place = LADDERS if group == "ladder" else group
    return sorted(
        {*PRESETS.get(group, ()), *(file.stem for folder in folders for file in (folder / place).glob("*.yaml"))}
    )


# Hydra looks for an option here if no folder has a file for it.
for _group, _presets in PRESETS.items():
    for _name, _values in _presets.items():
        ConfigStore.instance().store(_name, dict(_values), group=_group)
