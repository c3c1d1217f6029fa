"""Training. Read loop.py, step.py, assemble.py in this order; then checkpoints, evaluation, the files of a run."""

from pycls_fast.train.from_python import Trained, train_net
from pycls_fast.train.loop import train

__all__ = ["Trained", "train", "train_net"]
