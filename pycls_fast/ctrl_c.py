"""Ctrl-C while a tool is still importing: one line and status 130 instead of a traceback.

Each tool imports this first; Python and Hydra take about a second. `config/command_line.py` does the same afterwards.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType

from pycls_fast.exit_status import INTERRUPTED


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    # Once per node.
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        print("interrupted: Ctrl-C ended this at once", file=sys.stderr)
    # Raised here it sets the exit status.
    raise SystemExit(INTERRUPTED)


sys.excepthook = _report
