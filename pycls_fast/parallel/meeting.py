"""The store through which ranks find each other, which outlives processes that torchrun starts again."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

_ROUND = "pycls_fast/round"


def meet(size: int, timeout: timedelta) -> tuple[dist.Store, dist.Store]:
    """The store of this launch, and the part of it that belongs to the present processes alone.

    torchrun's agent keeps one store for all its attempts (torch 2.11 to 2.15), and what the processes before these
    wrote there is still to be read: gloo would try to reach the dead. An attempt that failed changes the count of
    restarts; one in which the ranks met and then became more or fewer has called `met`.
    """
    if size == 1:
        # One rank needs no launcher.
        alone = dist.HashStore()
        return alone, alone
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return store, dist.PrefixStore(f"restart {restarts}, round {store.add(_ROUND, 0)}", store)


def met(store: dist.Store) -> None:
    """Called by one rank when all have met: later processes shall not read what these wrote."""
    store.add(_ROUND, 1)


def connect(timeout: timedelta = timedelta(seconds=300)) -> dist.Store:
    """Another connection to the store of this launch, for another thread."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)


def first_of_launch(name: str, value: str) -> tuple[str, bool]:
    """What was given under a name first since torchrun was started, and whether that was before the present processes.

    Without torchrun a value is its own first. One rank calls this.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return value, False
    first = connect().compare_set(f"pycls_fast/{name}", "", value).decode()
    return first, first != value
