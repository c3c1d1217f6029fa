"""What must be the same at every start of a ledger, because its numbers are compared with each other."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from pycls_fast.config import RunConfig, validate_saved
from pycls_fast.config.compose import groups
from pycls_fast.config.locations import CONFIGS
from pycls_fast.errors import UserError
from pycls_fast.train.environment import environment, versions

# Packages beside torch that provide models and images.
_PACKAGES = ("torchvision", "timm")
# At most so many changed keys are listed in a message.
_MOST_KEYS = 5


def conditions(config: RunConfig, device: str) -> dict[str, Any]:
    """The experiment with all its settings, the machine, torch, torchvision and timm.

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
        **{name: versions()[name] for name in _PACKAGES},
    }


def code_digest(tools: Path, configs: Sequence[Path], trees: Sequence[Path] = ()) -> str:
    """SHA-256 of the code that an arm's processes run; takes milliseconds.

    Args:
        tools: the folder of the tools.
        configs: folders of configurations. Only the files of groups count, which rungs choose by name: the plan itself
            holds the experiment and the ladder.
        trees: other checkouts that arms run.
    """
    others = ((tree / "pycls_fast", tree / "tools", [tree / "configs"]) for tree in trees)
    digests = [_digest(*parts) for parts in ((Path(__file__).parents[1], tools, configs), *others)]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _digest(package: Path, tools: Path, configs: Sequence[Path]) -> str:
    files = [(package, file) for pattern in ("*.py", "*.c") for file in package.rglob(pattern)]
    files += [(tools, file) for file in tools.glob("*.py")]
    files += [(root, file) for root in configs for name in groups([CONFIGS]) for file in (root / name).glob("*.yaml")]
    contents: list[tuple[bytes, bytes]] = []
    for root, file in files:
        # Unreadable: the lock file of an editor, or a file that is being replaced.
        with suppress(OSError):
            contents.append((os.fsencode(file.relative_to(root)), hashlib.sha256(file.read_bytes()).digest()))
    return hashlib.sha256(repr(sorted(contents)).encode()).hexdigest()


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
        config = validate_saved(before["experiment"], "plan.json")
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
