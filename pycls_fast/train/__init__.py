"""Training: the step, the loop around it, evaluation, checkpoints, and the files of a run."""

from pycls_fast.train.loop import train

__all__ = ["train"]
