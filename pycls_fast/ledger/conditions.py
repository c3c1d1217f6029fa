"""What must be the same at every start of a ledger, because its numbers are compared with each other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from pycls_fast.config import RunConfig, saved_config
from pycls_fast.errors import UserError
from pycls_fast.train.environment import environment

# At most so many changed keys are listed in a message.
_MOST_KEYS = 5


def conditions(config: RunConfig, device: str) -> dict[str, Any]:
    """The experiment with all its settings, the machine and torch.

    Args:
        config: the experiment.
        device: "cpu" or "cuda": where the arms run.
    """
    here = environment(torch.device("cpu"), 1)
    return {
        "experiment": config.model_dump(mode="json", exclude={"run_dir"}),
        "device": _gpu() if device == "cuda" else device,
        "processor": here["processor"],
        "cores": here["cpu_count"],
        "torch": torch.__version__,
    }


def changed(before: Mapping[str, Any], plan: Mapping[str, Any]) -> list[str]:
    """Names of the plan's entries that differ from an earlier plan's; for the experiment, the keys that differ.

    Keys of the experiment that are newer than the earlier plan count as having had their default there.
    """
    before = {**before, **_with_defaults(before)}
    names = [name for name, value in plan.items() if value != before.get(name)]
    if "experiment" not in names or "experiment" not in before:
        return names
    keys = list(_keys(before["experiment"], plan["experiment"]))
    more = [f"{len(keys) - _MOST_KEYS} more keys"] if len(keys) > _MOST_KEYS else []
    # The keys say what changed; that `base` differs too adds nothing.
    return [*(name for name in names if name not in ("base", "experiment")), *keys[:_MOST_KEYS], *more]


def _with_defaults(before: Mapping[str, Any]) -> dict[str, Any]:
    """A plan's experiment with defaults for keys added since; empty if this version cannot read it."""
    try:
        config = saved_config(before["experiment"], "plan.json")
    except (KeyError, UserError):
        return {}
    return {"experiment": config.model_dump(mode="json", exclude={"run_dir"})}


def _keys(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key in dict.fromkeys((*now, *before)):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _keys(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key}"


def _gpu() -> str:
    # Asked in a separate process: this one must not hold GPU memory while arms are measured.
    code = "import torch; print(torch.cuda.get_device_name())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
