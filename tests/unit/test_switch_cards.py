"""The page about the switches, the precision levels and the strategies."""

from __future__ import annotations

import re
import typing
from pathlib import Path

from pycls_fast.config.schema import Parallel
from pycls_fast.optim.choices import Optimizer as Chosen
from pycls_fast.parallel.wrap import IMPLEMENTATIONS
from pycls_fast.precision import KEPT_IN_FLOAT32, LEVELS
from pycls_fast.speed import CATALOGUE
from pycls_fast.strategies import STRATEGIES
from tools.switch_cards import PAGE, page

TEXT = page(CATALOGUE, tuple(LEVELS.values()), tuple(STRATEGIES.values()))


def cards(title: str) -> dict[str, str]:
    """The cards behind a title, by name."""
    part = TEXT.partition(f"\n# {title}\n")[2] if title != "Performance switches" else TEXT
    sections = part.partition("\n# ")[0].split("\n## ")[1:]
    return {card.partition("\n")[0]: card for card in sections}


def test_the_page_in_the_repository_is_what_the_catalogues_say() -> None:
    assert Path(__file__).parents[2] / "docs" / "switches.md" == PAGE
    assert PAGE.read_text(encoding="utf-8") == TEXT, "run: python tools/switch_cards.py"


def test_every_switch_has_a_card_with_all_its_texts_and_values() -> None:
    found = cards("Performance switches")
    assert list(found) == [str(switch.name) for switch in CATALOGUE]
    for card, switch in zip(found.values(), CATALOGUE, strict=True):
        for text in (switch.note, switch.mathematics, switch.helps, switch.hurts, switch.source, switch.ran):
            assert text in card
        assert " | ".join(switch.values) in card
        assert all(f"{value} needs {device.upper()}" in card for value, device in switch.requires.items())


def test_every_precision_level_has_a_card_with_its_formats_and_its_names_elsewhere() -> None:
    found = cards("Precision levels")
    assert list(found) == list(LEVELS)
    for name, level in LEVELS.items():
        card = found[name]
        for text in (level.note, level.helps, level.hurts, level.source, level.ran):
            assert text.endswith(".")
            assert text in card
        assert level.elsewhere in card
        assert (f"- Elsewhere: Apex's {level.apex}" in card) == bool(level.apex)
        assert all(f"`{operation}`" in card for operation in KEPT_IN_FLOAT32) == (level.autocast is not None)
        assert ("masters, which are rounded" in card) == (level.masters == "kept")
        assert ("Mathematics (the reference)" in card) == (name == "fp32")
        assert "CUDA" in level.ran
    assert "Stays in float32: every norm." in found["fp16_master"]
    assert "Stays in float32: batch norm, with its statistics." in found["bf16_params"]
    assert all("Stays in float32: nothing of the network." in found[name] for name in ("fp16", "bf16"))


def test_every_strategy_has_a_card() -> None:
    found = cards("Strategies")
    names = set(typing.get_args(Parallel.model_fields["name"].annotation)) - {"auto"}
    assert set(found) == names == set(IMPLEMENTATIONS)
    assert list(found) == list(STRATEGIES)
    for strategy in STRATEGIES.values():
        for text in (
            strategy.note, strategy.holds, strategy.mathematics, strategy.helps, strategy.hurts, strategy.source,
            strategy.ran,
        ):  # fmt: skip
            assert text.endswith(".")
            assert text in found[strategy.name]


def test_cards_of_strategies_name_the_optimizers_that_the_checks_accept() -> None:
    def named(strategy: str, pattern: str) -> set[str]:
        (listed,) = re.findall(pattern, STRATEGIES[strategy].hurts)
        return set(re.split(", | and ", listed))

    optimizers = Chosen.choices().items()
    assert named("fsdp", r"Optimizers: (.*)\.") == {name for name, facts in optimizers if facts.shardable}
    assert named("fairscale_fsdp", r"Optimizers: (.*?)\.") == {name for name, facts in optimizers if facts.elementwise}
    excepted = {name for name, facts in optimizers if not facts.sends_state}
    assert named("fairscale_sharded_ddp", r"any optimizer except (.*)\.") == excepted


def test_the_optimizers_without_a_fused_step_are_named() -> None:
    (named,) = re.findall(r"Optimizers without a fused step \((.*?);", LEVELS["amp_fp16"].hurts)
    assert set(named.split(", ")) == {
        name for name, facts in Chosen.choices().items() if "fused" not in facts.implementations
    }
