"""Two runs side by side: settings, results, the images on which they disagree, and cost."""

from pycls_fast.ledger.compare.conduct import compare_runs

__all__ = ["compare_runs"]
