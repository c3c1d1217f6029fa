"""Ctrl-C while a tool is importing: one line and status 130.

Each tool imports this first. Imports take seconds. A KeyboardInterrupt in one of them would be a traceback if
`config/command_line.py` cannot report it yet; in torch it may be lost, or abort the process.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

from pycls_fast.exit_status import INTERRUPTED

_IMPORTS = "<frozen importlib._bootstrap>"
_REPORTS = "pycls_fast/config/command_line.py"


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End the process if something is being imported or nothing reports a KeyboardInterrupt yet; else raise that."""
    files = []
    inner = frame
    while inner is not None:
        files.append(inner.f_code.co_filename)
        inner = inner.f_back
    if _IMPORTS not in files and any(file.endswith(_REPORTS) for file in files):
        signal.default_int_handler(number, frame)
    # Once per node. Not `print`: the signal may have interrupted another one.
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        os.write(2, b"interrupted: Ctrl-C ended this at once\n")
    os._exit(INTERRUPTED)


# Unless it is ignored, as in the background of a shell's script.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _interrupt)
