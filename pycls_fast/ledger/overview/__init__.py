"""A table of many runs: the settings in which they differ, and what each one reached."""

from pycls_fast.ledger.overview.report import list_runs

__all__ = ["list_runs"]
