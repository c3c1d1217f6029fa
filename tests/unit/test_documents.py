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


def test_contributing_names_what_the_code_has() -> None:
    """Names in capitals, and private functions, stay where the list of things to add says that they are."""
    places = {
        "build/network.py": ["_model("],
        "build/optimization.py": ["_MAKE"],
        "data/sources/opening.py": ["_OPEN", "def recognise("],
        "train/same_model.py": ["_now("],
        "speed/optimizers.py": ["OPTIMIZERS"],
        "parallel/wrap.py": ["IMPLEMENTATIONS"],
        "config/schema/network.py": ["class _Model("],
        "config/schema/optimization.py": ["class _Optim(", "Optim = "],
        "config/schema/execution.py": ["class Speed(", "class Parallel("],
        "network.py": ["class Network(", "def units(", "def initialisers(", "def head_name(", "def first_conv_name("],
    }
    for file, names in places.items():
        assert f"`{file}`" in text("CONTRIBUTING.md")
        code = text(f"pycls_fast/{file}")
        assert [name for name in names if name not in code] == [], file
