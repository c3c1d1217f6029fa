"""The environment of a run: its command, package versions, commit and machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from pycls_fast import __version__, build

# The code that determines a run's results, untracked files included; changes elsewhere (results, notes) do not count.
_CODE = ("pycls_fast", "tools", "configs")
_PACKAGES = ("torch", "torchvision", "timm", "numpy", "pillow", "hydra-core", "pydantic")


@dataclass(frozen=True)
class Call:
    """The call from Python that starts a run: its code, and its settings as part of the folder's name."""

    code: str
    settings: str


def environment_command(interpreter: str = "python") -> str:
    """The command as it was typed (Hydra rewrites `sys.argv`), by default without the path of the interpreter."""
    return shlex.join([interpreter, *sys.orig_argv[1:]])


def program_words() -> list[str]:
    """How this command was started, without its flags and keys: `pycls-fast train` or `-m pycls_fast train`."""
    return list(takewhile(lambda word: "=" not in word and not word.startswith("--"), sys.orig_argv[1:]))


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that results depend on."""
    # Our own version comes from the code: a checkout that was never installed has no metadata.
    found = {"python": platform.python_version(), "pycls_fast": __version__}
    found |= {package: importlib.metadata.version(package) for package in _PACKAGES}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


def environment(device: torch.device, world_size: int, command: str | None = None) -> dict[str, Any]:
    """The run's command (None: that of this process), versions, commit and hardware."""
    return {
        "command": command or environment_command(),
        "versions": versions(),
        "git": git_state(Path(__file__).parents[2]),
        "platform": platform.platform(),
        "processor": _processor(),
        # The cores available to the run, not the machine's: its speed depends on these.
        "cpu_count": build.cores(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "device": device_name(device),
        "world_size": world_size,
    }


def provenance(device: torch.device, world_size: int) -> dict[str, Any]:
    """Where a tool's numbers come from: time and environment, with its most important entries repeated at the top
    level."""
    whole = environment(device, world_size)
    first = {key: whole[key] for key in ("command", "world_size", "device", "versions")}
    return {"time": time.time(), **first, "environment": whole}


def device_name(device: torch.device) -> str:
    """The accelerator's product name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def git_state(folder: Path) -> dict[str, Any] | None:
    """The commit of the code in a folder, and whether it was changed since; None if the folder is not a git checkout of
    the code (an installed package may lie inside another project's)."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=10
        )
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "--", "pycls_fast")
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain", "--", *_CODE))}
    except (OSError, subprocess.SubprocessError):
        return None


def _processor() -> str:
    described = Path("/proc/cpuinfo")
    if described.is_file():
        for line in described.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
