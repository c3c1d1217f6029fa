"""What a run leaves behind: configuration, environment, metrics, summary. Written by rank 0 alone."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import yaml

from pycls_fast.errors import UserError
from pycls_fast.train.environment import environment_command
from pycls_fast.train.output_file import finite, whole


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
            raise self._cannot_be_written(error) from error

    def remove_if_unused(self) -> None:
        """Take `runs/EXPERIMENT/TIME` away again where no step was taken in it, as far as nothing else is in it."""
        with suppress(OSError):
            if not self.metrics.exists():
                # Fails where there is a checkpoint.
                self.checkpoints.rmdir()
                for name in ("config.yaml", "environment.json"):
                    (self.path / name).unlink(missing_ok=True)
        for folder in (self.path, *list(self.path.parents)[:2]):
            with suppress(OSError):
                folder.rmdir()

    def _cannot_be_written(self, error: OSError) -> UserError:
        return UserError(f"run_dir: {self.path} cannot be written to ({error.strerror}); give another")

    def occupy(self, wait_seconds: float = 30.0) -> str | None:
        """Keep other processes out of a folder that is there, until the context ends; who is in it already, or None.

        The lock is the process's: a kill leaves nothing of it, and loader workers do not inherit it. A run that is on
        its way out, saving its last step, is waited for.

        Raises:
            UserError: the folder cannot be written to.
        """
        try:
            return self._occupy(time.monotonic() + wait_seconds)
        except OSError as error:
            raise self._cannot_be_written(error) from error

    def _occupy(self, until: float) -> str | None:
        while self._lock is None and self.path.is_dir():
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
                self._lock = file
                os.truncate(file, 0)
                os.pwrite(file, f"process {os.getpid()} on {platform.node()}".encode(), 0)
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
        """Write a JSON file whole or not at all; a value that is not finite is written as null, which JSON has."""
        self._write(name, json.dumps(finite(values), indent=2, allow_nan=False) + "\n")

    def add_record(self, kind: str, step: int, epoch: float, **values: Any) -> dict[str, Any]:
        """One line of `metrics.jsonl`; a value that is not finite is written as null, which JSON has."""
        record = {"kind": kind, "step": step, "epoch": round(epoch, 6), "time": time.time(), **values}
        with writing(self.metrics), self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite(record), allow_nan=False) + "\n")
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
        with writing(self.path / name), whole(self.path / name) as temporary:
            temporary.write_text(text, encoding="utf-8")


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
