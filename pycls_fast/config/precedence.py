"""Notes on precedence: an experiment file's values win over a group's file, even one chosen on the command line."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import yaml
from omegaconf import OmegaConf

from pycls_fast.config.compose import Composed
from pycls_fast.config.locations import shown_path
from pycls_fast.config.quoting import as_typed
from pycls_fast.config.schema import Augment


def notes(composed: Composed) -> Iterator[str]:
    """Yield one line for the values that an experiment keeps although a different `optim` or `augment` was chosen.

    A learning rate or weight decay meant for a different optimizer may train nothing, and `augment=none` would still
    mix images, without an error. Values of the other groups do no such harm.
    """
    optimizer, augmentation = composed.choices.get("optim"), composed.choices.get("augment")
    for origin, kept in _kept(composed, "optim", {}).items():
        yield (
            f"optim={optimizer}: {', '.join(kept)}: the values of {origin}, not those of "
            f"{_shown(composed, 'optim')}; change them with optim.KEY=VALUE"
        )
    defaults = Augment().model_dump()
    for origin, kept in _kept(composed, "augment", defaults).items():
        values = ", ".join(f"{key}={as_typed(composed.values['augment'][key])}" for key in kept)
        own = " ".join(shlex.quote(f"augment.{key}={as_typed(value)}") for key, value in kept.items())
        yield (
            f"augment={augmentation}: {values}: set in {origin}, which wins over {_shown(composed, 'augment')}; to "
            f"take that file's values: {own}"
        )


def _kept(composed: Composed, group: str, defaults: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """File -> key -> the chosen group file's value, for keys whose value an experiment's file overrides."""
    if composed.saved is not None:
        return {}
    experiments = list(composed.experiments(composed.config_name))
    if not any(override.partition("=")[0] == group for override in composed.overrides):
        # A file that itself chooses the group's file, or is based on one that does, sets its values on purpose.
        chooser = next((i for i, name in enumerate(experiments) if _overrides(composed, name, group)), len(experiments))
        experiments = experiments[chooser + 1 :]
    below = {shown_path(file) for file in map(composed.file, experiments) if file is not None}
    chosen = composed.file(f"{group}/{composed.choices.get(group)}")
    if chosen is None:
        return {}
    own = defaults | _filled(_plain(OmegaConf.load(chosen)), defaults)
    kept: dict[str, dict[str, Any]] = {}
    for key, value in _filled(composed.values[group], defaults).items():
        if key == "rand_augment" and own.get("policy") != key:
            continue  # Without effect once the policy is the file's.
        origin = composed.where(f"{group}.{key}")
        if origin in below and as_typed(value) != as_typed(own.get(key)):
            kept.setdefault(origin, {})[key] = own.get(key)
    return kept


def _filled(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The values with whole sections: a section on the command line is merged into the one that is there."""
    sections = {key: default for key, default in defaults.items() if isinstance(default, dict)}
    return {key: sections.get(key, {}) | value if isinstance(value, dict) else value for key, value in values.items()}


def _overrides(composed: Composed, experiment: str, group: str) -> bool:
    """Whether an experiment's file overrides its base's choice of the group's file."""
    file = composed.file(experiment)
    values = yaml.safe_load(file.read_text(encoding="utf-8")) if file is not None else None
    entries = values.get("defaults", []) if isinstance(values, dict) else []
    names = {str(key).replace("/", "") for entry in entries if isinstance(entry, dict) for key in entry}
    return f"override {group}" in names


def _plain(content: Any) -> dict[str, Any]:
    values: Any = OmegaConf.to_container(content, resolve=False)
    return values if isinstance(values, dict) else {}


def _shown(composed: Composed, group: str) -> str:
    file = composed.file(f"{group}/{composed.choices[group]}")
    assert file is not None
    return shown_path(file)
