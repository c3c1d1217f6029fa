"""A device without memory left is one line from every tool, not a traceback."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

from pycls_fast.config import NoOptions, Section, command_line
from pycls_fast.errors import OUT_OF_MEMORY

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
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    GlobalHydra.instance().clear()


def test_of_tools_with_a_configuration(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["tool.py", "data=synthetic"])
    with pytest.raises(SystemExit) as stopped:
        command_line(full, options=NoOptions)
    assert stopped.value.code == 2
    line = f"error: {SAYS} data.global_batch_size or data.eval_batch_size, or the model\n"
    assert capsys.readouterr().err == line
    assert OUT_OF_MEMORY in line


@pytest.mark.parametrize(("options", "batch"), [(Options, "batch_size"), (NoOptions, "the batch")])
def test_of_tools_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: type[Section], batch: str
) -> None:
    monkeypatch.setattr("sys.argv", ["tool.py"])
    with pytest.raises(SystemExit) as stopped:
        command_line(full, default=None, options=options)
    assert (stopped.value.code, capsys.readouterr().err) == (2, f"error: {SAYS} {batch}, or the model\n")


def test_on_a_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["tool.py"])
    with pytest.raises(SystemExit) as stopped:
        command_line(lambda _: torch.empty(2**60).ndim, default=None, options=Options)
    assert stopped.value.code == 2
    assert "the device is out of memory (can't allocate memory: you tried to" in capsys.readouterr().err


def test_each_rank_that_meets_with_it_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory may be full on one GPU alone."""
    for name, value in (("RANK", "9"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "16")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["tool.py"])
    with pytest.raises(SystemExit):
        command_line(full, default=None, options=Options)
    assert capsys.readouterr().err.startswith(f"error: rank 9: {SAYS}")


def test_other_errors_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["tool.py"])
    with pytest.raises(RuntimeError, match="ours"):
        command_line(broken, default=None, options=Options)
