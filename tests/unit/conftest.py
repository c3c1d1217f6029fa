"""What the tests of the command line share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra

from pycls_fast.config import RunConfig, Section, Verb, command_line

Tool = Callable[..., tuple[int, list[str], list[tuple[RunConfig, Any]]]]


class Options(Section):
    """What a tool could ask for."""

    split: str = "val"
    steps: int = 3


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Tool]:
    """Runs a tool in this process: status, lines on standard error, and what it was called with."""
    monkeypatch.chdir(tmp_path)

    def run(
        *arguments: str, options: type[Section] = Options, **settings: Any
    ) -> tuple[int, list[str], list[tuple[RunConfig, Any]]]:
        calls: list[tuple[RunConfig, Any]] = []

        class Called(options, Verb, **{"experiment": "vit_digits", "words": (), **settings}):  # type: ignore[misc, valid-type]
            def __call__(self, config: RunConfig) -> int:
                calls.append((config, self))
                return 0

        monkeypatch.setattr("sys.argv", ["tool.py", *arguments])
        with pytest.raises(SystemExit) as stopped:
            command_line(Called)
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, capsys.readouterr().err.splitlines(), calls

    yield run
    GlobalHydra.instance().clear()
