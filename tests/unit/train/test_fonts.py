"""Names in scripts that matplotlib's own font lacks are drawn with a font that has them."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from matplotlib import font_manager
from PIL import Image

from pycls_fast.inference.sheet import Cell, draw_sheet
from pycls_fast.train.by_class import Confusion
from pycls_fast.train.confusion_picture import draw_confusion
from pycls_fast.train.fonts import Font, fonts_for

# Both fonts come with matplotlib; only the second has this letter.
OWN, OTHER = "DejaVu Sans", "STIXGeneral"
LETTER = "\N{SCRIPT SMALL G}"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fonts of matplotlib's only, and one whose file is gone."""
    kept = [e for e in font_manager.fontManager.ttflist if e.name in (OWN, OTHER, "Last Resort High-Efficiency")]
    gone = font_manager.FontEntry(fname="/nowhere/A Sans.ttf", name="A Sans", style="normal", size="scalable")
    monkeypatch.setattr(font_manager.fontManager, "ttflist", [gone, *kept])


@pytest.mark.parametrize(
    ("texts", "families"),
    [
        (["cat", "", "\x00\n\udcff"], [OWN]),
        (["cat", f"a {LETTER}"], [OWN, OTHER]),
        # None has it but the one that has a placeholder for everything.
        (["猫"], [OWN]),
        (["猫", LETTER], [OWN, OTHER]),
    ],
)
def test_only_what_is_missing_is_looked_for(texts: list[str], families: list[str]) -> None:
    assert [font.family for font in fonts_for(texts)] == families


def test_a_confusion_matrix_lacks_no_letter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "filterwarnings", lambda *args, **kwargs: None)
    for count in (2, 30):
        names = [f"{LETTER} {k}" for k in range(count)]
        cells = np.array([0, 1])
        draw_confusion(Confusion(cells, 1 - cells, np.array([3, 4])), names, tmp_path / "confusion.png", "x")
    with pytest.raises(UserWarning, match="missing from font"):
        draw_confusion(Confusion(cells, cells, cells), ["猫", "x"], tmp_path / "confusion.png", "x")


def test_a_sheet_draws_the_letter_and_no_box() -> None:
    picture = Image.new("RGB", (40, 40))
    for title, line in ((LETTER, ""), ("x", LETTER)):
        sheet, box = (np.asarray(draw_sheet([Cell(picture, *texts)])) for texts in _both(title, line))
        assert (sheet != box).any()


def _both(title: str, line: str) -> list[tuple[str, list[str]]]:
    """The texts, and the same with a letter that no font has, which is drawn as a box."""
    return [(t, [line_]) for t, line_ in ((title, line), (title.replace(LETTER, "猫"), line.replace(LETTER, "猫")))]


def test_a_text_has_the_font_with_most_of_its_letters() -> None:
    own, other = fonts_for([LETTER])
    assert own.lacks(f"a{LETTER}") == {LETTER}
    assert other.lacks(f"a{LETTER}") == set()
    assert isinstance(other, Font)
