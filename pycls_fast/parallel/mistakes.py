"""Printing errors once: normally a node's first rank prints; here, a rank that alone hit an error prints its own."""

from __future__ import annotations

import hashlib
import os
import sys
from datetime import timedelta

import torch.distributed as dist

from pycls_fast.errors import UserError
from pycls_fast.parallel.rendezvous import attempt, connect

# Time for the node's first rank to hit the same error, as it usually does: most errors are in what all ranks are given.
_PATIENCE = timedelta(seconds=5)


def report_mistake(error: UserError, patience: timedelta = _PATIENCE) -> bool:
    """Print the error unless the node's first rank, which prints its own errors, has hit the same one.

    If several ranks hit it, one prints. Call this before the other ranks can notice that this one leaves: then they
    end, and the launcher ends this one. If the store cannot be reached, every rank prints: better twice than never.

    Returns:
        Whether all ranks have hit this error. If they do not within `patience`, False.
    """
    rank, local_rank, size = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    if size < 2:
        return True
    if "MASTER_ADDR" not in os.environ:
        return False
    node = os.environ.get("GROUP_RANK", "0")
    text = hashlib.sha256("\n".join(error.lines).encode()).hexdigest()
    everywhere = f"pycls_fast/mistake/{attempt()}/{text}"
    here = f"pycls_fast/mistake/{attempt()}/node {node}/{text}"
    try:
        store = connect(timeout=patience)
        if local_rank == 0:
            store.set(here, "told")
        if _all_come(store, everywhere, size, patience):
            return True
        if local_rank == 0 or store.check([here]):
            return False
        if store.compare_set(f"{here}/alone", "", str(rank)) != str(rank).encode():
            return False
    except dist.DistError:
        if local_rank == 0:
            return False
    print(*(f"error: rank {rank}: {line}" for line in error.lines), sep="\n", file=sys.stderr, flush=True)
    return False


def _all_come(store: dist.Store, key: str, size: int, patience: timedelta) -> bool:
    """Whether every rank calls this for the key; a sweep's next run may do so again."""
    arrived = store.add(f"{key}/ranks", 1)
    everyone = f"{key}/all {(arrived - 1) // size}"
    if arrived % size == 0:
        store.set(everyone, "here")
    return _comes(store, everyone, patience)


def _comes(store: dist.Store, key: str, patience: timedelta) -> bool:
    try:
        store.wait([key], patience)
    except dist.DistStoreError:
        return False
    return True
