"""Rendezvous: the key-value store through which ranks find each other. It outlives processes that torchrun restarts."""

from __future__ import annotations

import os
import secrets
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

_CURRENT = "pycls_fast/round"
# Seconds between a rank's looks for the current round, at first and later.
_PAUSE, _LONG_PAUSE = 0.05, 0.5
# The latest round of this process.
_round: str | None = None


def open_store(rank: int, size: int, timeout: timedelta) -> dist.Store:
    """A part of the launch's store that only the current processes use.

    torchrun's agents keep one store for all their attempts (torch 2.11 to 2.15), so that keys of earlier processes are
    still there: gloo would try to connect to dead ranks. Nothing in the environment names an attempt: each agent counts
    only the failures of its own ranks. So the ranks meet in a round that rank 0 names.

    Args:
        rank, size: this process among all.
        timeout: how long to wait for the other ranks.

    Raises:
        torch.distributed.DistStoreError: not all ranks came.
    """
    if size == 1:
        # One rank needs no launcher.
        return dist.HashStore()
    global _round
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    _round = meet(store, rank, size, timeout)
    return dist.PrefixStore(_round, store)


def attempt() -> str:
    """A name of the current processes for keys of the launch's store: their round; before they meet, a count.

    The count is the agent's, and those of different nodes may count differently (see `open_store`).
    """
    return _round or f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def meet(store: dist.Store, rank: int, size: int, timeout: timedelta) -> str:
    """Wait until all ranks are here; returns the name of their round, which no other round has.

    Every process brings a random token. Rank 0 publishes its own as the current round's name, waits for a token of
    every other rank under that name, and publishes them; a rank has met the others when its own token is among them.
    Until then the current round may be one of earlier processes.
    """
    token = secrets.token_hex(8)
    if rank == 0:
        store.set(_CURRENT, token)
        for other in range(1, size):
            _wait_for(other, store, _token_key(token, other), timeout)
        others = [store.get(_token_key(token, other)).decode() for other in range(1, size)]
        store.set(_members_key(token), " ".join(others))
        return token
    deadline, pause, told = time.monotonic() + timeout.total_seconds(), _PAUSE, ""
    _wait_for(0, store, _CURRENT, timeout)
    while time.monotonic() < deadline:
        current = store.get(_CURRENT).decode()
        if current != told:
            store.set(_token_key(current, rank), token)
            told = current
        if store.check([_members_key(current)]) and token in store.get(_members_key(current)).decode().split():
            return current
        time.sleep(pause)
        pause = min(2 * pause, _LONG_PAUSE)
    raise dist.DistStoreError(f"waited {timeout.total_seconds():g} s for the other ranks")


def _wait_for(rank: int, store: dist.Store, key: str, timeout: timedelta) -> None:
    """Wait until a rank has set a key."""
    try:
        store.wait([key], timeout)
    except dist.DistStoreError as error:
        raise dist.DistStoreError(f"waited {timeout.total_seconds():g} s for rank {rank}") from error


def _token_key(name: str, rank: int) -> str:
    return f"{_CURRENT} {name}/{rank}"


def _members_key(name: str) -> str:
    return f"{_CURRENT} {name}/members"


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
