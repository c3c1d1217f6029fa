"""What an experiment's file sets wins over the file of a group, also over one that the command line chose."""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from pycls_fast.config.compose import Composed
from pycls_fast.config.explain import shown_path


def notes(composed: Composed) -> Iterator[str]:
    """A line where `optim=NAME` chose an optimizer and the experiment keeps its own values for it.

    A learning rate or a weight decay that was meant for another optimizer trains nothing, without an error. Values of
    the other groups do no such harm.
    """
    chosen = any(override.partition("=")[0] == "optim" for override in composed.overrides)
    if not chosen or composed.saved is not None:
        return
    name = composed.choices["optim"]
    file = composed.file(f"optim/{name}")
    assert file is not None
    own = yaml.safe_load(file.read_text(encoding="utf-8"))
    kept: dict[str, list[str]] = {}
    for key, value in composed.values["optim"].items():
        origin = composed.where(f"optim.{key}")
        if origin not in (shown_path(file), "the command line") and value != own.get(key):
            kept.setdefault(origin, []).append(key)
    for origin, keys in kept.items():
        yield (
            f"optim={name}: {', '.join(keys)}: the values of {origin}, not those of {shown_path(file)}; "
            "optim.KEY=VALUE sets others"
        )
