"""`curves.png`, `confusion.png`, `first_batch.jpg`; the pages of a run and of `pycls-fast test report=FOLDER`."""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError
from PIL import Image
from torch import Tensor

from pycls_fast.data.batch import Batch
from pycls_fast.data.sources.base import Images
from pycls_fast.data.to_rgb import AS_STORED, Conversion, DamagedImage, decode
from pycls_fast.errors import refusing
from pycls_fast.files import atomic_write
from pycls_fast.reading import read_json
from pycls_fast.train.by_class import confusion, mistakes, of_sets, set_mistakes, sigmoid
from pycls_fast.train.display import SCORES, duration, epochs, human, one_line, scores_text, telling_scores
from pycls_fast.train.evaluate import Evaluation
from pycls_fast.train.folder import write_text, writing
from pycls_fast.train.run_state import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from scipy import sparse


def draw_curves(run: Run) -> None:
    """Draw the four panels of `curves.png` from `metrics.jsonl`, without null values; on the main rank."""
    from matplotlib.figure import Figure

    records, file = list(run.folder.records()), run.folder.path / "curves.png"
    train = [record for record in records if record["kind"] == "train"]
    evaluations = [record for record in records if record["kind"] == "eval"]
    # A Figure without pyplot: no global state, no display needed.
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    figure.suptitle(run.config.config_name, fontsize=11, parse_math=False)
    (loss, accuracy), (rate, speed) = figure.subplots(2, 2)
    for axes, key, label in ((loss, "loss", "training"), (rate, "lr", ""), (speed, "images_per_second", "")):
        _line(axes, train, key, label, "-")
    averaged = any(record["weights"] == "ema" for record in evaluations)
    evaluated = sorted({(record["split"], record["weights"]) for record in evaluations})
    for number, (split, weights) in enumerate(evaluated, start=1):
        chosen = [record for record in evaluations if (record["split"], record["weights"]) == (split, weights)]
        label, colour = f"{split} ({weights})", f"C{number}"
        _line(loss, chosen, "loss", label, ".--", colour)
        # Beside the average, which counts, one line is enough.
        keys = [key for key in SCORES if any(key in telling_scores(record) for record in chosen)]
        for key, style in zip(keys, _STYLES[: None if weights == "ema" or not averaged else 1], strict=False):
            _line(accuracy, chosen, key, f"{label} {SCORES[key]}", style, colour)
    names = {loss: "loss (nats)", accuracy: "accuracy (%)", rate: "learning rate", speed: "images/s"}
    for axes, name in names.items():
        axes.set_xlabel("epoch")
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
        if axes in (loss, accuracy) and axes.lines:
            axes.legend(fontsize=8)
    speed.set_ylim(bottom=0)
    # Rank 0 may be killed while it draws; a half-written picture must not replace a complete one.
    with writing(file), atomic_write(file) as temporary:
        figure.savefig(temporary, dpi=110, format="png")


_STYLES = (".-", ".:", ".-.")


def _line(
    axes: Axes, records: Iterable[Mapping[str, Any]], key: str, label: str, style: str, colour: str = "C0"
) -> None:
    points = [(record["epoch"], record[key]) for record in records if record.get(key) is not None]
    if points:
        # A line needs two points: the only record of a short run would not be seen.
        style = style if len(points) > 1 else "."
        axes.plot(*zip(*points, strict=True), style, color=colour, label=label, linewidth=1.2)


_WITH_NUMBERS = 25
_WITH_NAMES = 80
# Rows and columns; about the number of pixels that they are drawn with.
_MOST_CELLS = 1500


def draw_confusion(counts_KK: sparse.csr_array, classes: Sequence[str], path: Path, title: str) -> None:
    """Draw the share of each true class (row) that was predicted as each class (column).

    Up to 25 classes get image counts in the cells, up to 80 their names at the sides. Above 1,500, neighbouring classes
    share a cell.
    """
    from matplotlib.figure import Figure

    count = len(classes)
    named = min(count, _WITH_NAMES)
    side = 4.0 + 0.33 * min(named, _WITH_NUMBERS) + 0.1 * max(named - _WITH_NUMBERS, 0)
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.subplots()
    size = -(-count // _MOST_CELLS)
    share_DD = _shares(counts_KK, size)
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
        cells = counts_KK.tocoo()
        for row, column, images in zip(cells.row, cells.col, cells.data, strict=True):
            color = "white" if share_DD[row, column] > 0.4 else "black"
            axes.text(column, row, f"{images}", ha="center", va="center", fontsize=7, color=color)
    figure.suptitle(title, fontsize=11, parse_math=False)
    with atomic_write(path) as temporary, warnings.catch_warnings():
        # A name may have characters that no installed font has; they become boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.savefig(temporary, dpi=110, format="png")


def _shares(counts_KK: sparse.csr_array, size: int) -> np.ndarray:
    """The confusion matrix with `size` classes per cell, each row (true classes) divided by its images: float64 (D,
    D)."""
    cells, side = counts_KK.tocoo(), -(-counts_KK.shape[0] // size)
    images_DD = np.zeros((side, side))
    np.add.at(images_DD, (cells.row // size, cells.col // size), cells.data)
    return images_DD / np.maximum(images_DD.sum(axis=1, keepdims=True), 1)


def _label(axes: Axes, classes: Sequence[str]) -> None:
    from pycls_fast.train.contact_sheet import font_families

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


_MOST_TILES, _TILE_SIDE = 200, 176


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

    `classes` are the rows of `classes.json`; images are converted as for the network.
    """
    found, picture = result.predictions, None
    outcomes: Iterable[tuple[Iterable[int], dict[int, float]]]
    if source.label_sets is None:
        picture = index.with_name("confusion.png")
        # The page has a title, which may be a path that is longer than the picture.
        draw_confusion(confusion(found, len(source.classes)), source.classes, picture, title="")
        wrong_M = mistakes(found, len(source.classes))
        columns = (x[wrong_M].tolist() for x in (found.labels_N, found.predicted_N, found.probabilities_N))
        outcomes = (([label], {guess: p}) for label, guess, p in zip(*columns, strict=True))
    else:
        true_NK, scores_NK = of_sets(result, source)
        wrong_M = set_mistakes(true_NK, scores_NK)
        rows = zip(true_NK[wrong_M], sigmoid(scores_NK[wrong_M]), strict=True)
        outcomes = ((np.flatnonzero(own_K), {k: p for k, p in enumerate(p_K) if p > 0.5}) for own_K, p_K in rows)
    html = render(
        "train/report.html.j2",
        title=title,
        facts=facts,
        confusion=None if picture is None else data_url(picture.read_bytes(), "png"),
        classes=classes,
        wrong=len(wrong_M),
        tiles=list(_tiles(source, found.indices_N[wrong_M], outcomes, convert)),
    )
    write_text(index, html, key="report")


def _tiles(
    source: Images,
    indices_M: np.ndarray,
    outcomes: Iterable[tuple[Iterable[int], dict[int, float]]],
    convert: Conversion,
) -> Iterator[dict[str, Any]]:
    """What the page shows of each of the first images that can be read: labels, and the predicted classes with their
    probabilities."""
    for index, (labels, guesses) in islice(zip(indices_M.tolist(), outcomes, strict=True), _MOST_TILES):
        if (picture := small_picture(source, index, convert)) is not None:
            yield {
                "data": picture,
                "name": source.name(index),
                "labels": [source.classes[label] for label in labels],
                "guesses": {source.classes[label]: float(p) for label, p in guesses.items()},
            }


def small_picture(source: Images, index: int, convert: Conversion) -> str | None:
    """A data URL of an image, as large as pages show it; None if it cannot be read."""
    # matplotlib, whose fonts it uses, is slow to import.
    from pycls_fast.train.contact_sheet import tile

    try:
        image = decode(source.read(index), convert)
    except (DamagedImage, OSError):
        return None
    # Enlarged pixels are small as PNG and ugly as JPEG, photographs the other way round.
    kind = "png" if max(image.size) * 3 <= _TILE_SIDE else "jpeg"
    tile(image, _TILE_SIDE).save(buffer := io.BytesIO(), format=kind, quality=85)
    return data_url(buffer.getvalue(), kind)


def data_url(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


_MOST_PICTURES = 32
_PICTURES = {
    "curves.png": "Loss, accuracy, learning rate and speed",
    "confusion.png": "True and predicted classes",
    "first_batch.jpg": "Training images as the network got them in the first step",
}
_FILES = {
    "best.safetensors": "the best weights",
    "checkpoints": "to resume from",
    "config.yaml": "every setting",
    "environment.json": "versions and hardware",
    "log.txt": "what was printed",
    "metrics.jsonl": "all numbers",
    "summary.json": "the scores",
    "classes.json": "the scores of each class",
    "predictions.npz": "the prediction for each image",
}


def render(template: str, **values: Any) -> str:
    """A page from a template of the package; everything that is shown is escaped, unless it is marked as safe."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parents[1]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.get_template(template).render(values)


def write_page(run: Run, summary: Mapping[str, Any]) -> None:
    """Write `index.html` into the run's folder, from the values of `summary.json` and the files that are there."""
    folder, config = run.folder, run.config
    final, best, metric = summary["final"], summary["best"], config.schedule.best_metric
    scored = [] if best is None else [("best, by " + metric, best), ("last", final)]
    facts = {
        "state": f"stopped by {summary['stopped']}" if summary["stopped"] else "done",
        **{name: f"{scores_text(record)} at epoch {epochs(record['epoch'])}" for name, record in scored},
        "model": f"{config.model.called}, {human(summary['parameters'])} parameters",
        "weights": config.weights or "random",
        "trained": f"{summary['steps']:,} steps, {epochs(summary['epochs'])} epochs",
        "time": duration(summary["wall_seconds"]),
        "device": summary["device"],
    }
    # The summary is written last.
    written = {path.name for path in folder.path.iterdir()} | {"summary.json"}
    what, kinds = f"{folder.path}: environment.json or classes.json is damaged", (OSError, ArithmeticError, ValueError)
    with refusing(what, *kinds, LookupError, TypeError, TemplateError, use="remove it"):
        if "environment.json" in written:
            facts["command"] = read_json(folder.path / "environment.json")["command"]
        html = render(
            "train/run.html.j2",
            title=f"{config.config_name}: {folder.path.name}",
            facts=facts,
            classes=read_json(folder.path / "classes.json")["classes"] if "classes.json" in written else [],
            pictures={name: text for name, text in _PICTURES.items() if name in written},
            files={name: text for name, text in _FILES.items() if name in written},
        )
    folder.write_text("index.html", html)


def draw_batch(run: Run, batch: Batch) -> None:
    """Draw the first microbatch of the run's first step as the network gets it: cropped, erased, mixed."""
    # matplotlib, whose fonts it uses, is slow to import.
    from pycls_fast.train.contact_sheet import Cell, write_sheets

    step, data = run.step, run.config.data
    images_BCHW, targets = step.inputs(0, 0, batch)
    mean_C11, std_C11 = (torch.tensor(values).reshape(-1, 1, 1) for values in (data.mean, data.std))
    shown_BCHW = images_BCHW[:_MOST_PICTURES].float().cpu() * std_C11 + mean_C11
    images_BHWC = (shown_BCHW * 255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()
    names, others = _names(run.classes, targets.labels_B), list[list[str]]()
    if targets.mixed_B is not None:
        share = 1.0 - float(targets.lam)
        others = [[f"and {share:.0%} {name}"] for name in _names(run.classes, targets.mixed_B)]
    cells = [
        Cell(Image.fromarray(image), name, lines)
        for image, name, lines in zip(images_BHWC, names, others or repeat([]), strict=False)
    ]
    file = run.folder.path / "first_batch.jpg"
    with writing(file):
        write_sheets(cells, file, columns=8, side=128)


def _names(classes: Sequence[str], labels: Tensor) -> list[str]:
    """The class of each image, (B,), or the classes, (B, K)."""
    if labels.ndim == 1:
        return [classes[label] for label in labels.tolist()]
    return [", ".join(classes[k] for k in row.nonzero()[:, 0].tolist()) for row in labels.cpu()]
