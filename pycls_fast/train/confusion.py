"""`confusion.png`: which classes were taken for which, readable for two classes and for a thousand."""

from __future__ import annotations

import unicodedata
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pycls_fast.train.output_file import whole

_WITH_NUMBERS = 25
_WITH_NAMES = 80
_PAIRS = 20
_LONGEST = 24


def draw_confusion(counts_KK: np.ndarray, classes: Sequence[str], path: Path, title: str) -> None:
    """Draw the shares of each right class (row) that were predicted as each class (column).

    Up to 25 classes have the numbers of images in the cells, up to 80 their names at the sides; with more than 25 the
    most frequent confusions are listed by name beside the picture.

    Args:
        counts_KK: int64, images by right class and predicted class.
        classes: K names, of any characters.
        path: the PNG file, written whole or not at all.
        title: above the picture.
    """
    count = len(classes)
    names = [_short(name) for name in classes]
    named = min(count, _WITH_NAMES)
    side = 4.0 + 0.33 * min(named, _WITH_NUMBERS) + 0.1 * max(named - _WITH_NUMBERS, 0)
    lists = count > _WITH_NUMBERS
    figure = Figure(figsize=(side + (4.5 if lists else 0.0), side), layout="constrained")
    if lists:
        axes, beside = figure.subplots(1, 2, width_ratios=(side, 4.5))
        _list_pairs(beside, counts_KK, names)
    else:
        axes = figure.subplots()
    images_K1 = counts_KK.sum(axis=1, keepdims=True)
    share_KK = counts_KK / np.maximum(images_K1, 1)
    picture = axes.imshow(
        share_KK, cmap="Blues", vmin=0.0, vmax=1.0, interpolation="nearest" if count <= 200 else "auto"
    )
    figure.colorbar(picture, ax=axes, fraction=0.046, label="share of the right class")
    _label(axes, names)
    if count <= _WITH_NUMBERS:
        _write_numbers(axes, counts_KK, share_KK)
    figure.suptitle(title, fontsize=11, parse_math=False)
    with whole(path) as temporary, warnings.catch_warnings():
        # A name may have characters that the font draws as boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.savefig(temporary, dpi=110, format="png")


def _label(axes: Axes, names: Sequence[str]) -> None:
    axes.set_xlabel("predicted class")
    axes.set_ylabel("right class")
    if len(names) > _WITH_NAMES:
        # Positions, as in classes.json.
        return
    size = 8 if len(names) <= _WITH_NUMBERS else 5
    places = range(len(names))
    axes.set_xticks(places, names, rotation=90, fontsize=size, parse_math=False)
    axes.set_yticks(places, names, fontsize=size, parse_math=False)


def _write_numbers(axes: Axes, counts_KK: np.ndarray, share_KK: np.ndarray) -> None:
    for row, column in zip(*np.nonzero(counts_KK), strict=True):
        color = "white" if share_KK[row, column] > 0.4 else "black"
        number = f"{counts_KK[row, column]}"
        axes.text(column, row, number, ha="center", va="center", fontsize=7, color=color)


def _list_pairs(axes: Axes, counts_KK: np.ndarray, names: Sequence[str]) -> None:
    """The largest numbers off the diagonal: images, right class, predicted class."""
    axes.axis("off")
    wrong_KK = counts_KK - np.diag(counts_KK.diagonal())
    largest = np.argsort(-wrong_KK, axis=None, kind="stable")[:_PAIRS]
    pairs = [divmod(int(cell), len(names)) for cell in largest]
    lines = [f"{wrong_KK[a, b]:>5} x  {names[a]} ({a}) → {names[b]} ({b})" for a, b in pairs if wrong_KK[a, b]]
    text = "\n".join(["most frequent mistakes", *(lines or ["none"])])
    axes.text(0, 1, text, va="top", fontsize=8, transform=axes.transAxes, parse_math=False)


def _short(name: str) -> str:
    """On one line, without what a font cannot be asked for."""
    shown = "".join("?" if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") else c for c in name)
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 1]}…"
