"""Which rank tells a mistake."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from pycls_fast.errors import UserError
from pycls_fast.parallel import rendezvous
from pycls_fast.parallel.launch import report_mistake


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
