"""The ledger: what each choice costs in time, memory and accuracy. Timing, statistics, tables and reports."""

from pycls_fast.ledger.statistics import paired_ratio
from pycls_fast.ledger.timing import time_variants

__all__ = ["paired_ratio", "time_variants"]
