"""Tasks of a cluster's scheduler that Hydra's submitit launcher started (`pip install 'pycls_fast[slurm]'`)."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable

from pycls_fast.errors import DONE, FAULT, STOPPED, UserError, print_lines


def is_task() -> bool:
    """Whether this process is a task that submitit started."""
    return "SUBMITIT_EXECUTOR" in os.environ


def warning_signals() -> set[signal.Signals]:
    """The signals that announce the end of a job: the launcher's, or those that `#SBATCH --signal` usually names."""
    if is_task():
        return {signal.Signals[f"SIG{os.environ.get('SUBMITIT_PREEMPT_SIGNAL', 'USR2')}"]}
    return {signal.SIGUSR1, signal.SIGUSR2} if "SLURM_JOB_ID" in os.environ else set()


def join() -> None:
    """Set torchrun's environment variables for this task of a job; each task is one rank."""
    if "RANK" not in os.environ:
        from submitit.helpers import TorchDistributedEnvironment

        TorchDistributedEnvironment().export(set_cuda_visible_devices=False)


class TaskStopped(Exception):
    """Raised in a scheduler's task that a signal has stopped; submitit sends it to the process of the command."""


def run_task(action: Callable[[], int]) -> int:
    """Run `action` as a scheduler's task, and show its errors in the task's log; returns `DONE`.

    Raises:
        UserError, TaskStopped: submitit sends them to the process of the command.
        SystemExit: a fault. From any other exception Hydra and submitit would make a task that succeeded.
    """
    try:
        status = action()
    except UserError as error:
        print_lines("error", error.lines)
        raise
    except Exception:  # noqa: BLE001  # a crash of the tool
        traceback.print_exc()
        raise SystemExit(FAULT) from None
    if status == STOPPED:
        raise TaskStopped("a signal ended the job, and everything is saved; the same command with its run_dir resumes")
    if status != DONE:
        raise SystemExit(status)
    return status
