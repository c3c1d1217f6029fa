"""Options of groups without a file, such as `model=vit_b16` and `precision=fp32`; a file of the same name wins."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore

from pycls_fast.choice import FAMILIES, Section
from pycls_fast.config.run import Precision
from pycls_fast.models.choices import PRESETS as MODELS
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


def timm_written_out(override: str, folders: Sequence[Path]) -> list[str]:
    """`model=NAME` as `model=timm model.name=NAME` if only timm has a model of this name; else the override."""
    key, _, name = override.partition("=")
    plain = name.replace("_", "").replace(".", "").isalnum()
    if key != "model" or not plain or name in options("model", folders):
        return [override]
    # Takes a second to import; a mistyped name of ours may take it, too.
    import timm

    return ["model=timm", f"model.name={name}"] if timm.is_model(name) else [override]
