"""Regression check of two ledgers, for continuous integration: has a rung lost speed or accuracy?"""

from pycls_fast.ledger.gate.command import check

__all__ = ["check"]
