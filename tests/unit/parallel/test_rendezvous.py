"""Ranks meet in a round of their own, whatever earlier processes have left in the launcher's store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from pycls_fast.parallel.rendezvous import meet

SHORT = timedelta(seconds=1)
LONG = timedelta(seconds=20)


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("localhost", 0, is_master=True, timeout=SHORT, wait_for_workers=False)


def client(store: dist.TCPStore, timeout: timedelta) -> dist.Store:
    """A connection of its own, as each process has one: a waiting one blocks others."""
    return dist.TCPStore("localhost", store.port, is_master=False, timeout=timeout, wait_for_workers=False)


def all_meet(store: dist.TCPStore, size: int) -> set[str]:
    """The rounds in which the ranks find themselves; rank 0 comes last, when the others have seen what is old."""
    with ThreadPoolExecutor(size) as pool:
        later = [pool.submit(meet, client(store, LONG), rank, size, LONG) for rank in reversed(range(size))]
        return {future.result(timeout=30) for future in later}


def test_each_round_has_its_own_name(store: dist.TCPStore) -> None:
    """One process after the other, as in a sweep, and with another number of ranks, as after the loss of a node."""
    rounds = [all_meet(store, size) for size in (3, 3, 2, 4, 4)]
    assert all(len(names) == 1 for names in rounds)
    assert len(set.union(*rounds)) == 5


@pytest.mark.slow
def test_a_round_that_ranks_of_an_earlier_attempt_did_not_finish_is_left(store: dist.TCPStore) -> None:
    with ThreadPoolExecutor(2) as pool:
        # Rank 2 died before it came.
        died = [pool.submit(meet, client(store, SHORT), rank, 3, SHORT) for rank in (0, 1)]
    assert [type(future.exception()) for future in died] == [dist.DistStoreError] * 2
    assert str(died[0].exception()) == "waited 1 s for rank 2"
    old = store.get("pycls_fast/round")
    (name,) = all_meet(store, 3)
    assert name != old.decode()


@pytest.mark.slow
def test_a_rank_that_waits_in_vain_says_so(store: dist.TCPStore) -> None:
    all_meet(store, 2)
    with pytest.raises(dist.DistStoreError, match=r"waited 1 s for the other ranks"):
        meet(client(store, SHORT), 1, 2, SHORT)
