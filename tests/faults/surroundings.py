"""Odd environments, limits, files and links: each with what is run there, and what may come of it."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.attempt import LIMIT, Action, new_process, tool

_TRAIN = "train run_dir=run schedule.max_steps=3"
_ON_FOLDER = "train data=folder data.root=folder data.global_batch_size=4 schedule.max_steps=9"


@dataclass(frozen=True)
class Case:
    """A command (`train` stands for the whole training, FIXTURES for the folder of what is there), and its process.

    Attributes:
        setup: called in the process, before.
        image: makes one odd file among the images of `folder`, a copy of class folders.
        change: is given `run`, a copy of the finished run.
        after: what fell short, by the folder and what was said.
        workers_tell: torch's thread in a worker may print its traceback before the line.
    """

    words: str = _TRAIN
    setup: Callable[[], object] = lambda: None
    image: Callable[[Path], object] | None = None
    change: Callable[[Path], object] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    allowed: tuple[int, ...] = (0, 2)
    after: Callable[[Path, str], list[str]] | None = None
    limit: float = LIMIT
    run: Callable[..., Action] = tool
    workers_tell: bool = False


def _limit(kind: str, value: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (value, value))


def _little_memory() -> None:
    """Room for the first lines, not for a network: with more a library of torch may end the process by a signal."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    used = int(status["VmData"].split()[0]) << 10
    _limit("DATA", used + (10 << 20))()


def _no_shared_memory() -> None:
    """One page of it, where this process may have its own; a batch of the workers takes more."""
    libc = ctypes.CDLL(None)
    if libc.unshare(_NEW_MOUNTS) == 0 and libc.mount(b"none", b"/", None, _PRIVATE, None) == 0:
        libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=4k")


def _sparse(path: Path, size: int = 8 << 30) -> None:
    with path.open("wb") as file:
        file.truncate(size)


def _lock(run: Path) -> None:
    (run.parent / "victim").write_text("as before")
    (run / ".lock").symlink_to("../victim")


def _evil_module(run: Path) -> None:
    (run.parent / "victim").write_text("as before")
    (run.parent / "evil.py").write_text("open('victim', 'w')\n")
    config = run / "config.yaml"
    config.write_text(config.read_text() + "\nimports: [evil]\n")
    for state in run.glob("checkpoints/step_*/state.json"):
        state.write_text(state.read_text().replace('"imports": []', '"imports": ["evil"]'))


def _victim(folder: Path, text: str) -> list[str]:
    return [] if (folder / "victim").read_text() == "as before" else ["a file outside of the run was overwritten"]


def _refused(folder: Path, text: str) -> list[str]:
    kept = len((folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [] if "records of checkpoints" in text and kept > 40 else ["records were lost without a line"]


def _evil_name(path: Path) -> None:
    path.with_name("=1+evil\x1b[31m\u202e.jpg").write_bytes(b"no image")


def _formulas(folder: Path, text: str) -> list[str]:
    lines = (folder / "out.csv").read_text().splitlines() if (folder / "out.csv").exists() else []
    return [f"a formula: {line}" for line in lines if line.startswith("=")]


# From <linux/sched.h> and <linux/mount.h>.
_NEW_MOUNTS, _PRIVATE = 0x20000, 0x44000

CASES: Mapping[str, Case] = {
    "no home": Case(environment={"HOME": "", "XDG_CACHE_HOME": ""}),
    "no folder for temporary files": Case(environment={"TMPDIR": "/nonexistent"}),
    # Its name may come later: a launcher starts ranks that give up again.
    "no such host": Case(
        f"{_TRAIN} parallel.timeout_seconds=5",
        environment={"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "no.such.host.", "MASTER_PORT": "29999"},
        allowed=(1,),
        limit=20.0,
    ),
    **{
        f"{limit} descriptors, {workers} workers": Case(
            # A worker that cannot send its batch is waited for.
            f"{_TRAIN} data.num_workers={workers} parallel.timeout_seconds=20",
            _limit("NOFILE", limit),
            workers_tell=workers > 0,
            limit=40.0,
        )
        for limit in (25, 40, 64)
        for workers in (0, 2)
    },
    "little memory": Case(setup=_little_memory),
    "300 MB of memory": Case(setup=_limit("DATA", 300 << 20), run=new_process, allowed=(2,)),
    "no shared memory": Case(f"{_TRAIN} data.num_workers=2 data.global_batch_size=128", _no_shared_memory),
    "small files, workers": Case(f"{_TRAIN} data.num_workers=2", _limit("FSIZE", 20_000), allowed=(0, 1, 2)),
    "small files": Case(setup=_limit("FSIZE", 2_000), allowed=(0, 1, 2)),
    "small stack": Case(setup=_limit("STACK", 1 << 20)),
    "standard output is closed": Case(setup=lambda: os.close(1), allowed=(0, 1, 2)),
    "standard input is closed": Case(setup=lambda: os.close(0)),
    "the current folder is gone": Case(setup=lambda: Path.cwd().rmdir()),
    "little recursion": Case(setup=lambda: sys.setrecursionlimit(400), allowed=(0, 1, 2)),
    "a very long root": Case(f"{_TRAIN} data.root={'x' * 5000}"),
    "a long part of the root": Case(f"{_TRAIN} data.root=/tmp/{'x' * 300}"),
    "/proc/self as root": Case(f"{_TRAIN} data=folder data.root=/proc/self"),
    "a pipe among images": Case(_ON_FOLDER, image=os.mkfifo),
    "a device among images": Case(_ON_FOLDER, image=lambda path: path.symlink_to("/dev/zero")),
    "a sparse file among images": Case(_ON_FOLDER, image=_sparse),
    "a folder among images": Case(_ON_FOLDER, image=Path.mkdir),
    "a circular link among images": Case(_ON_FOLDER, image=lambda path: path.symlink_to(path)),
    "a folder in itself": Case(_ON_FOLDER, image=lambda path: path.with_name("y").symlink_to(".")),
    "a pipe to predict": Case("predict FIXTURES/run folder/train", image=os.mkfifo),
    "an evil name in a terminal": Case(_ON_FOLDER, image=_evil_name),
    "an evil name in a table": Case(
        "predict FIXTURES/run folder/train format=csv output=out.csv", image=_evil_name, after=_formulas
    ),
    "a lock that is a link": Case("train run_dir=run schedule.max_steps=45", change=_lock, after=_victim),
    "checkpoints that are not mounted": Case(
        "train run_dir=run", change=lambda run: shutil.rmtree(run / "checkpoints"), allowed=(2,), after=_refused
    ),
    "no metrics.jsonl": Case("train run_dir=run", change=lambda run: (run / "metrics.jsonl").unlink()),
    "another order": Case("train run_dir=run data.shuffle=blocks", change=lambda run: None),
    "a stranger's module": Case("test weights=run", change=_evil_module, allowed=(2,), after=_victim),
    "a stranger's module in a checkpoint": Case("predict run run", change=_evil_module, after=_victim),
}  # fmt: skip
