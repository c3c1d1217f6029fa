"""Two runs side by side: what was set, what was learned, on which images they disagree, what it cost."""

from pycls_fast.ledger.compare.conduct import compare

__all__ = ["compare"]
