"""`--help` of a tool."""

from __future__ import annotations

from pathlib import Path

from tests.integration.runs import ROOT, command, run_process


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
