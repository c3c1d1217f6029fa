"""Contact sheets: pictures in a grid with text below them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, ImageOps

from pycls_fast.errors import refusing

SIDE = 192
"""The side of a picture's square, in pixels."""

# Cells per file, or the next smaller multiple of the columns.
_MOST = 120
_MARGIN, _LINE, _STRIP = 8, 17, 24
# For scripts that matplotlib's own font lacks; those that are not installed are left out.
_OTHER_SCRIPTS = ("Noto Sans CJK JP", "Noto Sans Devanagari", "Noto Sans Thai", "WenQuanYi Zen Hei", "Arial Unicode MS")
_INK, _GREY, _PAPER = (20, 20, 20), (90, 90, 90), (255, 255, 255)


@dataclass(frozen=True)
class Cell:
    """A picture of any size, a title for the bar below it, and lines for below that."""

    picture: Image.Image
    title: str
    lines: Sequence[str] = ()


def write_sheets(cells: Sequence[Cell], path: Path, *, columns: int = 6, side: int = SIDE) -> list[Path]:
    """Write `path`, in the format of its suffix, and `NAME_2.png`, `NAME_3.png`, ... for cells that do not fit on it,
    each with a square of `side` pixels."""
    written, page = [], columns * max(_MOST // columns, 1)
    for number, start in enumerate(range(0, len(cells), page), start=1):
        file = path if number == 1 else path.with_name(f"{path.stem}_{number}{path.suffix}")
        sheet = draw_sheet(cells[start : start + page], columns=columns, side=side)
        with refusing(f"output: {file} cannot be written", OSError, ValueError, use=f"call it {file.stem}.png"):
            sheet.save(file)
        written.append(file)
    return written


def draw_sheet(cells: Sequence[Cell], *, columns: int = 6, side: int = SIDE) -> Image.Image:
    """Draw one sheet; see `write_sheets`."""
    columns = min(columns, len(cells))
    rows = -(-len(cells) // columns)
    width = side + _MARGIN
    # Below the picture, never over it: what a network looks at may be at its lower edge.
    strip = _STRIP if any(cell.title for cell in cells) else 0
    height = side + strip + _MARGIN + _LINE * max(len(cell.lines) for cell in cells)
    sheet = Image.new("RGB", (columns * width + _MARGIN, rows * height + _MARGIN), _PAPER)
    draw = ImageDraw.Draw(sheet)
    for place, cell in enumerate(cells):
        row, column = divmod(place, columns)
        left, top = _MARGIN + column * width, _MARGIN + row * height
        sheet.paste(tile(cell.picture, side), (left, top))
        if cell.title:
            # White on black: stays readable in greyscale.
            draw.rectangle((left, top + side, left + side - 1, top + side + _STRIP - 1), fill=_INK)
            font = _font(cell.title, 15, bold=True)
            text = _fitted(cell.title, side - 10, font)
            draw.text((left + 5, top + side + _STRIP / 2), text, _PAPER, font, anchor="lm")
        for number, line in enumerate(cell.lines):
            place_y = top + side + strip + 2 + number * _LINE
            font = _font(line, 12)
            draw.text((left + 2, place_y), _fitted(line, side - 4, font), _GREY, font)
    return sheet


def tile(picture: Image.Image, side: int) -> Image.Image:
    """The whole picture, fitted into a grey square; a small one without smoothing, so that its pixels are visible."""
    smooth = Image.Resampling.NEAREST if side >= 3 * max(picture.size) else Image.Resampling.LANCZOS
    return ImageOps.pad(picture.convert("RGB"), (side, side), smooth, color=(225, 225, 225))


def _fitted(text: str, width: float, font: ImageFont.FreeTypeFont) -> str:
    """The text in one line, cut off if longer than `width` pixels; parts that are not UTF-8 become "?"."""
    # Pillow cannot measure line breaks, which names of files may contain.
    text = " ".join(text.encode(errors="replace").decode().splitlines())
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"{text}…") > width:
        text = text[:-1]
    return f"{text}…"


@cache
def _font(text: str, size: int, *, bold: bool = False) -> ImageFont.FreeTypeFont:
    """The first font that has the whole text, else matplotlib's own: Pillow draws a text in a single font.

    matplotlib ships its font on every system; Pillow's own lacks most non-English letters.
    """
    # Where its folder in the user's home cannot be written, matplotlib says so and lists all fonts anew.
    from matplotlib import font_manager

    own, *others = font_families()
    # Of the others only the regular weight is known to have the characters.
    wanted: list[font_manager.FontProperties | str] = [
        font_manager.FontProperties(family=own, weight="bold" if bold else "normal"),
        *others,
    ]
    files = [font_manager.findfont(font) for font in wanted]
    visible = [ord(c) for c in set(text) if c.isprintable()]
    whole = (file for file in files if all(map(font_manager.get_font(file).get_char_index, visible)))
    return ImageFont.truetype(next(whole, files[0]), size)


def font_families() -> list[str]:
    """matplotlib's own font, and installed ones for other scripts."""
    from matplotlib import font_manager

    installed = set(font_manager.get_font_names())
    return ["DejaVu Sans", *(name for name in _OTHER_SCRIPTS if name in installed)]
