"""Which rank waited for what: said once, and only when ranks wait for each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from pycls_fast.parallel.monitor import Monitor


class Rank:
    """A monitored thread that plays a rank's main thread."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        self.ended = threading.Event()
        self.monitor = Monitor(store, rank, size, timeout_seconds=timeout, end=self.end)

    def end(self) -> None:
        self.ended.set()
        self.monitor._stop.set()


@contextmanager
def ranks(size: int, timeout: float) -> Iterator[list[Rank]]:
    store = dist.HashStore()
    made = [Rank(store, rank, size, timeout) for rank in range(size)]
    with ExitStack() as stack:
        for rank in made:
            stack.enter_context(rank.monitor)
        yield made


@pytest.mark.slow
def test_ranks_at_different_places_are_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    with ranks(3, timeout=0.6) as (first, second, third):
        for rank in (first, third):
            rank.monitor.at("computing step 7")
        second.monitor.at("waiting for the data of step 7")
        for rank in (first, second, third):
            assert rank.ended.wait(20)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("error: parallel.timeout_seconds: ranks have waited for others for 0.6 s")
    assert "rank 0: for " in lines[1]
    assert ": computing step 7, in " in lines[1]
    assert ": waiting for the data of step 7, in " in lines[2]


@pytest.mark.slow
def test_ranks_that_get_on_and_ranks_that_all_compute_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Also if the monitor is stopped while it listens, for four beats, again and again."""
    with ranks(2, timeout=0.6) as both:
        for step in range(10):
            for rank in both:
                rank.monitor.at(f"computing step {step}")
            time.sleep(0.1)
        # All at the same place for longer than the timeout: compiling, perhaps.
        time.sleep(1.5)
        assert not any(rank.ended.is_set() for rank in both)
    assert not any(rank.ended.is_set() for rank in both)
    assert capsys.readouterr().err == ""


def wait_for_others(rank: Rank, seconds: float, file: str = "torch/distributed/waits.py") -> threading.Thread:
    """Let the rank's main thread, for this time, be in a function that the monitor takes for a collective one."""
    functions: dict[str, Callable[[float], None]] = {}
    code = "import time\ndef all_reduce(seconds):\n    time.sleep(seconds)"
    exec(compile(code, file, "exec"), functions)
    thread = threading.Thread(target=functions["all_reduce"], args=(seconds,), daemon=True)
    thread.start()
    assert thread.ident is not None
    rank.monitor._main = thread.ident
    return thread


def test_a_wait_longer_than_the_timeout_ends_all_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    with ranks(2, timeout=0.6) as (first, second):
        wait_for_others(first, 60)
        assert first.ended.wait(20)
        assert second.ended.wait(20)
    assert "starting, in all_reduce (torch/distributed/waits.py:3), waiting for other ranks" in capsys.readouterr().err


@pytest.mark.slow
def test_ranks_wait_for_a_slow_one_that_makes_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with ranks(2, timeout=0.6) as (first, second):
        first.monitor.at("evaluating: 3 batches done")
        wait_for_others(first, 60)
        for batch in range(20):
            second.monitor.at(f"evaluating: {batch} batches done")
            time.sleep(0.1)
        assert not first.ended.is_set()
        assert not second.ended.is_set()
    assert capsys.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.parametrize("waiting", [False, True])
def test_a_rank_that_has_left_is_missed_only_by_those_who_wait(
    waiting: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with ranks(2, timeout=0.4) as (first, second):
        first.monitor.at("writing scores")
        second.monitor.__exit__(None)
        if waiting:
            wait_for_others(first, 60)
            assert first.ended.wait(20)
            assert "rank 1: has left the run" in capsys.readouterr().err
        else:
            # It reads a checkpoint alone.
            wait_for_others(first, 60, "torch/distributed/checkpoint/filesystem.py")
            time.sleep(3.0)
            assert not first.ended.is_set()


@pytest.mark.slow
def test_a_rank_that_says_nothing_any_more_is_called_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with ranks(2, timeout=0.4) as (first, second):
        # Stopped as a whole (SIGSTOP, a machine that is gone): its monitor beats no more.
        time.sleep(0.2)
        second.monitor._stop.set()
        assert first.ended.wait(20)
    assert "rank 1: no sign of life; last seen at: starting" in capsys.readouterr().err


def test_a_lost_connection_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(key: str, value: str) -> None:
        raise dist.DistNetworkError("Connection reset by peer")

    store: Any = SimpleNamespace(set=refuse)
    with Monitor(store, 0, 1, timeout_seconds=2.0) as monitor:
        monitor._thread.join(20)
        assert not monitor._thread.is_alive()
    said = capsys.readouterr().err
    assert said.startswith("note: rank 0 has lost its connection to the other ranks' monitors (Connection reset by ")
