"""`--help` of a tool."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
from pathlib import Path

import pytest

from pycls_fast.config.help import help_text
from tests.integration.runs import ROOT, command, environment, run_process
from tests.unit.config.conftest import Tool


def test_help_lists_experiments_groups_and_the_tools_own_keys(tmp_path: Path) -> None:
    text = run_process(command("--help", tool="test_net", config_name=None), cwd=tmp_path).stdout
    for file in (ROOT / "configs").glob("*.yaml"):
        assert file.stem in text
    for group in (ROOT / "configs").iterdir():
        if group.is_dir():
            assert group.name in text
    assert "split=val" in text
    assert "Evaluate a checkpoint" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["knn_net", "ledger", "lr_find", "prepare_data", "test_net", "time_net"])
def test_what_help_prints_can_be_typed(tool: Tool, name: str) -> None:
    """Each key with its default."""
    options = importlib.import_module(f"tools.{name}").Options
    printed = re.findall(r"^  (\w+=\S+)", help_text("", options, []).partition("\nexperiments")[0], flags=re.MULTILINE)
    assert len(printed) == len(options.model_fields)
    status, lines, calls = tool(*printed, options=options)
    assert (status, lines) == (0, [])
    assert calls[0][1] == options()


@pytest.mark.parametrize(("tool", "page"), [("model_zoo", "MODEL_ZOO.md"), ("switch_cards", "switches.md")])
def test_help_of_a_tool_that_writes_a_page_writes_nothing(tmp_path: Path, tool: str, page: str) -> None:
    before = (ROOT / "docs" / page).stat().st_mtime_ns
    done = run_process(command("--help", tool=tool, config_name=None), cwd=tmp_path)
    assert done.stdout.startswith(f"Write `docs/{page}`")
    assert "--helpp" in run_process(command("--helpp", tool=tool, config_name=None), cwd=tmp_path, expect=2).stderr
    assert (ROOT / "docs" / page).stat().st_mtime_ns == before


@pytest.mark.parametrize("tool", ["train_net", "predict"])
def test_a_reader_who_has_seen_enough_of_help_is_no_fault(tmp_path: Path, tool: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            command("--help", tool=tool, config_name=None),
            cwd=tmp_path,
            env=environment(),
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
