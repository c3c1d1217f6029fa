"""Processes that end with the test that started them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Any


class Started:
    """Starts processes, each in a session of its own, and ends what is left of them.

    A process that outlives a failed test would slow down the tests after it, and one of them would fail because of its
    open pipes.
    """

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[Any]] = []

    def __call__(self, command: Sequence[str], **settings: Any) -> subprocess.Popen[Any]:
        """Start a command; `settings` are those of `subprocess.Popen`."""
        process: subprocess.Popen[Any] = subprocess.Popen(command, start_new_session=True, **settings)
        self._processes.append(process)
        return process

    def end(self) -> None:
        """Kill the processes with their children, and close their pipes."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # Closes the pipes and waits.
            with process:
                pass
