"""What processes exchange through the launch's key-value store, which outlives the processes that torchrun restarts."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from pycls_fast.errors import UserError, first_line, printable

_CURRENT = "pycls_fast/round"
# After this long, a user wants to know what a rank is waiting for.
_NOTE_SECONDS = 10.0
# The latest round of this process.
_round: str | None = None


def open_store(rank: int, size: int, timeout: timedelta) -> dist.Store:
    """A part of the launch's store that only the current processes use.

    torchrun's agents keep one store for all their attempts (torch 2.11 to 2.15), so that keys of earlier processes are
    still there: gloo would try to connect to dead ranks. Nothing in the environment names an attempt: each agent counts
    only the failures of its own ranks. So the ranks meet in a round that rank 0 names.

    Raises:
        torch.distributed.DistStoreError: not all ranks came within the timeout.
    """
    if size == 1:
        # One rank needs no launcher.
        return dist.HashStore()
    global _round
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    line = f"note: rank {rank} of {size} waits for the others at {where}, for up to {timeout.total_seconds():g} s"
    note = threading.Timer(_NOTE_SECONDS, print, [line], {"file": sys.stderr, "flush": True})
    note.start()
    try:
        _await_master(rank, timeout)
        store, _, _ = next(rendezvous("env://", timeout=timeout))
        _round = meet(store, rank, size, timeout)
    finally:
        note.cancel()
    store.set_timeout(timeout)
    return dist.PrefixStore(_round, store)


def _await_master(rank: int, timeout: timedelta) -> None:
    """Wait until something listens at the master's address: torch prints fifty C++ functions for each failure."""
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        # This rank opens the store.
        return
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    until = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            socket.create_connection((host, port), timeout=10).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                reason = f"waited {timeout.total_seconds():g} s for {host}:{port}: {first_line(error)}"
                raise dist.DistStoreError(reason) from error
            time.sleep(0.2)


def meet(store: dist.Store, rank: int, size: int, timeout: timedelta) -> str:
    """Wait until all ranks are here; returns the name of their round, which no other round has.

    Every process brings a random token. Rank 0 publishes its own as the current round's name, waits for a token of
    every other rank under that name, and publishes them; a rank has met the others when its own token is among them.
    Until then the current round may be one of earlier processes.
    """
    token = secrets.token_hex(8)
    if rank == 0:
        store.set(_CURRENT, token)
        others = [f"{_CURRENT} {token}/rank {other}" for other in range(1, size)]
        store.wait(others, timeout)
        store.set(f"{_CURRENT} {token}/members", " ".join(store.get(key).decode() for key in others))
        return token
    deadline, pause = time.monotonic() + timeout.total_seconds(), 0.05
    store.wait([_CURRENT], timeout)
    while time.monotonic() < deadline:
        current = store.get(_CURRENT).decode()
        members = f"{_CURRENT} {current}/members"
        store.set(f"{_CURRENT} {current}/rank {rank}", token)
        if store.check([members]) and token in store.get(members).decode().split():
            return current
        time.sleep(pause)
        pause = min(1.5 * pause, 0.5)
    raise dist.DistStoreError(f"waited {timeout.total_seconds():g} s for the other ranks")


def connect(timeout: timedelta = timedelta(seconds=300)) -> dist.Store:
    """Open another connection to this launch's store, for another thread."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)


# How often this process has asked for the first value of a name.
_asked: Counter[str] = Counter()


def first_of_launch(name: str, value: str) -> tuple[str, bool]:
    """The first value given under a name since torchrun started, and whether earlier processes gave it.

    If this process asks again it is the first value of the second time, and so on: equal runs of a sweep differ, and
    processes that are started again ask in the same order. Without torchrun it is `value`. One rank calls this.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return value, False
    _asked[name] += 1
    first = connect().compare_set(f"pycls_fast/{name}/{_asked[name]}", "", value).decode()
    return first, first != value


# Time for the node's first rank to hit the same error, as it usually does: most errors are in what all ranks are given.
_PATIENCE = timedelta(seconds=5)


def report_mistake(error: UserError, patience: timedelta = _PATIENCE) -> bool:
    """Print the error unless the node's first rank, which prints its own errors, has hit the same one.

    Call this before the other ranks can notice that this one leaves: then they end, and the launcher ends this one. If
    the store cannot be reached, every rank prints: better twice than never.

    Returns whether all ranks have hit this error, within `patience`.
    """
    rank, local_rank, size = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    if size < 2:
        return True
    # The round names these processes; before they meet, the agent's count does, which may differ between nodes.
    attempt = _round or f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    text = hashlib.sha256("\n".join(error.lines).encode()).hexdigest()
    everywhere = f"pycls_fast/mistake/{attempt}/{text}"
    here = f"{everywhere}/node {os.environ.get('GROUP_RANK', '0')}"
    try:
        store = connect(patience)
        if local_rank == 0:
            store.set(here, "told")
        # A sweep's next run may hit it again.
        arrived = store.add(f"{everywhere}/ranks", 1)
        everyone = f"{everywhere}/all {(arrived - 1) // size}"
        if arrived % size == 0:
            store.set(everyone, "here")
        with suppress(dist.DistStoreError):
            store.wait([everyone], patience)
            return True
        is_told = store.check([here])
    except dist.DistError:
        is_told = False
    if local_rank > 0 and not is_told:
        lines = (printable(f"error: rank {rank}: {line}") for line in error.lines)
        print(*lines, sep="\n", file=sys.stderr, flush=True)
    return False


def lost_ranks(error: BaseException) -> str | None:
    """torch's message if the error means that another rank is gone or does not answer; None for any other error."""
    text = str(error)
    is_lost = isinstance(error, dist.DistError) or "gloo" in text or "NCCL" in text
    return first_line(error) if is_lost else None
