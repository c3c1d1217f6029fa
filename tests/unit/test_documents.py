"""What DESIGN.md and CONTRIBUTING.md say of the repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_design_names_every_folder_of_tests() -> None:
    (told,) = re.findall(r"^tests/ +(.*?)^\w", text("DESIGN.md"), flags=re.MULTILINE | re.DOTALL)
    there = {folder.name for folder in (ROOT / "tests").iterdir() if folder.is_dir() and folder.name != "__pycache__"}
    # Folders in parentheses are inside of the one before.
    assert set(re.findall(r"(\w+)/", re.sub(r"\([^)]*\)", "", told))) == there


@pytest.mark.parametrize("document", ["DESIGN.md", "CONTRIBUTING.md"])
def test_files_that_are_named_exist(document: str) -> None:
    named = set(re.findall(r"`([\w/]+/\w+\.(?:py|md|json))`", text(document)))
    assert len(named) > 5
    folders = (ROOT, ROOT / "pycls_fast")
    missing = {name for name in named if not any((folder / name).is_file() for folder in folders)}
    # Where something new goes.
    assert {name for name in missing if not name.endswith("/NAME.py")} == set()
