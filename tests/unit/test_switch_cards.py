"""The page about the switches."""

from __future__ import annotations

from pathlib import Path

from pycls_fast.speed import CATALOGUE
from tools.switch_cards import PAGE, page


def test_the_page_in_the_repository_is_what_the_catalogue_says() -> None:
    assert Path(__file__).parents[2] / "docs" / "switches.md" == PAGE
    assert PAGE.read_text(encoding="utf-8") == page(CATALOGUE), "run: python tools/switch_cards.py"


def test_every_switch_has_a_card_with_all_its_texts_and_values() -> None:
    cards = page(CATALOGUE).split("\n## ")[1:]
    assert [card.partition("\n")[0] for card in cards] == [str(switch.name) for switch in CATALOGUE]
    for card, switch in zip(cards, CATALOGUE, strict=True):
        for text in (switch.note, switch.mathematics, switch.helps, switch.hurts, switch.source, switch.ran):
            assert text in card
        assert " | ".join(switch.values) in card
        assert all(f"{value} needs {device.upper()}" in card for value, device in switch.requires.items())
