"""What a run leaves behind: configuration, environment, metrics, summary. Written by rank 0 alone."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
import yaml

from pycls_fast import __version__
from pycls_fast.errors import UserError

# What a run computes with, new files included; results and notes may lie beside it.
_CODE = ("pycls_fast", "tools", "configs")
_PACKAGES = ("torch", "torchvision", "timm", "numpy", "pillow", "hydra-core", "pydantic")


class RunFolder:
    """The files of one run. Made on rank 0; on other ranks only the path is used.

    A context at whose end other processes are let in again (see `occupy`).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        # Of each image in the latest evaluation.
        self.predictions = path / "predictions.npz"
        self._lock_file = path / ".lock"
        self._lock: int | None = None

    @property
    def has_run(self) -> bool:
        """Whether a run has been here."""
        return self.metrics.is_file() or self.checkpoints.is_dir()

    def create(self) -> None:
        """Make the folder.

        Raises:
            UserError: it cannot be made or written to.
        """
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".probe.{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise UserError(f"run_dir: {self.path} cannot be written to ({error.strerror}); give another") from error

    def occupy(self, wait_seconds: float = 30.0) -> str | None:
        """Keep other processes out until the context ends; who is here already, None where nobody is.

        The lock is the process's: a kill leaves nothing of it, and loader workers do not inherit it. A run that is on
        its way out, saving its last step, is waited for.
        """
        until = time.monotonic() + wait_seconds
        while self._lock is None:
            file = os.open(self._lock_file, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Who left in the meantime has taken the file along.
                ours = _same_file(self._lock_file, file)
            except BlockingIOError:
                ours = False
            except OSError as error:
                # A file system without locks.
                warnings.warn(f"{self.path}: cannot be kept for one run ({error.strerror})", stacklevel=2)
                ours = True
            if ours:
                os.truncate(file, 0)
                os.pwrite(file, f"process {os.getpid()} on {platform.node()}".encode(), 0)
                self._lock = file
                break
            holder = os.read(file, 200).decode(errors="replace")
            os.close(file)
            if time.monotonic() > until:
                return holder or "another process"
            time.sleep(0.2)
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._lock is not None:
            self._lock_file.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    def write_config(self, values: dict[str, Any]) -> None:
        """`config.yaml`: every value that the run uses, defaults included."""
        header = f"# {environment_command()}\n"
        self._write("config.yaml", header + yaml.safe_dump(values, sort_keys=False))

    def write_json(self, name: str, values: dict[str, Any]) -> None:
        """Write a JSON file whole or not at all."""
        self._write(name, json.dumps(values, indent=2, allow_nan=False) + "\n")

    def add_record(self, kind: str, step: int, epoch: float, **values: Any) -> dict[str, Any]:
        """One line of `metrics.jsonl`; a value that is not finite is written as null, which JSON has."""
        record = {"kind": kind, "step": step, "epoch": round(epoch, 6), "time": time.time(), **values}
        with writing(self.metrics), self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_finite(record), allow_nan=False) + "\n")
        return record

    def records(self) -> Iterator[dict[str, Any]]:
        """The lines of `metrics.jsonl`; a last line cut off by a kill is left out."""
        if not self.metrics.is_file():
            return
        for line in self.metrics.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue

    def forget_after(self, step: int) -> None:
        """Drop records of steps that a resumed run does again (events are kept: they happened)."""
        self._keep(lambda record: record["step"] <= step or record["kind"] == "event")

    def forget_evaluation(self, step: int) -> None:
        """Drop the evaluation records of a step, which is evaluated again."""
        self._keep(lambda record: record["step"] != step or record["kind"] != "eval")

    def _keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        kept = [record for record in self.records() if wanted(record)]
        self._write("metrics.jsonl", "".join(json.dumps(record) + "\n" for record in kept))

    def _write(self, name: str, text: str) -> None:
        temporary = self.path / f".{name}.{os.getpid()}.tmp"
        with writing(self.path / name):
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self.path / name)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around what writes a file of the run folder.

    Raises:
        UserError: the disk is full, or whatever else the system says.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"run_dir: {path} cannot be written ({error.strerror or error}); mend it, and the same command goes on "
            "from the newest checkpoint"
        ) from error


def _same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def environment_command() -> str:
    """The command as it was typed (Hydra rewrites `sys.argv`)."""
    return shlex.join(["python", *sys.orig_argv[1:]])


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that results depend on."""
    # Ours from the code itself: a checkout that was never installed has no metadata.
    found = {"python": platform.python_version(), "pycls_fast": __version__}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


def environment(device: torch.device, world_size: int) -> dict[str, Any]:
    """Where the run happens: command, versions, commit, hardware."""
    return {
        "command": environment_command(),
        "versions": versions(),
        "git": git_state(Path(__file__).parents[2]),
        "platform": platform.platform(),
        "processor": _processor(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "device": device_name(device),
        "world_size": world_size,
    }


def device_name(device: torch.device) -> str:
    """The accelerator's product name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the code and whether it was changed since, or None outside a checkout."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=10
        )
        return done.stdout.strip()

    try:
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
