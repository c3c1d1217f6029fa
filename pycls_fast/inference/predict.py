"""Predict images and write the result as a table, JSON, CSV or a contact sheet."""

from __future__ import annotations

import csv
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from PIL import Image

from pycls_fast.data.progress import progress
from pycls_fast.data.sources.remote import is_remote
from pycls_fast.data.to_rgb import Conversion, decode
from pycls_fast.errors import DONE, MISTAKE, cell, printable
from pycls_fast.inference.classifier import BATCH_SIZE, Classifier, Guess, Prediction, load
from pycls_fast.inference.images import Address, Frame, GivenImages, find_images, frames_of
from pycls_fast.train.contact_sheet import SIDE, Cell, write_sheets
from pycls_fast.train.display import plain_table, wide_console
from pycls_fast.train.folder import output_file
from pycls_fast.train.out_of_memory import enough_memory

_NAME = 60
# Classes listed below the title.
_MORE = 2


def predict(
    weights: str,
    images: Sequence[str],
    *,
    format: str,  # noqa: A002  # the key that the user types
    output: str | None,
    every: float = 1.0,
    which: str = "auto",
    device: str = "auto",
    precision: str = "fp32",
    batch_size: int | None = None,
    **options: Any,
) -> int:
    """Predict, write, and list the images that could not be read; returns the exit status. For the arguments see
    `PredictVerb`; the `options` are those of `Classifier.stream`.
    """
    # Wrong arguments are reported before the slow loading; files that are not images are reported at the end.
    source = GivenImages(collect(images, every))
    if format == "sheet":
        output = output or "predictions.png"
    elif output == "-":
        output = None
    path = None if output is None else output_file(output)
    classifier = load(weights, which=which, device=device, precision=precision)
    unreadable: list[tuple[str, str]] = []
    # On a terminal the rows of a CSV show how far it is.
    silent = format == "csv" and path is None and sys.stdout.isatty()
    bar = nullcontext(lambda count: None) if silent else progress("predict", len(source), "images")
    found: list[Prediction] = []
    with enough_memory("batch_size", classifier.device, batch_size or BATCH_SIZE), bar as advance:
        predictions = classifier.stream(
            source, batch_size=batch_size, skip=lambda *one: unreadable.append(one), advance=advance, **options
        )
        if format == "csv":
            _write_csv(path, predictions)
        else:
            found += predictions
    if format == "sheet" and path is not None:
        cells = [_cell(source, each, classifier.config.data.conversion) for each in found]
        for file in write_sheets(cells, path) if cells else ():
            print(file)
    elif format != "csv":
        with _opened(path) as stream:
            if format == "json":
                _write_json(stream, classifier, found, unreadable)
            else:
                _write_table(stream, classifier, found)
    report_unreadable(unreadable, len(source))
    return DONE if len(unreadable) < len(source) else MISTAKE


def report_unreadable(unreadable: Sequence[tuple[str, str]], count: int) -> None:
    """Name the images that could not be read on standard error."""
    for name, reason in unreadable:
        print(f"unreadable: {printable(f'{name}: {reason}')}", file=sys.stderr)
    if unreadable:
        print(f"{len(unreadable):,} of {count:,} images could not be read", file=sys.stderr)


def collect(images: Sequence[str], every: float = 1.0) -> list[Path | Address | Frame]:
    """The files that the command line names; those listed on standard input need not exist."""
    listed: list[Path | Address] = []
    if "-" in images:
        # Names need not be UTF-8; NUL ends those of `find -print0`.
        lines = re.split(r"\r?\n|\0", os.fsdecode(sys.stdin.buffer.read()))
        listed = [Address(line) if is_remote(line) else Path(line) for line in lines if line.strip()]
    return [*find_images((word for word in images if word != "-"), every), *frames_of(listed, every)]


def _opened(path: Path | None) -> AbstractContextManager[TextIO]:
    """The file, or standard output."""
    if path is None:
        return nullcontext(sys.stdout)
    # Parts of a class name that are not UTF-8 become escapes, which JSON readers decode.
    return path.open("w", encoding="utf-8", errors="backslashreplace", newline="")


def _json(guess: Guess) -> dict[str, Any]:
    return {"label": guess.label, "class": guess.class_name, "probability": guess.probability}


def _names(over: Sequence[Guess]) -> str:
    return ";".join(guess.class_name for guess in over)


def _write_json(
    stream: TextIO, classifier: Classifier, found: Sequence[Prediction], unreadable: Sequence[tuple[str, str]]
) -> None:
    values = {
        "weights": str(classifier.weights.path),
        "step": classifier.weights.step,
        "preprocessing": classifier.preprocessing,
        "images": [
            {
                "image": each.image,
                **_json(each.top[0]),
                "top": [_json(guess) for guess in each.top],
                **({} if each.over is None else {"over": [_json(guess) for guess in each.over]}),
            }
            for each in found
        ],
        "unreadable": [{"image": name, "reason": reason} for name, reason in unreadable],
    }
    stream.write(json.dumps(values, indent=1, ensure_ascii=False) + "\n")


def _write_csv(path: Path | None, predictions: Iterable[Prediction]) -> None:
    """Write row by row: millions of images take hours, and an error or a kill must not lose them all."""
    with _opened(path) as stream:
        table, width = csv.writer(stream, lineterminator="\n"), 0
        for each in predictions:
            if not width:
                width = len(each.top)
                table.writerow(_csv_header(width) + ([] if each.over is None else ["over"]))
            cells = [(guess.label, cell(guess.class_name), f"{guess.probability:.6g}") for guess in each.top]
            last = [] if each.over is None else [cell(_names(each.over))]
            table.writerow([cell(each.image), *chain.from_iterable(cells), *last])


def _csv_header(count: int) -> list[str]:
    numbers = ["", *(f"_{place}" for place in range(2, count + 1))]
    return ["image", *(f"{what}{n}" for n in numbers for what in ("label", "class", "probability"))]


def _write_table(stream: TextIO, classifier: Classifier, found: Sequence[Prediction]) -> None:
    rows: list[dict[str, str]] = []
    for each in found:
        name = each.image if len(each.image) <= _NAME else f"…{each.image[1 - _NAME :]}"
        first, then = each.top[:1], each.top[1:]
        if each.over is not None:
            first, then = each.over, tuple(guess for guess in each.top if guess not in each.over)
        more = ", ".join(f"{guess.class_name} {percent(guess.probability)}" for guess in then)
        sure = ", ".join(percent(guess.probability) for guess in first)
        rows.append({"image": name, "class": _names(first) or "none", "%": sure, "then": more})
    console = wide_console(stream)
    console.print(str(classifier.weights), markup=False, soft_wrap=True)
    console.print(plain_table(rows, right=("%",)))


def percent(probability: float) -> str:
    """A probability in percent, with two decimals near 0 and 1 and one elsewhere."""
    return f"{100 * probability:.2f}" if probability < 0.001 or probability > 0.999 else f"{100 * probability:.1f}"


def _cell(source: GivenImages, each: Prediction, convert: Conversion) -> Cell:
    picture = decode(source.read(each.position), convert)
    # All are in memory at once, and a photograph is 36 MB.
    picture.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    more = [f"{percent(guess.probability)}%  {guess.class_name}" for guess in each.top[1 : 1 + _MORE]]
    # The number comes first: long lines are cut off at the end.
    title = f"{'none: ' if each.over == () else ''}{percent(each.probability)}%  {each.class_name}"
    return Cell(picture, title, [source.short_name(each.position), *more])
