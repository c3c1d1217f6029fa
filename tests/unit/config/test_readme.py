"""The commands of README.md and of the pages it leads to: they compose, and mean what the text around them says."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra

from pycls_fast.config import Purpose, RunConfig, command_line
from pycls_fast.config.locations import CONFIGS
from pycls_fast.optim.choices import Optimizer as Chosen

PAGES = {
    name: (CONFIGS.parent / name).read_text(encoding="utf-8")
    for name in ("README.md", "docs/running.md", "docs/cluster.md")
}
README = PAGES["README.md"]
TRAIN = "tools/train_net.py"


def trainings() -> Iterator[str]:
    """What follows the tool's name in each command that trains, in all pages."""
    for _, block in re.findall(r"^```(\w*)\n(.*?)^```$", "\n".join(PAGES.values()), flags=re.MULTILINE | re.DOTALL):
        for line in re.sub(r"\\\n *", "", block).splitlines():
            if re.match(r"(python|torchrun) .*train_net", line):
                yield line.partition(TRAIN)[2].partition("  #")[0].strip()


@pytest.fixture(autouse=True)
def forget_hydra() -> Iterator[None]:
    yield
    GlobalHydra.instance().clear()


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[object, list[RunConfig]]:
    """Exit status, and the configurations that would have been trained."""
    configs: list[RunConfig] = []

    def main(config: RunConfig, options: Any) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr("sys.argv", [TRAIN, *arguments])
    with pytest.raises(SystemExit) as stopped:
        command_line(main, purpose=Purpose(trains=True))
    return stopped.value.code, configs


@pytest.mark.slow
@pytest.mark.parametrize("typed", list(trainings()))
def test_a_command_composes(
    typed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (own,) = re.findall(r"^```yaml\n# (\S+)\n(.*?)^```", PAGES["docs/running.md"], flags=re.MULTILINE | re.DOTALL)
    (tmp_path / own[0]).parent.mkdir()
    (tmp_path / own[0]).write_text(own[1])
    # Nothing is to be queued.
    arguments = [part.replace("...", "/x") for part in shlex.split(typed) if not part.startswith("hydra")]
    status, configs = run(arguments, monkeypatch)
    # No mistake, and no note of values that were meant for another optimizer.
    assert (status, capsys.readouterr().err) == (0, "")
    assert configs


def test_the_mistakes_are_told_as_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ((typed, shown),) = re.findall(rf"^\$ python {TRAIN} (.*)\n((?:error: .*\n)+)", README, flags=re.MULTILINE)
    assert run(shlex.split(typed), monkeypatch)[0] == 2
    assert capsys.readouterr().err == shown


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page: str) -> None:
    root = CONFIGS.parent
    for name in re.findall(r"\]\(([^):]+)\)", PAGES[page]):
        assert (root / page).parent.joinpath(name).exists(), name
    for name in re.findall(r"`((?:docs|pycls_fast)/\S+\.\w+)`|(tools/\w+\.py)", PAGES[page]):
        assert (root / "".join(name)).is_file(), name


def rows() -> dict[str, str]:
    """The choices that the table of groups names, by group."""
    _, _, table = README.partition("| group | choices, among others |\n|---|---|\n")
    return dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", table.partition("\n\n")[0], flags=re.MULTILINE))


def test_every_group_is_in_the_table_of_groups() -> None:
    # The ledger's ladders are no group, and runtime has one file.
    groups = {file.parent.name for file in CONFIGS.glob("*/*.yaml")} - {"ladder", "runtime"}
    assert rows().keys() == groups


def expanded(name: str) -> list[str]:
    """What a shell makes of braces."""
    begin, found, rest = re.match(r"([^{]*)(?:\{([^}]*)\})?(.*)$", name).groups()  # type: ignore[union-attr]
    if found is None:
        return [begin]
    return [begin + choice + end for choice in found.split(",") for end in expanded(rest)]


def test_the_choices_in_the_table_of_groups_exist() -> None:
    for group, choices in rows().items():
        named = [name for text in re.findall(r"`([\w{},*]+)`", choices) for name in expanded(text)]
        assert named
        assert [name for name in named if not list((CONFIGS / group).glob(f"{name}.yaml"))] == []


@pytest.mark.parametrize("group", ["optim", "precision", "parallel"])
def test_a_group_that_is_listed_in_full_names_every_choice(group: str) -> None:
    for file in (CONFIGS / group).glob("*.yaml"):
        assert f"`{file.stem}`" in rows()[group]


def test_the_pages_name_the_optimizers_of_each_strategy() -> None:
    named = [f"`{name}`" for name, facts in Chosen.choices().items() if facts.shardable]
    assert f"Optimizers under `fsdp` and `hsdp`: {', '.join(named)}." in PAGES["docs/cluster.md"]
    (unsent,) = [name for name, facts in Chosen.choices().items() if not facts.sends_state]
    assert f"any\n  optimizer but `{unsent}`," in PAGES["docs/cluster.md"]
