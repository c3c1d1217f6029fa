"""Ctrl-C while a tool is importing: one line and status 130.

Each tool that is the main program imports this first. Imports take seconds. A KeyboardInterrupt in one of them would be
a traceback if `config/reporting.py` cannot report it yet; in torch it may be lost, or abort the process.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import FrameType

from pycls_fast.errors import INTERRUPTED

_IMPORTS = "<frozen importlib._bootstrap>"
# All tools call it, whatever reads their command line.
_REPORTS = "pycls_fast/config/reporting.py"


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
        # The terminal may be gone.
        with suppress(OSError):
            os.write(2, b"interrupted: Ctrl-C ended this at once\n")
    os._exit(INTERRUPTED)


# Unless it is ignored, as in the background of a shell's script.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _interrupt)
