"""What the documents say of the repository: links lead somewhere, named files exist, commands compose."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pycls_fast.config import Purpose
from tests.integration.runs import run_process
from tests.unit.conftest import Tool
from tools import model_zoo

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    str(page.relative_to(ROOT))
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "data/README.md", ROOT / "tests/README.md")
)
WITH_COMMANDS = ("README.md", "docs/running.md", "docs/zoo.md")
TRAIN = "tools/train_net.py"


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_links_and_named_files_are_there(page: str) -> None:
    here = (ROOT / page).parent
    linked = [name for name in re.findall(r"\]\(([^):#]+)[^)]*\)", text(page)) if "://" not in name]
    assert [name for name in linked if not (here / name).exists()] == []
    # LOG.md tells of what was.
    named = re.findall(r"`([\w/]+/\w+\.(?:py|c))`", text(page)) if page != "LOG.md" else []
    folders = (ROOT, ROOT / "pycls_fast", ROOT / "tests")
    assert [name for name in named if not any((folder / name).is_file() for folder in folders)] == []


def trainings() -> Iterator[str]:
    """What follows the tool's name in each command that trains."""
    whole = "\n".join(map(text, WITH_COMMANDS))
    for _, block in re.findall(r"^```(\w*)\n(.*?)^```$", whole, flags=re.MULTILINE | re.DOTALL):
        for line in re.sub(r"\\\n *", "", block).splitlines():
            if found := re.match(rf"((?:python|torchrun) .*{TRAIN}|pycls-fast train) ", line):
                yield line[found.end() :].partition("  #")[0].strip()


@pytest.mark.slow
@pytest.mark.parametrize("typed", list(trainings()))
def test_a_command_composes(typed: str, tool: Tool, tmp_path: Path) -> None:
    (own,) = re.findall(r"^```yaml\n# (\S+)\n(.*?)^```", text("docs/running.md"), flags=re.MULTILINE | re.DOTALL)
    (tmp_path / own[0]).parent.mkdir()
    (tmp_path / own[0]).write_text(own[1])
    (tmp_path / "my_images").mkdir()
    # Nothing is to be queued.
    arguments = [part.replace("...", "/x") for part in shlex.split(typed) if not part.startswith("hydra")]
    if "imports=" in typed:
        # In a process of its own: what registers itself stays.
        for name, block in (("my_optim", text("README.md")), ("my_models", text("docs/running.md"))):
            (module,) = re.findall(rf"^```python\n# {name}.py\n(.*?)^```", block, flags=re.MULTILINE | re.DOTALL)
            (tmp_path / f"{name}.py").write_text(module)
        run_process([sys.executable, str(ROOT / TRAIN), *arguments, "--cfg", "job"], cwd=tmp_path)
        return
    status, lines, calls = tool(*arguments, experiment="", purpose=Purpose(trains=True))
    # No mistake, and no note of values that were meant for another optimizer.
    assert (status, lines) == (0, [])
    assert calls


def test_the_mistakes_are_told_as_shown(tool: Tool) -> None:
    pattern = rf"^\$ python {TRAIN} (.*)\n((?:error: .*\n)+)"
    ((typed, shown),) = re.findall(pattern, text("README.md"), flags=re.MULTILINE)
    assert tool(*shlex.split(typed))[:2] == (2, shown.splitlines())


@pytest.mark.slow
def test_the_zoo_is_what_its_tool_writes() -> None:
    measured = json.loads(model_zoo.MEASURED.read_text(encoding="utf-8"))
    assert model_zoo.PAGE.read_text(encoding="utf-8") == model_zoo.page(measured), "run: python tools/model_zoo.py"
    # Beside the paper's score at 224 px.
    assert "(81.24 at 288 px)" in model_zoo.page(measured)
