"""Ranks meet in a round of their own, whatever earlier processes left in the launcher's store; who tells a mistake."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from pycls_fast.errors import UserError
from pycls_fast.parallel import rendezvous
from pycls_fast.parallel.rendezvous import meet, report_mistake

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
    assert str(died[0].exception()).endswith("/rank 2")
    old = store.get("pycls_fast/round")
    (name,) = all_meet(store, 3)
    assert name != old.decode()


@pytest.mark.slow
def test_a_rank_that_waits_in_vain_says_so(store: dist.TCPStore) -> None:
    all_meet(store, 2)
    with pytest.raises(dist.DistStoreError, match=r"waited 1 s for the other ranks"):
        meet(client(store, SHORT), 1, 2, SHORT)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """What a rank of two nodes prints when it meets with a mistake, after all that were asked before it."""

    def ask(rank: int, *lines: str) -> list[str]:
        for name, value in {"RANK": rank, "LOCAL_RANK": rank % 4, "GROUP_RANK": rank // 4}.items():
            monkeypatch.setenv(name, str(value))
        report_mistake(UserError(*lines), timedelta(seconds=0.2))
        return capsys.readouterr().err.splitlines()

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("WORLD_SIZE", "8")
    return ask


@pytest.mark.slow
def test_the_first_rank_of_a_node_speaks_for_those_with_the_same_lines(
    told: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    # The command line prints those of rank 0, whatever they are.
    assert told(0, "the batch", "the data") == []
    assert told(1, "the batch", "the data") == []
    # What rank 0 has not said is said once.
    assert told(2, "the disk", "the fan") == ["error: rank 2: the disk", "error: rank 2: the fan"]
    assert told(3, "the disk", "the fan") == []
    assert told(1, "the memory") == ["error: rank 1: the memory"]
    # Another node hears nothing of it.
    assert told(5, "the batch", "the data") == ["error: rank 5: the batch", "error: rank 5: the data"]
    # After a restart it is told again.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert told(2, "the disk") == ["error: rank 2: the disk"]
    # The ranks' own name of their round counts: agents may count differently.
    monkeypatch.setattr(rendezvous, "_round", "a round")
    assert told(3, "the disk") == ["error: rank 3: the disk"]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert told(2, "the disk") == []
