"""Printing errors once: normally a node's first rank prints; here, a rank that alone hit an error prints its own."""

from __future__ import annotations

import hashlib
import os
import sys
from datetime import timedelta

import torch.distributed as dist

from pycls_fast.errors import UserError
from pycls_fast.parallel.rendezvous import connect

# Time for the node's first rank to hit the same error, as it usually does: most errors are in what all ranks are given.
_PATIENCE = timedelta(seconds=5)


def print_if_only_rank(error: UserError, patience: timedelta = _PATIENCE) -> None:
    """Print the error unless the node's first rank, which prints its own errors, has hit the same one.

    If several ranks hit it, one prints. Call this before the other ranks can notice that this one leaves: then they
    end, and the launcher ends this one. If the store cannot be reached, every rank prints: better twice than never.
    """
    rank, local_rank, size = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    if size < 2 or "MASTER_ADDR" not in os.environ:
        return
    node, attempt = (os.environ.get(name, "0") for name in ("GROUP_RANK", "TORCHELASTIC_RESTART_COUNT"))
    text = hashlib.sha256("\n".join(error.lines).encode()).hexdigest()
    key = f"pycls_fast/mistake/node {node}/attempt {attempt}/{text}"
    try:
        store = connect(timeout=patience)
        if local_rank == 0:
            store.set(key, "told")
            return
        if _comes(store, key, patience) or store.compare_set(f"{key}/alone", "", str(rank)) != str(rank).encode():
            return
    except dist.DistError:
        if local_rank == 0:
            return
    print(*(f"error: rank {rank}: {line}" for line in error.lines), sep="\n", file=sys.stderr, flush=True)


def _comes(store: dist.Store, key: str, patience: timedelta) -> bool:
    try:
        store.wait([key], patience)
    except dist.DistStoreError:
        return False
    return True
