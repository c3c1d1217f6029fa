"""Options of groups without a file, such as `model=vit_b16` and `precision=fp32`; a file of the same name wins."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore

from pycls_fast.choice import FAMILIES, Section
from pycls_fast.config.keys import as_typed
from pycls_fast.config.run import Precision
from pycls_fast.errors import refusing
from pycls_fast.models.choices import PRESETS as MODELS
from pycls_fast.reading import read_yaml
from pycls_fast.strategies import Parallel


def _named(names: typing.Iterable[str]) -> dict[str, dict[str, Any]]:
    return {name: {"name": name} for name in names}


def _names(section: type[Section]) -> Sequence[str]:
    return typing.get_args(section.model_fields["name"].annotation)


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
    "precision": _named(_names(Precision)),
    "parallel": _named(_names(Parallel)),
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
    """The names that `group=NAME` takes: of presets, and of files in folders of configurations."""
    return sorted(
        {*PRESETS.get(group, ()), *(file.stem for folder in folders for file in (folder / group).glob("*.yaml"))}
    )


def _register() -> None:
    store = ConfigStore.instance()
    for group, presets in PRESETS.items():
        for name, values in presets.items():
            store.store(name, dict(values), group=group, provider="pycls_fast")


# Hydra looks for an option here if no folder has a file for it.
_register()


OF_WEIGHTS = "of_weights"
"""The option of the group `model` with which `weights` chooses the model."""

# torchvision's vision transformers under our names; its ResNets have the same.
_TORCHVISION = {"vit_b_16": "vit_b16", "vit_l_16": "vit_l16", "vit_h_14": "vit_h14"}


def of_weights(values: Mapping[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], Any]:
    """The section `model` for what `weights` names: timm's or torchvision's name, a run's folder, or a file that has
    the name of a timm model (tf_efficientnet_lite0.safetensors); and the size of the images of a run.

    `of_weights` itself counts for weights that do not say it.
    """
    weights, given = str(values.get("weights") or ""), dict(values["model"])
    hub, _, name = weights.partition(":")
    found: dict[str, Any] | None = None
    size = None
    if hub == "timm" and name:
        found = {"kind": "timm", "name": name}
    elif hub == "torchvision" and name:
        name = name.partition(".")[0]
        preset = MODELS.get(_TORCHVISION.get(name, name))
        found = None if preset is None else dict(preset)
    elif weights and (Path(weights) / "config.yaml").is_file():
        unreadable = f"weights: {weights}/config.yaml cannot be read"
        with refusing(unreadable, OSError, ValueError, LookupError, TypeError, use="give its checkpoint"):
            run = read_yaml(Path(weights) / "config.yaml")
            found, size = {**run["model"], "num_classes": None}, run["data"]["image_size"]
    elif Path(weights).is_file() and (name := Path(weights).name.partition(".")[0]) not in MODELS:
        import timm

        found = {"kind": "timm", "name": name} if timm.is_model(name) else None
    if found is None:
        return given, None
    typed = {override.lstrip("+").partition("=")[0].removeprefix("model.") for override in overrides}
    return {**found, **{key: value for key, value in given.items() if key in typed}}, size


def timm_written_out(override: str, folders: Sequence[Path]) -> list[str]:
    """`model=NAME` as `model=timm model.name=NAME` if only timm has a model of this name; else the override."""
    key, _, name = override.partition("=")
    plain = name.replace("_", "").replace(".", "").isalnum()
    if key != "model" or not plain or name in options("model", folders):
        return [override]
    # Takes a second to import; a mistyped name of ours may take it, too.
    import timm

    return ["model=timm", f"model.name={name}"] if timm.is_model(name) else [override]


# They do not change what trained weights compute; the number of classes follows from the data.
_ONLY_TRAINING = {"num_classes", "drop_path", "drop_path_rule", "init", "zero_init_last_gamma"}


def model_overrides(model: Mapping[str, Any]) -> str | None:
    """The closest preset and what differs from it: `model=resnet50 model.groups=32`.

    Args:
        model: the section `model` of a saved configuration; None is returned if its kind is unknown.
    """
    kind = FAMILIES["model"].choices().get(str(model.get("kind")))
    if kind is None:
        return None
    defaults = {key: field.default for key, field in kind.model_fields.items() if not field.is_required()}
    candidates = []
    for name, preset in MODELS.items():
        if name == OF_WEIGHTS:
            continue
        own = defaults | preset
        if own["kind"] == model["kind"]:
            changed = [key for key, value in model.items() if key not in own or as_typed(value) != as_typed(own[key])]
            computing = [key for key in changed if key not in _ONLY_TRAINING]
            # model=timm leaves the name open, which is closer than a preset with another name.
            contradicted = [key for key in computing if key in own]
            candidates.append((len(contradicted), len(computing), len(changed), name, computing))
    *_, name, keys = min(candidates)
    return " ".join([f"model={name}", *(f"model.{key}={as_typed(model[key])}" for key in keys)])
