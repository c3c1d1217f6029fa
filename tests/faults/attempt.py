"""One try: a tool in a forked process, with its output, its end, and what it left behind."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pycls_fast.cli import VERBS

Action = Callable[[], int]
LIMIT = 90.0
"""Seconds; nothing that is tried here takes a tenth of it. What has a timeout of its own has a shorter one."""
_SHARED_MEMORY = Path("/dev/shm")
_CRASH = 70


@dataclass(frozen=True)
class Outcome:
    """How a process ended: its exit status, minus the number of the signal that ended it, or None if it had to be."""

    status: int | None
    text: str
    left: tuple[str, ...]
    limit: float

    def short(self, allowed: Iterable[int] = (0, 2)) -> list[str]:
        """What is wrong with it; a mistake is one line and status 2, never a traceback."""
        found = [f"left {what}" for what in self.left]
        last = next((line for line in reversed(self.text.splitlines()) if line.strip()), "")
        if self.status is None:
            found.append(f"waited for more than {self.limit:g} s: {last}")
        elif "Traceback (most recent" in self.text or self.status == _CRASH:
            trace = self.text.partition("Traceback (most recent")[2].splitlines()[1:] or [last]
            found.append(f"traceback: {next((line for line in trace if not line.startswith(' ')), last)}")
        elif self.status not in allowed:
            found.append(f"status {self.status}: {last}")
        elif self.status in (1, 2) and not last:
            found.append(f"status {self.status} without a line")
        if "\x1b" in self.text:
            found.append("a control character reached the terminal")
        return found


def tool(*arguments: str) -> Action:
    """A verb of the command line."""
    # Else it would be refused whatever is tried.
    assert arguments[0] in VERBS, arguments[0]

    def action() -> int:
        from pycls_fast.cli import main

        sys.argv = ["pycls-fast", *arguments]
        main()

    return action


def new_process(*arguments: str) -> Action:
    """A verb in a process that has imported nothing."""
    return lambda: os.execv(sys.executable, [sys.executable, "-m", "pycls_fast", *arguments])


class Child:
    """A process that runs an action in a folder, after `setup`. Its temporary files have a folder of their own."""

    def __init__(
        self,
        action: Action,
        folder: Path,
        *,
        setup: Callable[[], object] = lambda: None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._shared = set(_SHARED_MEMORY.glob("torch_*"))
        self._temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix="tmp"))
        self._read, write = os.pipe()
        self._text = b""
        self.pid = os.fork()
        if self.pid == 0:
            tempfile.tempdir = None
            _run(action, folder, setup, {"TMPDIR": str(self._temporary), **(environment or {})}, write)
        os.close(write)
        os.set_blocking(self._read, False)

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        os.kill(self.pid, number)

    def largest(self) -> int | None:
        """Of the processes that it has started, the one that the kernel would kill for want of memory."""
        pages = {pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in _living(self.pid) - {self.pid}}
        # Not Python's own small helpers, of 10 MB.
        return max((pid for pid in pages if pages[pid] > 10_000), key=pages.__getitem__, default=None)

    def runs_for(self, seconds: float) -> bool:
        """Wait; whether the process still runs then."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return False
            self._drain()
            time.sleep(0.005)
        return True

    def end(self, limit: float = LIMIT) -> Outcome:
        """Wait for the end, and clean up."""
        in_time = not self.runs_for(limit)
        if not in_time:
            self.signal(signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self._drain()
        os.close(self._read)
        left = []
        if in_time and not os.WIFSIGNALED(status) and _lives(self.pid):
            left.append("processes")
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        if in_time and not os.WIFSIGNALED(status):
            left += [str(path) for path in set(_SHARED_MEMORY.glob(f"torch_{self.pid}_*")) - self._shared]
            # Compiled code is kept for later runs.
            left += [str(path) for path in self._temporary.iterdir() if not path.name.startswith("torchinductor_")]
        code = os.waitstatus_to_exitcode(status) if in_time else None
        return Outcome(code, self._text.decode(errors="replace"), tuple(left), limit)

    def _drain(self) -> None:
        with suppress(BlockingIOError):
            while part := os.read(self._read, 1 << 16):
                self._text += part


def attempt(action: Action, folder: Path, *, limit: float = LIMIT, **how: Any) -> Outcome:
    """Run an action to its end; other arguments are `Child`'s."""
    return Child(action, folder, **how).end(limit)


def _living(session: int) -> set[int]:
    """The processes of a session that still run; a dead one may wait long for the system's first process."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, _, its_session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state not in "ZX":
                found.add(int(process.name))
    return found


def _lives(session: int) -> bool:
    """Whether processes still run two seconds later: those that a pipe's end tells to end need a moment."""
    for _ in range(20):
        if not _living(session):
            return False
        time.sleep(0.1)
    return True


def _run(
    action: Action, folder: Path, setup: Callable[[], object], environment: Mapping[str, str], output: int
) -> None:
    status = _CRASH
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        # As Python opens them: characters that cannot be encoded are escaped on standard error.
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False, errors="backslashreplace")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.chdir(folder)
        os.environ.update(environment)
        setup()
        status = action()
    except SystemExit as stopped:
        status = stopped.code if isinstance(stopped.code, int) else 0
    except BaseException:  # noqa: BLE001  # told to the parent
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
