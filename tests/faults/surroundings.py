"""Odd environments, limits, files and links: each with what is run there, and what may come of it."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.attempt import LIMIT, Action, new_process, tool
from tests.faults.fixtures import Fixtures

Prepare = Callable[[Fixtures, Path], Sequence[str]]


@dataclass(frozen=True)
class Case:
    """What is prepared (it returns the arguments; `train` stands for the whole training), and the process's limits."""

    prepare: Prepare
    setup: Callable[[], object] = lambda: None
    environment: Mapping[str, str] = field(default_factory=dict)
    allowed: tuple[int, ...] = (0, 2)
    after: Callable[[Path, str], list[str]] | None = None
    limit: float = LIMIT
    run: Callable[..., Action] = tool
    workers_tell: bool = False
    """Whether torch's thread in a worker may print its traceback before the line."""


def _train(*overrides: str) -> Prepare:
    return lambda fixtures, folder: ["train", "run_dir=run", "schedule.max_steps=3", *overrides]


def _limit(kind: int, value: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(kind, (value, value))


def _little_memory() -> None:
    """Room for the first lines, not for a network: with more a library of torch may end the process by a signal."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    used = int(status["VmData"].split()[0]) << 10
    _limit(_DATA, used + (10 << 20))()


def _no_shared_memory() -> None:
    """One page of it, where this process may have its own; a batch of the workers takes more."""
    libc = ctypes.CDLL(None)
    if libc.unshare(_NEW_MOUNTS) == 0 and libc.mount(b"none", b"/", None, _PRIVATE, None) == 0:
        libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=4k")


def _odd_image(make: Callable[[Path], object], *arguments: str) -> Prepare:
    """One odd file among the images of class folders; FIXTURES/run predicts, or it is trained on."""

    def prepare(fixtures: Fixtures, folder: Path) -> Sequence[str]:
        images = fixtures.copy("folder", folder)
        make(images / "train" / "n01440764" / "x.jpg")
        where = {"RUN": str(fixtures.folder / "run"), "IMAGES": str(images / "train")}
        return [where.get(word, word) for word in arguments]

    return prepare


_ON_FOLDER = ("train", "data=folder", "data.root=folder", "data.global_batch_size=4", "schedule.max_steps=9")


def _on_run(change: Callable[[Path], object], *arguments: str) -> Prepare:
    def prepare(fixtures: Fixtures, folder: Path) -> Sequence[str]:
        change(fixtures.copy("run", folder))
        return arguments

    return prepare


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
_NOFILE, _DATA, _FSIZE, _STACK = (
    resource.RLIMIT_NOFILE, resource.RLIMIT_DATA, resource.RLIMIT_FSIZE, resource.RLIMIT_STACK,
)  # fmt: skip

CASES: Mapping[str, Case] = {
    "no home": Case(_train(), environment={"HOME": "", "XDG_CACHE_HOME": ""}),
    "no folder for temporary files": Case(_train(), environment={"TMPDIR": "/nonexistent"}),
    # Its name may come later: a launcher starts ranks that give up again.
    "no such host": Case(
        _train("parallel.timeout_seconds=5"),
        environment={"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "no.such.host.", "MASTER_PORT": "29999"},
        allowed=(1,),
        limit=20.0,
    ),
    **{
        f"{limit} descriptors, {workers} workers": Case(
            # A worker that cannot send its batch is waited for.
            _train(f"data.num_workers={workers}", "parallel.timeout_seconds=20"),
            _limit(_NOFILE, limit),
            workers_tell=workers > 0,
            limit=40.0,
        )
        for limit in (25, 40, 64)
        for workers in (0, 2)
    },
    "little memory": Case(_train(), _little_memory),
    "300 MB of memory": Case(_train(), _limit(_DATA, 300 << 20), run=new_process, allowed=(2,)),
    "no shared memory": Case(_train("data.num_workers=2", "data.global_batch_size=128"), _no_shared_memory),
    "small files, workers": Case(_train("data.num_workers=2"), _limit(_FSIZE, 20_000), allowed=(0, 1, 2)),
    "small files": Case(_train(), _limit(_FSIZE, 2_000), allowed=(0, 1, 2)),
    "small stack": Case(_train(), _limit(_STACK, 1 << 20)),
    "standard output is closed": Case(_train(), lambda: os.close(1), allowed=(0, 1, 2)),
    "standard input is closed": Case(_train(), lambda: os.close(0)),
    "the current folder is gone": Case(_train(), lambda: Path.cwd().rmdir()),
    "little recursion": Case(_train(), lambda: sys.setrecursionlimit(400), allowed=(0, 1, 2)),
    "a very long root": Case(_train(f"data.root={'x' * 5000}")),
    "a long part of the root": Case(_train(f"data.root=/tmp/{'x' * 300}")),
    "/proc/self as root": Case(_train("data=folder", "data.root=/proc/self")),
    "a pipe among images": Case(_odd_image(os.mkfifo, *_ON_FOLDER)),
    "a device among images": Case(_odd_image(lambda path: path.symlink_to("/dev/zero"), *_ON_FOLDER)),
    "a sparse file among images": Case(_odd_image(_sparse, *_ON_FOLDER)),
    "a folder among images": Case(_odd_image(Path.mkdir, *_ON_FOLDER)),
    "a circular link among images": Case(_odd_image(lambda path: path.symlink_to(path), *_ON_FOLDER)),
    "a folder in itself": Case(_odd_image(lambda path: path.with_name("y").symlink_to("."), *_ON_FOLDER)),
    "a pipe to predict": Case(_odd_image(os.mkfifo, "predict", "RUN", "IMAGES")),
    "an evil name in a terminal": Case(_odd_image(_evil_name, *_ON_FOLDER)),
    "an evil name in a table": Case(
        _odd_image(_evil_name, "predict", "RUN", "IMAGES", "format=csv", "output=out.csv"), after=_formulas
    ),
    "a lock that is a link": Case(
        _on_run(_lock, "train", "run_dir=run", "schedule.max_steps=45"), after=_victim
    ),
    "checkpoints that are not mounted": Case(
        _on_run(lambda run: shutil.rmtree(run / "checkpoints"), "train", "run_dir=run"), allowed=(2,), after=_refused
    ),
    "no metrics.jsonl": Case(_on_run(lambda run: (run / "metrics.jsonl").unlink(), "train", "run_dir=run")),
    "another order": Case(_on_run(lambda run: None, "train", "run_dir=run", "data.shuffle=blocks")),
    "a stranger's module": Case(_on_run(_evil_module, "test", "weights=run"), allowed=(2,), after=_victim),
    "a stranger's module in a checkpoint": Case(_on_run(_evil_module, "predict", "run", "run"), after=_victim),
}  # fmt: skip
