"""Jobs of a cluster's scheduler, through Hydra's submitit launcher (`pip install -e '.[slurm]'`)."""

from __future__ import annotations

import os
import signal


def is_task() -> bool:
    """Whether this process is a task that submitit started."""
    return "SUBMITIT_EXECUTOR" in os.environ


def warning_signal() -> signal.Signals | None:
    """What a task gets some minutes before its job is taken off the machine; None where this is no task."""
    return signal.Signals[f"SIG{os.environ.get('SUBMITIT_PREEMPT_SIGNAL', 'USR2')}"] if is_task() else None


def join() -> None:
    """Tell the tasks of a job apart in torchrun's variables, each task being one rank."""
    if "RANK" in os.environ:
        return
    from submitit.helpers import TorchDistributedEnvironment

    TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
