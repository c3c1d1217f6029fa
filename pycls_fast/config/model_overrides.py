"""The overrides that build a saved model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import yaml

from pycls_fast.config.keys import CONFIGS, as_typed
from pycls_fast.config.model_names import OF_WEIGHTS
from pycls_fast.config.schema import RunConfig

# They do not change what trained weights compute; the number of classes follows from the data.
_ONLY_TRAINING = {"num_classes", "drop_path", "drop_path_rule", "init", "zero_init_last_gamma"}


def model_overrides(model: Mapping[str, Any]) -> str | None:
    """The closest file of `configs/model/` and what differs from it: `model=resnet50 model.groups=32`.

    Args:
        model: the section `model` of a saved configuration; None is returned if its kind is unknown.
    """
    kinds = {get_args(each.model_fields["kind"].annotation)[0]: each for each in _SECTIONS}
    if model.get("kind") not in kinds:
        return None
    fields = kinds[model["kind"]].model_fields
    defaults = {key: field.default for key, field in fields.items() if not field.is_required()}
    candidates = []
    for file in (CONFIGS / "model").glob("*.yaml"):
        if file.stem == OF_WEIGHTS:
            continue
        own = defaults | yaml.safe_load(file.read_text(encoding="utf-8"))
        if own["kind"] == model["kind"]:
            changed = [key for key, value in model.items() if key not in own or as_typed(value) != as_typed(own[key])]
            computing = [key for key in changed if key not in _ONLY_TRAINING]
            # model=timm leaves the name open, which is closer than a file with another name.
            contradicted = [key for key in computing if key in own]
            candidates.append((len(contradicted), len(computing), len(changed), file.stem, computing))
    *_, name, keys = min(candidates)
    return " ".join([f"model={name}", *(f"model.{key}={as_typed(model[key])}" for key in keys)])


_SECTIONS = get_args(RunConfig.model_fields["model"].annotation)
