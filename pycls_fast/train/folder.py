"""A run's folder (configuration, environment, metrics, summary), and files that commands write; only rank 0 writes."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import platform
import secrets
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from itertools import count
from pathlib import Path
from typing import Any, Self, TextIO

import yaml

from pycls_fast.config.run import RunConfig
from pycls_fast.errors import UserError, print_lines, refusing
from pycls_fast.files import RUNS, atomic_text, timestamp, user_path
from pycls_fast.parallel.rendezvous import first_of_launch
from pycls_fast.parallel.world import ALONE, World
from pycls_fast.reading import parse_record, read_bytes, read_json
from pycls_fast.train.agreement import on_main
from pycls_fast.train.environment import environment_command

_METRICS_BYTES = 1 << 30
DAMAGED_IMAGE = "damaged image"
"""The event that records a damaged image when a run first meets it."""


def choose_run_dir(config: RunConfig, settings: str) -> tuple[Path, bool]:
    """The run's folder (the given one, or a new one named after the `settings`), and whether torchrun has restarted the
    run, in which case it is the folder of the first start."""
    path = _new_folder(config.config_name, settings) if config.run_dir is None else user_path(config.run_dir)
    # Several runs of one launch (a sweep) differ in their configuration.
    name = hashlib.sha256(config.model_dump_json().encode()).hexdigest()
    # The token distinguishes this start from an earlier one with the same given folder.
    text, restarted = first_of_launch(f"run_dir/{name}", f"{secrets.token_hex(4)} {path}")
    if restarted and config.run_dir is None:
        path.rmdir()
    return Path(text.partition(" ")[2]), restarted


def _new_folder(experiment: str, settings: str) -> Path:
    """Make a new folder, so that two runs that start in the same second get different ones."""
    path = first = Path(RUNS) / experiment / "_".join(filter(None, [timestamp(), settings]))
    for number in count(2):
        with writing(path), suppress(FileExistsError):
            path.mkdir(parents=True)
            break
        path = first.with_name(f"{first.name}~{number}")
    return path


def nan_to_none(value: Any) -> Any:
    """A copy of `value` in which NaN and infinities are None, because JSON has no NaN."""
    if isinstance(value, Mapping):
        return {key: nan_to_none(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [nan_to_none(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def output_file(output: str | Path, world: World = ALONE, *, key: str = "output") -> Path:
    """The path to write to, with its folders made and a link resolved; a `UserError` with the tool's `key` if the main
    rank cannot write it."""
    file = user_path(output)

    def check() -> Path:
        with refusing(f"{key}: {file} cannot be written", use="give another path"):
            # A link stays, and its target is written.
            target = file.resolve() if file.is_symlink() else file
            if target.exists() and not target.is_file():
                raise OSError(f"it is {'a folder' if target.is_dir() else 'no ordinary file'}")
            target.parent.mkdir(parents=True, exist_ok=True)
            probe = target.with_name(f".{target.name}.{os.getpid()}.probe")
            probe.touch()
            probe.unlink()
        return target

    return on_main(world, check)


def new_file(config: RunConfig, kind: str) -> Path:
    """Where a measurement without `output` is written: runs/KIND/EXPERIMENT-TIME.json, or KIND-TIME.json in run_dir."""
    if config.run_dir is None:
        return Path(RUNS, kind, f"{config.config_name}-{timestamp()}.json")
    return Path(config.run_dir, f"{kind}-{timestamp()}.json")


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    """Write values to a path from `output_file`; numbers that are not finite become null."""
    write_text(file, _json_text(values))


def _json_text(values: Mapping[str, Any]) -> str:
    return json.dumps(nan_to_none(values), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_text(file: Path, text: str, *, key: str = "output") -> None:
    """Write a text to a path from `output_file`, with the same `key`."""
    with refusing(f"{key}: {file} could not be written"):
        atomic_text(file, text)


class RunFolder:
    """The files of one run. Made on rank 0; on other ranks only the path is used.

    A context manager: its end releases the lock (see `lock`), then removes the folders that were made for a run that
    did not begin to train; `path`, too, if this process has made it (`is_new`).
    """

    def __init__(self, path: Path, *, is_new: bool = False) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        # For each image in the latest evaluation.
        self.predictions = path / "predictions.npz"
        self.lock_file = path / ".lock"
        self._lock: int | None = None
        self._made = [path, *list(path.parents)[:2]] if is_new else []

    @property
    def has_run(self) -> bool:
        return self.metrics.is_file() or self.checkpoints.is_dir()

    def create(self) -> None:
        with writing(self.path):
            self.checkpoints.mkdir(parents=True, exist_ok=True)

    def keep(self) -> None:
        """Keep the folder even if no step is trained in it."""
        self._made = []

    def lock(
        self, wait_seconds: float = 30.0, on_wait: Callable[[str], None] = lambda line: None, *, key: str = "run_dir"
    ) -> None:
        """Make the folder (the value of `key`), and lock it until the context ends.

        The lock belongs to the process: it does not outlive a kill, and loader workers do not inherit it. If another
        run holds it, which may be about to end and still saves its last step, this waits; `on_wait` gets a line that
        says so.
        """
        with writing(self.path, key):
            self._made += [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        until, holder = time.monotonic() + wait_seconds, ""
        while self._lock is None:
            with writing(self.path, key):
                self.path.mkdir(parents=True, exist_ok=True)
                found = self._try_lock()
            if found is None:
                self._remove_leftovers()
                return
            if time.monotonic() > until:
                raise UserError(
                    f"{key}: {self.path} is in use by {found}; wait for it, or give each run a folder of its own"
                )
            if not holder:
                on_wait(f"{key}: {self.path} is in use; waiting up to {wait_seconds:g} s for {found}")
            holder = found
            time.sleep(0.2)

    def _remove_leftovers(self) -> None:
        """Remove files that were being written when a kill came; the checkpoints' go when the next one is saved."""
        for path in (*self.path.glob(".*.????????.tmp"), *self.path.glob(".export????????")):
            # Not what a link leads to.
            with suppress(OSError):
                path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)

    def _try_lock(self) -> str | None:
        """Lock the folder, or return the process that holds it."""
        file = os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A process that left in the meantime has removed the file.
            ours = _same_file(self.lock_file, file)
        except BlockingIOError:
            ours = False
        except OSError as error:
            # A file system without locks.
            warnings.warn(f"{self.path}: cannot be locked ({error.strerror})", stacklevel=2)
            ours = True
        if not ours:
            holder = os.read(file, 200).decode(errors="replace") or "another process"
            os.close(file)
            return holder
        self._lock = file
        os.truncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {platform.node()}".encode(), 0)
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._lock is not None:
            self.lock_file.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None
        if self._made and not self.metrics.exists():
            for file in (self.path / "config.yaml", self.path / "environment.json"):
                # Perhaps the folder could not be made.
                with suppress(OSError):
                    file.unlink()
            for folder in (self.checkpoints, *self._made):
                # Not where there are other files.
                with suppress(OSError):
                    folder.rmdir()

    def write_config(self, values: dict[str, Any], command: str | None = None) -> None:
        """Write `config.yaml`: the command (None: that of this process), and every value, defaults included."""
        # On one line: a path may contain a newline.
        header = f"# {' '.join((command or environment_command()).splitlines())}\n"
        self.write_text("config.yaml", header + yaml.safe_dump(values, sort_keys=False))

    def write_json(self, name: str, values: dict[str, Any]) -> None:
        """Write a JSON file atomically; values that are not finite are written as null."""
        self.write_text(name, _json_text(values))

    def open_log(self) -> TextIO:
        """`log.txt`, to add to what earlier processes have printed."""
        file = self.path / "log.txt"
        with writing(file):
            return _appending(file)

    @property
    def summary(self) -> dict[str, Any]:
        """`summary.json`, the last file of a run that is written; empty without one that can be read."""
        with suppress(OSError, ValueError, TypeError):
            return dict(read_json(self.path / "summary.json"))
        return {}

    @property
    def finished(self) -> bool:
        """Whether `summary.json` is of a run that no signal stopped."""
        return bool(summary := self.summary) and not summary.get("stopped")

    def add_record(self, kind: str, step: int, epoch: float, **values: Any) -> dict[str, Any]:
        """Append a line to `metrics.jsonl` and return it; values that are not finite are written as null."""
        record = {"kind": kind, "step": step, "epoch": round(epoch, 6), "time": time.time(), **values}
        # Closed each time: network file systems then send it to the server, and report a full disk.
        with writing(self.metrics), _appending(self.metrics) as file:
            file.write(json.dumps(nan_to_none(record), allow_nan=False) + "\n")
        return record

    def records(self, kind: str | None = None) -> Iterator[dict[str, Any]]:
        """The records of `metrics.jsonl` (of one kind) without damaged lines; a `UserError` if the file is no text."""
        if not self.metrics.is_file():
            return
        # `kind` comes first; other kinds are not parsed.
        start = "" if kind is None else f'{{"kind": {json.dumps(kind)},'
        with refusing(f"{self.metrics}: cannot be read", OSError, UnicodeDecodeError, use="repair or remove it"):
            lines = read_bytes(self.metrics, _METRICS_BYTES).decode().splitlines()
        for line in lines:
            record = parse_record(line) if line.startswith(start) else None
            if record is not None:
                yield record

    def damaged_images(self) -> set[str]:
        return {record["name"] for record in self.records("event") if record.get("event") == DAMAGED_IMAGE}

    def drop_records_after(self, step: int) -> int:
        """Drop records of steps that a resumed run repeats (events are kept: they did happen); returns how many."""
        return self._filter_records(lambda record: record["step"] <= step or record["kind"] == "event")

    def drop_evaluation(self, step: int) -> None:
        """Drop the records of an evaluation that was interrupted between the model and its average, and is repeated."""
        self._filter_records(lambda record: record["step"] != step or record["kind"] != "eval")

    def _filter_records(self, wanted: Callable[[dict[str, Any]], bool]) -> int:
        """Rewrite `metrics.jsonl` with the records that are wanted; returns how many are dropped."""
        records = list(self.records())
        lines = [json.dumps(record) + "\n" for record in records if wanted(record)]
        kept = "".join(lines)
        now = self.metrics.read_text(encoding="utf-8") if self.metrics.is_file() else ""
        # Usually there is nothing to drop, not even a line cut off by a kill.
        if now != kept:
            # One that a kill cut off has no end.
            if damaged := now.count("\n") - len(records):
                print_lines("warning", [f"{self.metrics}: dropped {damaged} damaged line{'s' * (damaged > 1)}"])
            self.write_text("metrics.jsonl", kept)
        return len(records) - len(lines)

    def write_text(self, name: str, text: str) -> None:
        with writing(self.path / name):
            # Flushed: the records decide which checkpoint is kept as the best.
            atomic_text(self.path / name, text)


def writing(path: Path, key: str = "run_dir") -> AbstractContextManager[None]:
    """Turn the system's errors while writing a file of the run folder (`key`) into a `UserError`."""
    way_out = f"fix this, then the same command resumes where it was, or give another {key}"
    return refusing(f"{key}: {path} cannot be written", use=way_out)


def _appending(file: Path) -> TextIO:
    """A file, not what a link leads to, to be added to."""
    number = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    return os.fdopen(number, "a", encoding="utf-8", errors="backslashreplace")


def _same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
