"""Rendezvous: the key-value store through which ranks find each other. It outlives processes that torchrun restarts."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

_ROUND = "pycls_fast/round"


def open_store(size: int, timeout: timedelta) -> tuple[dist.Store, dist.Store]:
    """The store of this launch, and a part of it that only the current processes use.

    torchrun's agent keeps one store for all its attempts (torch 2.11 to 2.15), so that keys of earlier processes are
    still there: gloo would try to connect to dead ranks. A failed attempt changes the restart count; an attempt that
    ended because the number of ranks changed has called `finish_round`.
    """
    if size == 1:
        # One rank needs no launcher.
        alone = dist.HashStore()
        return alone, alone
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return store, dist.PrefixStore(f"restart {restarts}, round {store.add(_ROUND, 0)}", store)


def finish_round(store: dist.Store) -> None:
    """End the rendezvous round, so that later processes do not read this round's keys; one rank calls it."""
    store.add(_ROUND, 1)


def connect(timeout: timedelta = timedelta(seconds=300)) -> dist.Store:
    """Open another connection to this launch's store, for another thread."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)


def first_of_launch(name: str, value: str) -> tuple[str, bool]:
    """The first value given under a name since torchrun started, and whether earlier processes gave it.

    Without torchrun it is `value`. One rank calls this.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return value, False
    first = connect().compare_set(f"pycls_fast/{name}", "", value).decode()
    return first, first != value
