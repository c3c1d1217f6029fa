"""One name is enough: the model that weights belong to, and timm's models under their own names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import yaml

OF_WEIGHTS = "of_weights"
"""The file of the group `model` with which `weights` chooses the model."""

# torchvision's vision transformers under our names; its ResNets have the same.
_TORCHVISION = {"vit_b_16": "vit_b16", "vit_l_16": "vit_l16", "vit_h_14": "vit_h14"}


class _Composed(Protocol):
    @property
    def overrides(self) -> Sequence[str]: ...

    def file(self, name: str) -> Path | None: ...


def model_of_weights(values: Mapping[str, Any], composed: _Composed) -> dict[str, Any]:
    """The section `model` for what `weights` names: timm's or torchvision's name, or a run's folder.

    The file `of_weights` itself counts for weights that do not say it.
    """
    weights, given = str(values.get("weights") or ""), dict(values["model"])
    hub, _, name = weights.partition(":")
    found: dict[str, Any] | None = None
    if hub == "timm" and name:
        found = {"kind": "timm", "name": name}
    elif hub == "torchvision" and name:
        name = name.partition(".")[0]
        file = composed.file(f"model/{_TORCHVISION.get(name, name)}")
        found = _read(file).get("model", _read(file)) if file is not None else None
    elif weights and (Path(weights) / "config.yaml").is_file():
        found = _read(Path(weights) / "config.yaml")["model"]
        found["num_classes"] = None
    if found is None:
        return given
    typed = {override.lstrip("+").partition("=")[0].removeprefix("model.") for override in composed.overrides}
    return {**found, **{key: value for key, value in given.items() if key in typed}}


def _read(file: Path) -> dict[str, Any]:
    values = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert isinstance(values, dict)
    return values


def timm_written_out(override: str, folders: Sequence[Path]) -> list[str]:
    """`model=NAME` as `model=timm model.name=NAME` if only timm has a model of this name; else the override."""
    key, _, name = override.partition("=")
    plain = name.replace("_", "").replace(".", "").isalnum()
    if key != "model" or not plain or any((folder / "model" / f"{name}.yaml").is_file() for folder in folders):
        return [override]
    # Takes a second to import; a mistyped name of ours may take it, too.
    import timm

    return ["model=timm", f"model.name={name}"] if timm.is_model(name) else [override]
