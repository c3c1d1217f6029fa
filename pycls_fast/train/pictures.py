"""`curves.png`, `confusion.png`, and the page of `pycls-fast test report=FOLDER` with the wrong predictions."""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import Environment, StrictUndefined

from pycls_fast.data.decode import AS_STORED, Conversion, DamagedImage, decode
from pycls_fast.data.sources.base import Images
from pycls_fast.files import atomic_write
from pycls_fast.train.by_class import Confusion, confusion, mistakes, of_sets, set_mistakes, sigmoid
from pycls_fast.train.display import one_line
from pycls_fast.train.evaluate import Evaluation
from pycls_fast.train.folder import write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_curves(records: Iterable[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw the four panels from lines of `metrics.jsonl`; null values are left out."""
    from matplotlib.figure import Figure

    records = list(records)
    train = [record for record in records if record["kind"] == "train"]
    evaluations = [record for record in records if record["kind"] == "eval"]
    # A Figure without pyplot: no global state, no display needed.
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    figure.suptitle(title, fontsize=11, parse_math=False)
    (loss, accuracy), (rate, speed) = figure.subplots(2, 2)
    for axes, key, label in ((loss, "loss", "training"), (rate, "lr", ""), (speed, "images_per_second", "")):
        _line(axes, train, key, label, "-")
    averaged = any(record["weights"] == "ema" for record in evaluations)
    for split, weights in sorted({(record["split"], record["weights"]) for record in evaluations}):
        chosen = [record for record in evaluations if (record["split"], record["weights"]) == (split, weights)]
        label = f"{split} ({weights})"
        _line(loss, chosen, "loss", label, ".--")
        # Beside the average, which counts, one line is enough.
        for key, name, style in _ACCURACIES if weights == "ema" or not averaged else _ACCURACIES[:1]:
            _line(accuracy, chosen, key, f"{label} {name}", style)
    names = {loss: "loss (nats)", accuracy: "accuracy (%)", rate: "learning rate", speed: "images/s"}
    for axes, name in names.items():
        axes.set_xlabel("epoch")
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
        if axes in (loss, accuracy) and axes.lines:
            axes.legend(fontsize=8)
    speed.set_ylim(bottom=0)
    # Rank 0 may be killed while it draws; a half-written picture must not replace a complete one.
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")


_ACCURACIES = (
    ("top1", "top-1", ".-"),
    ("top5", "top-5", ".:"),
    ("class_top1", "class top-1", ".-."),
    ("map", "mAP", ".-"),
)


def _line(axes: Axes, records: Iterable[Mapping[str, Any]], key: str, label: str, style: str) -> None:
    points = [(record["epoch"], record[key]) for record in records if record.get(key) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1.2)


_WITH_NUMBERS = 25
_WITH_NAMES = 80
_PAIRS = 20
# Rows and columns; about the number of pixels that they are drawn with.
_MOST_CELLS = 1500
# For scripts that matplotlib's own font lacks; those that are not installed are left out.
_OTHER_SCRIPTS = ("Noto Sans CJK JP", "Noto Sans Devanagari", "Noto Sans Thai", "WenQuanYi Zen Hei", "Arial Unicode MS")


def draw_confusion(counts: Confusion, classes: Sequence[str], path: Path, title: str) -> None:
    """Draw the share of each true class (row) that was predicted as each class (column).

    Up to 25 classes get image counts in the cells, up to 80 get their names at the sides; with more than 25 the most
    frequent confusions are listed by name beside the picture. Above 1,500, neighbouring classes share a cell.

    Args:
        classes: K names, with any characters.
    """
    from matplotlib.figure import Figure

    count = len(classes)
    named = min(count, _WITH_NAMES)
    side = 4.0 + 0.33 * min(named, _WITH_NUMBERS) + 0.1 * max(named - _WITH_NUMBERS, 0)
    lists = count > _WITH_NUMBERS
    figure = Figure(figsize=(side + (4.5 if lists else 0.0), side), layout="constrained")
    if lists:
        axes, beside = figure.subplots(1, 2, width_ratios=(side, 4.5))
        _list_pairs(beside, counts, classes)
    else:
        axes = figure.subplots()
    size = -(-count // _MOST_CELLS)
    share_DD = _shares(counts, count, size)
    # With one class per cell these are imshow's own defaults.
    end = len(share_DD) * size - 0.5
    picture = axes.imshow(
        share_DD,
        cmap="Blues",
        vmin=0.0,
        vmax=1.0,
        interpolation="nearest" if count <= 200 else "auto",
        extent=(-0.5, end, end, -0.5),
    )
    whose = "the true class" if size == 1 else f"{size} true classes together"
    figure.colorbar(picture, ax=axes, fraction=0.046, label=f"share of {whose}")
    _label(axes, classes)
    if count <= _WITH_NUMBERS:
        for row, column, images in zip(*counts, strict=True):
            color = "white" if share_DD[row, column] > 0.4 else "black"
            axes.text(column, row, f"{images}", ha="center", va="center", fontsize=7, color=color)
    figure.suptitle(title, fontsize=11, parse_math=False)
    with atomic_write(path) as temporary, warnings.catch_warnings():
        # A name may have characters that no installed font has; they become boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.savefig(temporary, dpi=110, format="png")


def _shares(counts: Confusion, classes: int, size: int) -> np.ndarray:
    """Confusion matrix with `size` classes per cell, each row divided by its number of images.

    float64 (D, D), rows are true classes, D = classes / size rounded up; 0 in rows without images.
    """
    cells = -(-classes // size)
    images_DD = np.zeros((cells, cells))
    np.add.at(images_DD, (counts.right_C // size, counts.predicted_C // size), counts.images_C)
    images_DD /= np.maximum(images_DD.sum(axis=1, keepdims=True), 1)
    return images_DD


def _label(axes: Axes, classes: Sequence[str]) -> None:
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    if len(classes) > _WITH_NAMES:
        # Positions, as in classes.json.
        return
    names = [one_line(name) for name in classes]
    size = 8 if len(names) <= _WITH_NUMBERS else 5
    places = range(len(names))
    families = font_families()
    axes.set_xticks(places, names, rotation=90, fontsize=size, family=families, parse_math=False)
    axes.set_yticks(places, names, fontsize=size, family=families, parse_math=False)


def _list_pairs(axes: Axes, counts: Confusion, classes: Sequence[str]) -> None:
    """List the largest off-diagonal cells: images, true class, predicted class."""
    axes.axis("off")
    mistakes = np.flatnonzero(counts.right_C != counts.predicted_C)
    largest = mistakes[np.argsort(-counts.images_C[mistakes], kind="stable")[:_PAIRS]]
    lines = [
        f"{images:>5} x  {one_line(classes[a])} ({a}) → {one_line(classes[b])} ({b})"
        for a, b, images in zip(*(values_C[largest] for values_C in counts), strict=True)
    ]
    text = "\n".join(["most frequent mistakes", *(lines or ["none"])])
    axes.text(0, 1, text, va="top", fontsize=8, family=font_families(), transform=axes.transAxes, parse_math=False)


def font_families() -> list[str]:
    """matplotlib's own font, and installed ones for other scripts."""
    from matplotlib import font_manager

    installed = set(font_manager.get_font_names())
    return ["DejaVu Sans", *(name for name in _OTHER_SCRIPTS if name in installed)]


_MOST_TILES, _TILE_SIDE = 200, 160


def write_report(
    index: Path,
    result: Evaluation,
    source: Images,
    title: str,
    facts: Sequence[tuple[str, str]],
    *,
    classes: Sequence[Mapping[str, Any]],
    convert: Conversion = AS_STORED,
) -> None:
    """Write the page, which needs no other file, and `confusion.png` beside it, if images have one label each.

    Args:
        classes: the rows of `classes.json`.
        convert: as the network's images are.
    """
    found, picture = result.predictions, None
    said: Iterable[tuple[Iterable[int], dict[int, float]]]
    if source.label_sets is None:
        picture = index.with_name("confusion.png")
        draw_confusion(confusion(found, len(source.classes)), source.classes, picture, title)
        wrong_M = mistakes(found, len(source.classes))
        columns = (x[wrong_M].tolist() for x in (found.labels_N, found.predicted_N, found.probabilities_N))
        said = (([label], {guess: p}) for label, guess, p in zip(*columns, strict=True))
    else:
        true_NK, scores_NK = of_sets(result, source)
        wrong_M = set_mistakes(true_NK, scores_NK)
        rows = zip(true_NK[wrong_M], sigmoid(scores_NK[wrong_M]), strict=True)
        said = ((np.flatnonzero(own_K), {k: p for k, p in enumerate(likely_K) if p > 0.5}) for own_K, likely_K in rows)
    template = Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    html = environment.from_string(template).render(
        title=title,
        facts=facts,
        confusion=None if picture is None else _data_url(picture.read_bytes(), "png"),
        classes=classes,
        wrong=len(wrong_M),
        tiles=list(_tiles(source, found.indices_N[wrong_M], said, convert)),
    )
    write_text(index, html, key="report")


def _tiles(
    source: Images, indices_M: np.ndarray, said: Iterable[tuple[Iterable[int], dict[int, float]]], convert: Conversion
) -> Iterator[dict[str, Any]]:
    """What the page shows of each of the first images that can be read.

    Args:
        said: the labels of each, and the probabilities of the classes that it was taken for.
    """
    for index, (labels, guesses) in islice(zip(indices_M.tolist(), said, strict=True), _MOST_TILES):
        try:
            image = decode(source.read(index), convert)
        except (DamagedImage, OSError):
            continue
        image.thumbnail((_TILE_SIDE, _TILE_SIDE))
        file = io.BytesIO()
        image.save(file, format="JPEG", quality=85)
        yield {
            "data": _data_url(file.getvalue(), "jpeg"),
            "name": source.name(index),
            "labels": [source.classes[label] for label in labels],
            "guesses": {source.classes[label]: float(p) for label, p in guesses.items()},
        }


def _data_url(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
