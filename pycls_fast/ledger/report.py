"""The report of a ledger: `ledger.md`, `index.html` and its charts, drawn from a record or from a `ledger.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pycls_fast.config.reporting import reporting
from pycls_fast.errors import UserError
from pycls_fast.exit_status import DONE
from pycls_fast.ledger.page import write_page
from pycls_fast.ledger.reading import read_ledger
from pycls_fast.ledger.table import markdown, print_table
from pycls_fast.paths import user_path

_USAGE = "report LEDGER.json [output=FOLDER]"
_OUTPUT = "output="


def write_reports(record: Mapping[str, Any], folder: Path) -> None:
    """Write `ledger.md`, `index.html` and its charts."""
    (folder / "ledger.md").write_text(markdown(record), encoding="utf-8")
    write_page(record, folder)


def redraw(arguments: Sequence[str]) -> int:
    """Run the command: draw the report of a `ledger.json`; returns 0, or 2 for a user error."""
    return reporting(lambda: _redraw(arguments))


def _redraw(arguments: Sequence[str]) -> int:
    outputs = [a.removeprefix(_OUTPUT) for a in arguments if a.startswith(_OUTPUT)]
    files = [user_path(a) for a in arguments if not a.startswith(_OUTPUT)]
    if len(files) != 1 or len(outputs) > 1:
        raise UserError(f"report: needs one file; got {' '.join(arguments) or 'none'}; use {_USAGE}")
    record = read_ledger(files[0])
    folder = user_path(outputs[0]) if outputs else files[0].parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_reports(record, folder)
    except OSError as error:
        raise UserError(f"output: {folder} cannot be written ({error.strerror}); choose another folder") from error
    print_table(record)
    print(f"report: {folder / 'index.html'}")
    return DONE
