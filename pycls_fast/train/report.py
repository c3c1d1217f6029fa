"""`pycls-fast test report=FOLDER`: a page with the scores, each class, and the images that were predicted wrong."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from pycls_fast.data.decode import DamagedImage, decode
from pycls_fast.data.sources.base import Images
from pycls_fast.train.evaluate import Predictions, class_scores, confusion, mistakes
from pycls_fast.train.folder import write_text
from pycls_fast.train.pictures import draw_confusion

_MOST, _SIDE = 200, 160


def write_report(
    index: Path, predictions: Predictions, source: Images, title: str, facts: Sequence[tuple[str, str]]
) -> None:
    """Write the page, which needs no other file, and `confusion.png` beside it.

    Args:
        index: a path from `output_file`.
        predictions: an evaluation's of `source`.
        title: above everything.
        facts: names and values below it.

    Raises:
        UserError: a file that cannot be written.
    """
    picture = index.with_name("confusion.png")
    draw_confusion(confusion(predictions, len(source.classes)), source.classes, picture, title)
    wrong_M, doubted_M = mistakes(predictions, len(source.classes))
    template = Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    html = environment.from_string(template).render(
        title=title,
        facts=facts,
        confusion=_data_url(picture.read_bytes(), "png"),
        classes=class_scores(predictions, source.classes)["classes"],
        wrong=len(wrong_M),
        doubted=int(doubted_M.sum()),
        tiles=list(_tiles(predictions, source, zip(wrong_M.tolist(), doubted_M.tolist(), strict=True))),
    )
    write_text(index, html, key="report")


def _tiles(predictions: Predictions, source: Images, places: Iterator[tuple[int, bool]]) -> Iterator[dict[str, Any]]:
    """What the page shows of each of the first images that can be read."""
    for place, doubted in list(places)[:_MOST]:
        index = int(predictions.indices_N[place])
        try:
            image = decode(source.read(index)[0])
        except (DamagedImage, OSError):
            continue
        image.thumbnail((_SIDE, _SIDE))
        file = io.BytesIO()
        image.save(file, format="JPEG", quality=85)
        yield {
            "data": _data_url(file.getvalue(), "jpeg"),
            "name": source.name(index),
            "label": source.classes[predictions.labels_N[place]],
            "predicted": source.classes[predictions.predicted_N[place]],
            "probability": float(predictions.probabilities_N[place]),
            "doubted": doubted,
        }


def _data_url(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
