"""Tasks of a cluster's scheduler that Hydra's submitit launcher started (`pip install -e '.[slurm]'`)."""

from __future__ import annotations

import os
import signal


def is_task() -> bool:
    """Whether this process is a task that submitit started."""
    return "SUBMITIT_EXECUTOR" in os.environ


def warning_signal() -> signal.Signals | None:
    """The signal that a task gets some minutes before its job is preempted; None if this is not a task."""
    return signal.Signals[f"SIG{os.environ.get('SUBMITIT_PREEMPT_SIGNAL', 'USR2')}"] if is_task() else None


def join() -> None:
    """Set torchrun's environment variables for this task of a job; each task is one rank."""
    if "RANK" in os.environ:
        return
    from submitit.helpers import TorchDistributedEnvironment

    TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
