"""The ledger: what each choice costs in time and memory. Timing, its statistics, the tables made of them."""

from pycls_fast.ledger.statistics import paired_ratio
from pycls_fast.ledger.timing import time_variants

__all__ = ["paired_ratio", "time_variants"]
