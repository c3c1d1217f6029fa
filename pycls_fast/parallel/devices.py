"""The device of a rank."""

from __future__ import annotations

import os

import torch

from pycls_fast.errors import UserError


def choose_device(name: str, local_rank: int) -> torch.device:
    """The device of this rank: the CPU, or the GPU with the number of the rank on its node.

    Args:
        name: "auto", "cpu" or "cuda".
        local_rank: number of this rank among those of its node.

    Raises:
        UserError: the device is not available.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UserError("runtime.device: cuda was asked for but torch finds no CUDA device; use runtime.device=cpu")
    if name == "cpu" or not available:
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 1 and _sees_only_its_own():
        return torch.device("cuda", 0)
    if local_rank >= count:
        raise UserError(
            f"runtime.device: {local_rank + 1} or more ranks on a node that shows each of them {count} CUDA devices; "
            "start fewer (torchrun --nproc_per_node, hydra.launcher.tasks_per_node), or ask for more GPUs "
            "(hydra.launcher.gpus_per_node)"
        )
    return torch.device("cuda", local_rank)


def _sees_only_its_own() -> bool:
    """Whether this is a Slurm task with its own GPU (`--gpus-per-task`); ranks of a torchrun in it would share that."""
    bound = "SLURM_GPUS_PER_TASK" in os.environ or "gpu" in os.environ.get("SLURM_TRES_PER_TASK", "")
    return bound and "TORCHELASTIC_RUN_ID" not in os.environ
