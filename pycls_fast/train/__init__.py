"""Training: the step, the loop around it, evaluation, checkpoints, and what a run leaves behind."""

from pycls_fast.train.loop import train

__all__ = ["train"]
