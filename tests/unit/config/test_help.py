"""`--help` of a tool."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pycls_fast.choice import Section
from pycls_fast.cli import VERBS, find_verb
from pycls_fast.config.help import descriptions, help_of_key, help_text
from pycls_fast.config.keys import CONFIGS
from pycls_fast.config.messages import known_keys, section_keys
from pycls_fast.config.run import RunConfig
from tests.integration.runs import command, run_process
from tests.unit.conftest import Tool

TOOLS = ["knn", "ledger", "lr-find", "prepare", "test", "time"]


def test_help_lists_experiments_groups_and_the_tools_own_keys(tmp_path: Path) -> None:
    text = run_process(command("--help", tool="test_net", config_name=None), cwd=tmp_path).stdout
    for name in ("vit_digits", "vit_h16", "augment", "adamw", "resnext50_32x4d", "fp16_master"):
        assert name in text
    assert "split=val" in text
    assert "Evaluate a checkpoint" in text
    # The tool's own keys are what remains on the screen.
    assert re.search(r"^  preprocessing=weights  \S", text.partition("adds a folder")[2], flags=re.MULTILINE)
    assert len(text.splitlines()) < 60
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", TOOLS)
def test_what_help_prints_can_be_typed(tool: Tool, name: str) -> None:
    """Each key with its default."""
    options = find_verb(name)
    page = help_text(options, [CONFIGS]).rpartition("adds a folder")[2]
    printed = re.findall(r"^  (\w+=\S+)", page, flags=re.MULTILINE)
    assert len(printed) == len(options.model_fields)
    weights = ["weights=timm:NAME"] if options.purpose.scores else []
    status, lines, calls = tool(*printed, *weights, options=options)
    assert (status, lines) == (0, [])
    assert dict(calls[0][1]) == dict(options())


@pytest.mark.parametrize(
    ("word", "lines"),
    [
        ("optim.lr", ["optim.lr  number greater than 0\n  The learning rate after the warm-up.$"]),
        ("momentum", [
            "optim.momentum=0.9  number at least 0 and less than 1  (only sgd, adafactor)",
            "optim.momentum=0.95  number at least 0 and less than 1  (only muon)",
        ]),
        ("schedule.epochs", ["schedule.epochs=100  auto, or a whole number greater than 0"]),
        ("augment.scale", ["augment.scale=[0.08,1.0]  list of 2: number greater than 0"]),
        ("augment.policy", [
            "augment.policy.num_ops=2  whole number greater than 0  (only rand_augment, timm_rand_augment)",
        ]),
        ("model=vit_b16", ["model=vit: Vision Transformer (Dosovitskiy et al., 2021)", "model.patch_size=16  whole"]),
        ("speed.qkv", ["speed.qkv=separate  one of separate, fused", "  Queries, keys and values by"]),
        ("schedule", ["Learning rate per step: a linear warm-up, then a curve.", "schedule.max_steps=null  whole"]),
    ],
)  # fmt: skip
def test_a_key_is_described(word: str, lines: list[str]) -> None:
    text = help_of_key(word, Section, 120)
    for line in lines:
        pattern = re.escape(line.removesuffix("$")) + ("$" if line.endswith("$") else "")
        assert re.search(rf"^{pattern}", text, flags=re.MULTILINE), text


def test_every_key_is_described() -> None:
    for key in known_keys(RunConfig):
        text = help_of_key(key, Section, 80)
        # `None` and types of Python are not what is typed.
        assert not re.search(r"None|<class|typing|Annotated|Attributes", text), text
        assert text.startswith(key) or f"\n{key}." in text


@pytest.mark.parametrize("name", [None, *VERBS])
def test_every_key_has_a_description(name: str | None) -> None:
    """The string after a field, which `--help KEY` prints."""
    sections: list[type[Section]] = [RunConfig if name is None else find_verb(name)]
    for section in sections:
        for key in section.model_fields:
            inner = section_keys(section)[key]
            sections += inner
            if not inner:
                assert descriptions(section)[key], f"{section.__name__}.{key}"
                assert descriptions(section)[key].endswith("."), f"{section.__name__}.{key}"


def test_help_of_words(tool: Tool) -> None:
    text = help_text(Section, [CONFIGS], ["vit_s16"])
    assert "ViT-S/16 from scratch" in text
    assert "Result:" in text
    assert "key=default" not in text
    assert tool("--config-name", "vit_s16", "--help", "steps", "seed=1")[:2] == (0, [])
    (line,) = tool("--help", "imports=[os")[1]
    assert line.startswith("error: imports: [os: ModuleNotFoundError: No module named '[os' (")
    assert "scale: [0.08, 1.0]" in help_text(Section, [CONFIGS], ["augment=deit"])
    assert "Statistics of the 1,797" not in help_text(Section, [CONFIGS], ["data=digits"])
    assert help_text(Section, [CONFIGS], ["speed=fast"]).startswith("Performance switches;")
    assert tool("--help", "batch_size", "speed=fast", "augment=deit")[:2] == (0, [])
    assert tool("--help", "augment=diet")[1][0].endswith("; got diet; did you mean deit?")
    assert "name: reference" in help_text(Section, [CONFIGS], ["ladder=modern"])
    assert tool("--help", "ladder=moden")[1][0].endswith("; got moden; did you mean modern?")
    unknown = "error: --help lrate: unknown key; --help without a key lists the groups"
    assert tool("--help", "optim.lr", "lrate") == (2, [unknown], [])
    assert tool("--help", "bs")[1] == ["error: --help bs: unknown key; did you mean data.global_batch_size?"]
