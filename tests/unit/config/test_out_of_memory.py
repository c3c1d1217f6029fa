"""A device without memory left is one line from every tool, not a traceback."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

from pycls_fast.config import Section, command_line

FULL = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.72 GiB of which 2.10 GiB is "
    "free. Including non-PyTorch memory, this process has 137.60 GiB memory in use."
)
SAYS = "the device is out of memory (CUDA out of memory. Tried to allocate 20.00 GiB); lower"


class Options(Section):
    """Of a tool that scores images."""

    batch_size: int = 64


def full(*_: Any) -> NoReturn:
    raise torch.OutOfMemoryError(FULL)


def broken(*_: Any) -> NoReturn:
    raise RuntimeError("ours")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("sys.argv", ["tool.py"])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    GlobalHydra.instance().clear()


@pytest.mark.parametrize(
    ("run", "line"),
    [
        (full, f"error: {SAYS} the batch size or the model\n"),
        (lambda _: torch.empty(2**60), "error: the device is out of memory (can't allocate memory"),
    ],
)
def test_it_is_one_line(capsys: pytest.CaptureFixture[str], run: Any, line: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        command_line(run, default=None, options=Options)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith(line)


def test_each_rank_that_meets_with_it_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory may be full on one GPU alone."""
    for name, value in {
        "RANK": "9",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "16",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        command_line(full, default=None, options=Options)
    assert capsys.readouterr().err.startswith(f"error: rank 9: {SAYS}")


def test_other_errors_are_ours() -> None:
    with pytest.raises(RuntimeError, match="ours"):
        command_line(broken, default=None, options=Options)
