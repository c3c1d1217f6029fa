"""Fonts for names in any script: matplotlib's own, and installed ones for the characters that it lacks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

_OWN = "DejaVu Sans"
# They have a placeholder for every character, or coloured pictures, which cannot be drawn as letters.
_NO_LETTERS = ("Last Resort", "Color Emoji", "Blank")


class Font(NamedTuple):
    """A font's family and file."""

    family: str
    file: str

    def lacks(self, text: str) -> set[str]:
        """The visible characters of a text that are not in the font."""
        from matplotlib.font_manager import get_font

        face = get_font(self.file)
        return {c for c in set(text) if c.isprintable() and not face.get_char_index(ord(c))}


def fonts_for(texts: Iterable[str]) -> list[Font]:
    """Fonts that together have the characters of the texts, as far as installed ones do.

    The first one is matplotlib's own, and the only one if it lacks nothing.
    """
    from matplotlib import font_manager

    found = [Font(_OWN, font_manager.findfont(_OWN))]
    missing = found[0].lacks("".join(texts))
    for font in _installed() if missing else ():
        if not missing:
            break
        try:
            still = font.lacks("".join(missing))
        except (OSError, RuntimeError):
            # Removed since matplotlib listed it, or damaged.
            continue
        if still != missing:
            found.append(font)
            missing = still
    return found


def _installed() -> list[Font]:
    """The upright fonts, those without serifs first."""
    from matplotlib.font_manager import fontManager

    fonts = {Font(e.name, e.fname) for e in fontManager.ttflist if e.style == "normal" and e.size == "scalable"}
    letters = [font for font in fonts if not any(name in font.family for name in _NO_LETTERS)]
    return sorted(letters, key=lambda font: ("Sans" not in font.family, font))
