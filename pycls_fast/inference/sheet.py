"""Contact sheets: pictures in a grid with text below them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont

from pycls_fast.errors import UserError
from pycls_fast.train.fonts import Font, fonts_for

PAGE = 120
"""Cells per file; further pictures go to further files."""

_MARGIN, _LINE, _STRIP = 8, 17, 24
_INK, _GREY, _PAPER = (20, 20, 20), (90, 90, 90), (255, 255, 255)


@dataclass(frozen=True)
class Cell:
    """A picture on a sheet.

    Attributes:
        picture: any size; small ones are enlarged without smoothing, so that their pixels are visible.
        title: written in a bar below the picture.
        lines: written below the bar.
    """

    picture: Image.Image
    title: str
    lines: Sequence[str] = ()


def write_sheets(
    cells: Sequence[Cell], path: Path, *, columns: int = 6, side: int = 192, page: int = PAGE
) -> list[Path]:
    """Write PNG files: `path`, and `NAME_2.png`, `NAME_3.png`, ... for cells that do not fit on it.

    Args:
        columns: cells per row.
        side: a picture's width and height, in pixels.
        page: cells per file, a multiple of `columns`.

    Raises:
        UserError: a file that cannot be written.
    """
    written = []
    for number, start in enumerate(range(0, len(cells), page), start=1):
        file = path if number == 1 else path.with_name(f"{path.stem}_{number}{path.suffix}")
        sheet = draw_sheet(cells[start : start + page], columns=columns, side=side)
        try:
            sheet.save(file, format="PNG")
        except OSError as error:
            raise UserError(f"output: {file} cannot be written ({error.strerror})") from error
        written.append(file)
    return written


def draw_sheet(cells: Sequence[Cell], *, columns: int = 6, side: int = 192) -> Image.Image:
    """Draw one sheet; see `write_sheets`."""
    columns = min(columns, len(cells))
    rows = -(-len(cells) // columns)
    width = side + _MARGIN
    # Below the picture, never over it: what a network looks at may be at its lower edge.
    strip = _STRIP if any(cell.title for cell in cells) else 0
    height = side + strip + _MARGIN + _LINE * max(len(cell.lines) for cell in cells)
    sheet = Image.new("RGB", (columns * width + _MARGIN, rows * height + _MARGIN), _PAPER)
    draw = ImageDraw.Draw(sheet)
    fonts = fonts_for(text for cell in cells for text in (cell.title, *cell.lines))
    for place, cell in enumerate(cells):
        row, column = divmod(place, columns)
        left, top = _MARGIN + column * width, _MARGIN + row * height
        sheet.paste(tile(cell.picture, side), (left, top))
        if cell.title:
            # White on black: stays readable in greyscale.
            draw.rectangle((left, top + side, left + side - 1, top + side + _STRIP - 1), fill=_INK)
            font = _font(fonts, cell.title, 15, bold=True)
            text = _fitted(cell.title, side - 10, font)
            draw.text((left + 5, top + side + _STRIP / 2), text, _PAPER, font, anchor="lm")
        for number, line in enumerate(cell.lines):
            place_y = top + side + strip + 2 + number * _LINE
            font = _font(fonts, line, 12)
            draw.text((left + 2, place_y), _fitted(line, side - 4, font), _GREY, font)
    return sheet


def tile(picture: Image.Image, side: int) -> Image.Image:
    """The whole picture, fitted into a grey square of `side` pixels."""
    scale = side / max(picture.size)
    size = tuple(max(round(length * scale), 1) for length in picture.size)
    smooth = Image.Resampling.NEAREST if scale >= 3 else Image.Resampling.LANCZOS
    square = Image.new("RGB", (side, side), (225, 225, 225))
    square.paste(picture.resize(size, smooth), ((side - size[0]) // 2, (side - size[1]) // 2))  # type: ignore[arg-type]
    return square


def _fitted(text: str, width: float, font: ImageFont.FreeTypeFont) -> str:
    """The text in one line, cut off if longer than `width` pixels; parts that are not UTF-8 become "?"."""
    # Pillow cannot measure line breaks, which names of files may contain.
    text = " ".join(text.encode(errors="replace").decode().splitlines())
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"{text}…") > width:
        text = text[:-1]
    return f"{text}…"


def _font(fonts: Sequence[Font], text: str, size: int, *, bold: bool = False) -> ImageFont.FreeTypeFont:
    """The first of the fonts that has most of the text: Pillow draws a text in a single font."""
    best = min(fonts, key=lambda font: len(font.lacks(text)))
    # Of the others only the regular weight is known to have the characters.
    return _loaded(best, size, bold and best == fonts[0])


@cache
def _loaded(font: Font, size: int, bold: bool) -> ImageFont.FreeTypeFont:
    # matplotlib ships its font on every system; Pillow's own lacks most non-English letters.
    file = font.file
    if bold:
        file = font_manager.findfont(font_manager.FontProperties(family=font.family, weight="bold"))
    return ImageFont.truetype(file, size)
