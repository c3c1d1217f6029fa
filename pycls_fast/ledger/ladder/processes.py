"""Child processes that run this project's commands: their arguments, how they start, and how they ended.

Their output goes to a file, and they end with this process.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pycls_fast import build
from pycls_fast.config.keys import as_typed, text_override
from pycls_fast.config.ladder import Variant
from pycls_fast.errors import MISTAKE, OUT_OF_MEMORY
from pycls_fast.strategies import Parallel
from pycls_fast.train.folder import RunFolder, output_file

_PR_SET_PDEATHSIG = 1
# From SIGTERM to SIGKILL.
_SAVING_SECONDS = 30.0
# Where this process imports the package from.
OURS = Path(__file__).parents[3]

FAILED = "failed.json"
"""Why a training failed, in its folder: a result, which is not tried again."""


@dataclass(frozen=True)
class ProcessResult:
    """How a process ended: its exit status, its wall time in seconds and the file of its output."""

    status: int
    seconds: float
    log: Path

    @property
    def lacked_memory(self) -> bool:
        """Whether it failed, and lack of memory may be the reason: it said so, or was killed."""
        return self.status != 0 and OUT_OF_MEMORY in self.reason()

    @property
    def refused(self) -> bool:
        """Whether its settings cannot run on this machine or with this model, which tools report as a user error."""
        return self.status == MISTAKE and not self.lacked_memory

    def reason(self) -> str:
        """Why it failed: its "error:" lines, else its exception, else the signal that ended it, or its last line."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = list(dict.fromkeys(line.removeprefix("error: ") for line in lines if line.startswith("error: ")))
        said = [line.strip() for line in lines if line.strip(" -=")]
        last = said[-1] if said else f"exit status {self.status}"
        return "; ".join(errors) or _exception(lines) or (_signal(-self.status) if self.status < 0 else last)


def _signal(number: int) -> str:
    # The kernel sends SIGKILL when memory runs out.
    named = signal.Signals(number).name + ("; out of memory?" if number == signal.SIGKILL else "")
    return f"killed by signal {number} ({named})"


# The last line of a traceback; with several ranks torch prefixes lines with the rank.
_EXCEPTION = re.compile(r"(?:\[(rank\d+)\]: )?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)(?:: .*)?)")


def _exception(lines: Sequence[str]) -> str | None:
    """The exception of the rank that failed first; the others fail because it is gone."""
    found = [match for line in lines if (match := _EXCEPTION.fullmatch(line.rstrip()))]
    # torchrun's own exception only says that a rank has failed.
    found = [match for match in found if "ChildFailedError" not in match[2]]
    return next((match[2] for match in reversed(found) if match[1] == found[0][1]), None)


class Process:
    """A verb of `pycls-fast` with its arguments, started at once; under torchrun with more than one rank.

    Args:
        log: the file for its output.
        tree: the checkout whose package it imports, by default that of this process.
        devices: the CUDA devices that it sees, as in `CUDA_VISIBLE_DEVICES`; empty for those that this process sees.
    """

    def __init__(
        self,
        verb: str,
        arguments: Sequence[str],
        *,
        ranks: int,
        log: Path,
        tree: Path = OURS,
        devices: Sequence[str] = (),
    ) -> None:
        launcher = [sys.executable, "-u"]
        if ranks > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        self._log, self._ranks = log, ranks
        self._started = time.monotonic()
        with output_file(log).open("wb") as file:
            self._process = subprocess.Popen(
                [*launcher, "-m", "pycls_fast", *verb.split(), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=_environment(ranks, devices, tree),
                preexec_fn=_die_with_parent,
            )

    def finished(self) -> ProcessResult | None:
        """How it ended, or None while it runs."""
        status = self._process.poll()
        if status is None:
            return None
        if status != 0 and self._ranks > 1:
            status = _of_first_rank(self._log) or status
        return ProcessResult(status, time.monotonic() - self._started, self._log)

    def wait(self) -> ProcessResult:
        self._process.wait()
        ended = self.finished()
        assert ended is not None
        return ended

    @staticmethod
    def stop(processes: Iterable[Process]) -> None:
        """Ask all of them to save and exit, then kill those that have not within 30 s."""
        stopping = [process._process for process in processes]
        for process in stopping:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _SAVING_SECONDS
        for process in stopping:
            try:
                process.wait(timeout=max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


# Part of torchrun's final message; its own status is 1 whatever the ranks' statuses are.
_FIRST_RANK = re.compile(r"^Root Cause .*?^ *exitcode *: *(-?\d+)", re.MULTILINE | re.DOTALL)


def _of_first_rank(log: Path) -> int | None:
    """The status of the rank that failed first; None if torchrun did not report it."""
    found = _FIRST_RANK.search(log.read_text(encoding="utf-8", errors="replace"))
    return int(found[1]) if found else None


def visible_devices(count: int) -> tuple[str, ...]:
    """Names, in the form that `CUDA_VISIBLE_DEVICES` takes, of the `count` CUDA devices that this process sees."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(map(str, range(count)) if given is None else given.split(",")[:count])


def _environment(ranks: int, devices: Sequence[str] = (), tree: Path = OURS) -> dict[str, str]:
    ours = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    made = {key: value for key, value in os.environ.items() if key not in ours}
    if devices:
        made["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    if ranks > 1:
        # A single rank uses all cores. For several, torchrun would set one thread each, however many cores there are.
        made.setdefault("OMP_NUM_THREADS", str(max(build.cores() // ranks, 1)))
    # The user's own path stays: other packages may be found only through it. The current folder, which `-m` would put
    # first, may be another checkout.
    path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    return {**made, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def _die_with_parent() -> None:
    # If this process is killed with -9, the kernel signals the children, as it cannot do so itself.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


# Settings for several processes, which a variant may set and a single process refuses or ignores.
_SEVERAL = ("compression", "reshard_after_forward", "shard_degree", "replicate_degree", "sync_batchnorm")
ONE_PROCESS = (
    "parallel=single",
    "parallel.name=single",
    *(f"parallel.{key}={as_typed(Parallel.model_fields[key].default)}" for key in _SEVERAL),
)


def timing_arguments(
    file: Path, *, steps: int, warmup_steps: int, seconds: float, mode: str = "train"
) -> tuple[str, ...]:
    """One turn of `pycls-fast time`, whose record is the file. `weights` are not read, but may choose the model."""
    counts = (f"steps={steps}", f"warmup_steps={warmup_steps}", f"seconds={seconds:g}", "repeats=1")
    return (f"mode={mode}", *counts, text_override("output", str(file)))


@dataclass(frozen=True)
class Job:
    """A process that runs a verb with a variant and arguments of its `own`, and makes a file or a folder; `what` is it
    in words."""

    what: str
    verb: str
    variant: Variant
    own: tuple[str, ...]
    path: Path

    @property
    def is_done(self) -> bool:
        return self.path.is_file() or RunFolder(self.path).finished or (self.path / FAILED).is_file()


def progress_of(folder: RunFolder) -> str:
    """The newest step in a run's metrics, with its epoch and loss."""
    newest = deque(folder.records("train"), maxlen=1)
    if not newest:
        return "no step logged yet"
    (record,) = newest
    loss = "not finite" if record["loss"] is None else f"{record['loss']:.4f}"
    return f"epoch {record['epoch']:.2f}, step {record['step']}, loss {loss}"
