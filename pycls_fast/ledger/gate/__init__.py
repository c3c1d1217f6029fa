"""Regression check of two ledgers, for continuous integration: has a rung lost speed or accuracy?"""

from pycls_fast.ledger.gate.command import check
from pycls_fast.ledger.gate.comparison import compare

__all__ = ["check", "compare"]
