"""Two runs side by side: settings, results, the images on which they disagree, and cost."""

from pycls_fast.ledger.compare.conduct import compare

__all__ = ["compare"]
