"""`tools/ledger.py check`: prints how two ledgers differ; the exit status says whether something is lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pycls_fast.config.reporting import reporting
from pycls_fast.errors import UserError
from pycls_fast.exit_status import DONE
from pycls_fast.ledger.gate.comparison import compare_ledgers
from pycls_fast.ledger.reading import read_measured
from pycls_fast.paths import user_path
from pycls_fast.train.display import plain_table, wide_console

LOST = 1
_SETTINGS = ("tolerance", "absolute")
_USAGE = "check BASELINE.json NEW.json [tolerance=0.05] [absolute=true]"


def check(arguments: Sequence[str]) -> int:
    """Run the command: prints a table; returns 1 if something was lost, 0 if not, 2 for a user error."""
    return reporting(lambda: _check(arguments))


def _check(arguments: Sequence[str]) -> int:
    settings = dict(a.split("=", 1) for a in arguments if _is_setting(a))
    files = [user_path(a) for a in arguments if not _is_setting(a)]
    if len(files) != 2:
        raise UserError(f"check: needs two files; got {' '.join(map(str, files)) or 'none'}; use {_USAGE}")
    tolerance, absolute = _tolerance(settings.get("tolerance", "0.05")), settings.get("absolute", "true")
    if absolute not in ("true", "false"):
        raise UserError(f"absolute: must be true or false; got {absolute}")
    findings = compare_ledgers(*(_read(file) for file in files), tolerance=tolerance, absolute=absolute == "true")
    rows = [(finding.rung, finding.quantity, finding.before, finding.now, finding.text) for finding in findings]
    wide_console().print(plain_table(("rung", "quantity", "before", "now", ""), rows, no_wrap=True))
    return LOST if any(finding.lost for finding in findings) else DONE


def _is_setting(argument: str) -> bool:
    """Whether this is a setting and not a file: a sweep's folders contain "=" too (`seed=1/ledger.json`)."""
    return argument.startswith(tuple(f"{name}=" for name in _SETTINGS))


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise UserError(f"tolerance: must be a share from 0 up to 1; got {text}")
    return value


def _read(file: Path) -> dict[str, Any]:
    record = read_measured(file)
    if record["unfinished"]:
        raise UserError(f"{file}: unfinished; run the ledger's command again, which resumes it")
    for arm in record["arms"]:
        trained = arm["training"]["runs"] if arm["training"] else ()
        if any(run["top1"] is None or not run["count"] for run in trained):
            raise UserError(f"{file}: a run of {arm['name']} has no top1 or count; the file is damaged, give another")
    return record
