"""The ledger: what each choice costs in time and memory. Timing, its statistics, the tables made of them."""

from pycls_fast.ledger.statistics import Ratio, Spread, median_interval, paired_ratio, spread
from pycls_fast.ledger.timing import time_variants

__all__ = ["Ratio", "Spread", "median_interval", "paired_ratio", "spread", "time_variants"]
