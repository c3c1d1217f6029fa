"""Contact sheets, looked at by their pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pycls_fast.train.contact_sheet import Cell, draw_sheet, tile, write_sheets

RED = (200, 30, 30)


def cell(title: str = "99.0%  a cat", color: tuple[int, int, int] = RED, size: tuple[int, int] = (40, 40)) -> Cell:
    return Cell(Image.new("RGB", size, color), title, ["file.png", "dog"])


def test_pictures_with_words_below_them() -> None:
    colors = [(0, 100, 20 * i) for i in range(5)]
    sheet = np.asarray(draw_sheet([cell(color=color) for color in colors], columns=3, side=100))
    # 3 columns of 100 and margins of 8; 2 rows of 100, a bar of 24 and two lines of 17 each
    assert sheet.shape == (2 * (100 + 24 + 8 + 34) + 8, 3 * 108 + 8, 3)
    for place, color in enumerate(colors):
        row, column = divmod(place, 3)
        drawn = sheet[8 + row * 166 :, 8 + column * 108 :][:158, :100]
        assert (drawn[:100] == color).all(), "the whole picture"
        strip = drawn[100:124]
        assert (strip == 20).all(axis=2).mean() > 0.5
        assert (strip > 200).all(axis=2).any(), "white letters"
        assert (drawn[124:] < 150).any(), "letters under the bar"
    assert (sheet[8 + 166 :, 8 + 2 * 108 :] == 255).all()


def test_a_long_title_stays_below_its_picture() -> None:
    for title in ("w" * 300, "語" * 200, "été [red] \\u"):
        sheet = np.asarray(draw_sheet([cell(title), cell("")], columns=2, side=100))
        assert (sheet[8:108, 116:] == [*[[*RED]] * 100, *[[255] * 3] * 8]).all()
        assert (sheet[108:132, 116:] == 255).all()
        assert (sheet[:, 108:116] == 255).all()


def test_a_picture_keeps_its_proportions_and_small_ones_their_pixels() -> None:
    small = np.arange(2 * 4 * 3, dtype=np.uint8).reshape(2, 4, 3)
    square = np.asarray(tile(Image.fromarray(small), 40))
    assert (square[:10] == 225).all()
    assert (square[30:] == 225).all()
    assert np.array_equal(square[10:30], small.repeat(10, axis=0).repeat(10, axis=1))
    wide = np.asarray(tile(Image.new("RGB", (300, 8), RED), 40))
    assert (wide == RED).all(axis=2).sum() == 40


@pytest.mark.parametrize(("count", "files"), [(1, 1), (6, 1), (7, 2), (13, 3)])
def test_more_pictures_go_to_more_files(tmp_path: Path, count: int, files: int) -> None:
    written = write_sheets([cell()] * count, tmp_path / "sheet.png", columns=3, side=30, page=6)
    assert [file.name for file in written] == ["sheet.png", "sheet_2.png", "sheet_3.png"][:files]
    heights = [np.asarray(Image.open(file)).shape[0] for file in written]
    assert heights[:-1] == [2 * (30 + 24 + 8 + 34) + 8] * (files - 1)
    assert sum((height - 8) // 96 for height in heights) == -(-count // 3)
