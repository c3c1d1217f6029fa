"""Other processes of this project, run to their end: what they say goes to a file, and they die with this one."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pycls_fast import build
from pycls_fast.config.command_line import MISTAKE, OUT_OF_MEMORY

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Finished:
    """How a process ended: its exit status, its wall time in seconds and the file with what it said."""

    status: int
    seconds: float
    log: Path

    @property
    def refused(self) -> bool:
        """Whether it was asked for what this machine or this model cannot have.

        To the process that is a user's mistake, and so is a batch too large for the device's memory, which is no such
        thing here.
        """
        return self.status == MISTAKE and OUT_OF_MEMORY not in self.reason()

    def reason(self) -> str:
        """What it gave as the cause: its lines of error, else its exception, else the last line that says anything.

        One that a signal has ended said nothing of its end: it is the signal's name.
        """
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = list(dict.fromkeys(line.removeprefix("error: ") for line in lines if line.startswith("error: ")))
        said = [line.strip() for line in lines if line.strip(" -=")]
        last = said[-1] if said else f"exit status {self.status}"
        return "; ".join(errors) or _exception(lines) or (_signal(-self.status) if self.status < 0 else last)


def _signal(number: int) -> str:
    named = {each.value: each.name for each in signal.Signals}.get(number, "no name")
    # What the kernel sends where memory runs out.
    return f"killed by signal {number} ({named}{'; out of memory?' if number == signal.SIGKILL else ''})"


# The last line of a traceback; torch puts the rank before the lines of several.
_EXCEPTION = re.compile(r"(?:\[(rank\d+)\]: )?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)(?:: .*)?)")


def _exception(lines: Sequence[str]) -> str | None:
    """What the first rank to break ended with; the others break because it is gone."""
    found = [match for line in lines if (match := _EXCEPTION.fullmatch(line.rstrip()))]
    # torchrun's own, which says that a rank has failed.
    found = [match for match in found if "ChildFailedError" not in match[2]]
    return next((match[2] for match in reversed(found) if match[1] == found[0][1]), None)


class Process:
    """A tool of this project with its arguments, started at once; under torchrun with more than one rank.

    Args:
        tool: its file.
        arguments: of the command line.
        ranks: processes.
        log: the file for what it says.
        inherits: descriptors that stay open in it as long as it runs.
    """

    def __init__(
        self, tool: Path, arguments: Sequence[str], *, ranks: int, log: Path, inherits: Sequence[int] = ()
    ) -> None:
        launcher = [sys.executable, "-u"]
        if ranks > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        self._log, self._ranks = log, ranks
        self._started = time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [*launcher, str(tool), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=_environment(ranks),
                pass_fds=inherits,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )

    def finished(self) -> Finished | None:
        """How it ended, or None while it runs."""
        status = self._process.poll()
        if status is None:
            return None
        if status != 0 and self._ranks > 1:
            status = _of_first_rank(self._log) or status
        return Finished(status, time.monotonic() - self._started, self._log)

    def wait(self) -> Finished:
        """Wait for the end."""
        self._process.wait()
        ended = self.finished()
        assert ended is not None
        return ended

    def stop(self) -> None:
        """Ask it to save and end; returns when it has, or after half a minute without it."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


# In the last words of torchrun, whose own status is 1 whatever its ranks have ended with.
_FIRST_RANK = re.compile(r"^Root Cause .*?^ *exitcode *: *(-?\d+)", re.MULTILINE | re.DOTALL)


def _of_first_rank(log: Path) -> int | None:
    """The status of the rank that failed first; None where torchrun did not come to tell it."""
    found = _FIRST_RANK.search(log.read_text(encoding="utf-8", errors="replace"))
    return int(found[1]) if found else None


def _environment(ranks: int) -> dict[str, str]:
    ours = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    kept = {key: value for key, value in os.environ.items() if key not in ours}
    # One rank alone takes all cores; torchrun would give each of several a single one, whatever there are.
    share = max(build.cores() // ranks, 1)
    return {"OMP_NUM_THREADS": str(share), **kept} if ranks > 1 else kept


def _die_with_parent() -> None:
    # Killed with -9 this process can tell its children nothing; the kernel does.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
