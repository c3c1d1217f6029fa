"""Two runs side by side: settings, results, the images on which they disagree, and cost.

`pycls-fast compare` prints a table, and writes `compare.json` and a page. The runs of a cross-validation have a page of
the wrong predictions of all folds, `pycls-fast runs RUN... report=FOLDER`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pycls_fast import build
from pycls_fast.config.reuse import as_data, validate_saved
from pycls_fast.config.saved import SavedConfig
from pycls_fast.data.sources.base import Images, Subset
from pycls_fast.data.to_rgb import Conversion
from pycls_fast.errors import DONE, UserError, first_line, refusing
from pycls_fast.files import RUNS, timestamp, user_path
from pycls_fast.ledger.report.comparison import comparison_page, curve, print_comparison
from pycls_fast.ledger.report.statistics import pair_images
from pycls_fast.ledger.runs import NOT_SET, PLACE_KEYS, SavedRun, Values, find_runs, read_run, read_values, texts
from pycls_fast.speed import SWITCHES
from pycls_fast.train.by_class import class_scores
from pycls_fast.train.display import SCORES
from pycls_fast.train.environment import environment_command, versions
from pycls_fast.train.evaluate import Evaluation, Predictions
from pycls_fast.train.folder import RunFolder, nan_to_none, output_file, write_json, write_text
from pycls_fast.train.pictures import small_picture, write_report

Record = dict[str, Any]

_SUMMARY_KEYS = ("step_seconds_p50", "wall_seconds", "parameters", "forward_flops_per_image", "world_size", "device")
# Other tables show the command, ranks and device; the memory size differs by a page from boot to boot.
_NOT_COMPARED = {"command", "world_size", "device", "memory_bytes"}


def compare_runs(run_a: str, run_b: str, *, output: str | None, images: int) -> int:
    """Compare two run folders, write and print the result; returns the exit status.

    Without `output` they go to `runs/compare/`. At most `images` of each kind of disagreement are shown. A `UserError`
    if a folder does not hold a run, or `output` cannot be written to.
    """
    a, b = read_run_files(run_a), read_run_files(run_b)
    folder = user_path(output) if output else Path(RUNS, "compare", timestamp())
    record = comparison(a, b, images)
    with refusing(f"output: {folder} cannot be written to", use="give another"):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "compare.json", record)
    write_text(folder / "index.html", comparison_page(record, _pictures(a, b, record)))
    print_comparison(record)
    print(f"page: {folder / 'index.html'}")
    return DONE


def comparison(a: RunFiles, b: RunFiles, images: int) -> Record:
    """The whole record; if `images` (the comparison image by image) is None, `not_paired` says why."""
    reason = why_not_paired(a, b)
    cards = {f"speed.{switch.name}": switch.numerics for switch in SWITCHES.values()}
    settings = differing(a.run.config, b.run.config, PLACE_KEYS)
    known = bool(a.environment and b.environment)
    return {
        "kind": "comparison",
        "time": time.time(),
        "command": environment_command(),
        "versions": versions(),
        "a": _run(a),
        "b": _run(b),
        # The class of a switch's numerics; None for other keys.
        "settings": [row | {"class": cards.get(row["key"])} for row in settings],
        "environment": differing(a.environment, b.environment, _NOT_COMPARED) if known else [],
        "not_paired": reason,
        "without_pictures": (a.missing if a.source is None else None) and b.missing,
        "images": None if reason is not None else compare_images(a, b, images),
    }


def differing(a: Mapping[str, Any], b: Mapping[str, Any], left_out: set[str]) -> list[Record]:
    """Keys whose values differ, as `{key, a, b}`, in the order of the file; "-" for a key that one lacks."""
    first, second = texts(a), texts(b)
    return [
        {"key": key, "a": first.get(key, NOT_SET), "b": second.get(key, NOT_SET)}
        for key in dict.fromkeys((*first, *second))
        if key not in left_out and first.get(key, NOT_SET) != second.get(key, NOT_SET)
    ]


@dataclass(frozen=True)
class RunFiles:
    """A run, finished or not, with what a comparison needs besides.

    Attributes:
        environment: command, versions, commit and machine of its latest start; empty if they were not saved.
        classes: names; None if neither a checkpoint nor the data has them.
        predictions: of the latest evaluation; None before the first.
        source: the images of the latest evaluation; None if they can no longer be opened, or have changed.
        missing: why there is no `source`.
    """

    run: SavedRun
    environment: Mapping[str, Any]
    classes: tuple[str, ...] | None
    predictions: Predictions | None
    source: Images | None
    missing: str | None = None

    @property
    def conversion(self) -> Conversion:
        data = self.run.config["data"]
        return Conversion(data["exif_orientation"], data["transparent"] == "white")


def read_run_files(text: str) -> RunFiles:
    """Read a run folder. A `UserError` if it is none, or its files are damaged."""
    run = read_run(user_path(text))
    file = RunFolder(run.path).predictions
    predictions = Predictions.load(file) if file.is_file() else None
    source, missing = _images(run)
    classes = run.newest.get("classes") or (source.classes if source is not None else None)
    if source is not None and predictions is not None and not _were_evaluated(source, predictions):
        source, missing = None, "the images have changed since the evaluation"
    environment = read_values(run.path / "environment.json") or {}
    return RunFiles(run, environment, None if classes is None else tuple(classes), predictions, source, missing)


def _were_evaluated(source: Images, predictions: Predictions) -> bool:
    """Whether these are the images that were evaluated, as far as their labels tell."""
    indices_N = predictions.indices_N
    if len(indices_N) and indices_N.max() >= len(source):
        return False
    # Of several labels the predictions have one.
    return source.label_sets is not None or not (source.labels[indices_N] != predictions.labels_N).any()


def _images(run: SavedRun) -> tuple[Images | None, str | None]:
    """The run's evaluated images, or why they cannot be opened; the device of its training is not needed."""
    # Nothing is built but the data.
    here: dict[str, Any] = {"run_dir": None, "weights": None}
    here |= {"parallel": {"name": "single"}, "runtime": {"device": "cpu"}}
    file = run.path / "config.yaml"
    try:
        checked = validate_saved({**as_data(SavedConfig(run.config, file), {"imports": "[]"}), **here}, str(file))
        return build.sources(checked, build.alone(checked))["val"], None
    except (UserError, OSError) as error:
        return None, first_line(error)


def _run(files: RunFiles) -> Record:
    """What is known about one run; numbers that it does not have yet are None."""
    run = files.run
    train = [record for record in run.records if record["kind"] == "train"]
    last: Values = run.evaluations[-1] if run.evaluations else {}
    summary, newest = run.summary or {}, train[-1] if train else {}
    return {
        "path": str(run.path),
        "config_name": run.config.get("config_name"),
        "environment": dict(files.environment),
        "finished": run.summary is not None,
        **{key: last.get(key) for key in (*SCORES, "loss", "count")},
        **{key: run.numbers[key] for key in ("best_top1", "images_per_second", "epoch")},
        "memory_peak_bytes": summary.get("memory_peak_bytes", newest.get("memory_peak_bytes")),
        **{key: summary.get(key) for key in _SUMMARY_KEYS},
        "changes": _changes(run.records),
        "curve": curve(train),
        "evaluations": [{key: record[key] for key in ("epoch", "top1", "loss")} for record in run.evaluations],
    }


def _changes(records: Sequence[Values]) -> list[Record]:
    """The settings that were changed when a run was resumed, as `{step, epoch, changed}`, without undone steps."""
    found: list[Record] = []
    for record in records:
        if record.get("event") == "resumed":
            # Steps after a checkpoint are trained again.
            found = [earlier for earlier in found if earlier["step"] < record["step"]]
            found.append({key: record[key] for key in ("step", "epoch", "changed")})
    return [each for each in found if each["changed"]]


def _pictures(a: RunFiles, b: RunFiles, record: Record) -> dict[int, str]:
    """Addresses of the images of the disagreements by index, as far as they can still be read."""
    files, found = a if a.source is not None else b, record["images"]
    if files.source is None or found is None:
        return {}
    indices = [each["index"] for each in (*found["only_a"], *found["only_b"])]
    made = {index: small_picture(files.source, index, files.conversion) for index in indices}
    return {index: picture for index, picture in made.items() if picture is not None}


def why_not_paired(a: RunFiles, b: RunFiles) -> str | None:
    """Why the two runs cannot be compared image by image; None if they can."""
    one, two = a.predictions, b.predictions
    if one is None or two is None:
        return f"{'A' if one is None else 'B'} has no predictions yet: it has not been evaluated"
    if a.classes is not None and b.classes is not None and a.classes != b.classes:
        others = sorted({*a.classes} ^ {*b.classes})
        return f"their classes differ: A has {len(a.classes)}, B has {len(b.classes)} ({', '.join(others[:3])})"
    # Evaluations of single labels have no such score.
    if any("map" in record for files in (a, b) for record in files.run.evaluations):
        return "their images have several labels"
    if a.source is not None and b.source is not None:
        names, others = _names(a.source), _names(b.source)
        if len(names) != len(others):
            return f"they were evaluated on different images: {len(names):,} and {len(others):,}"
        place = next((i for i, name in enumerate(names) if name != others[i]), None)
        if place is not None:
            return f"they were evaluated on different images: A has {names[place]} where B has {others[place]}"
    one, two = one.shared(two)
    wrong = int((one.labels_N != two.labels_N).sum())
    return f"they were evaluated on different images: the true class differs for {wrong:,}" if wrong else None


def compare_images(a: RunFiles, b: RunFiles, most: int) -> Record:
    """`pair`, `classes`, `only_a`, `only_b` (at most `most` images each, the clearest first), `both_wrong` and more.

    Images that one of the two could not read are left out of both.
    """
    mine, others = a.predictions, b.predictions
    assert mine is not None
    assert others is not None
    one, two = mine.shared(others)
    labels_N, first_N, second_N = one.labels_N, one.predicted_N, two.predicted_N
    losses_N2 = np.stack([one.losses_N, two.losses_N], axis=1)
    right_N2 = np.stack([one.right, two.right], axis=1)
    wrong_N = ~right_N2.any(axis=1)
    classes = a.classes or b.classes or ()
    source = a.source or b.source

    def images(winner: int) -> list[Record]:
        chosen = np.flatnonzero(right_N2[:, winner] & ~right_N2[:, 1 - winner])
        # Largest if the winner was sure and the other was far off.
        gap = losses_N2[chosen, 1 - winner] - losses_N2[chosen, winner]
        return [
            {
                "index": (index := int(one.indices_N[i])),
                "name": source.name(index) if source is not None else None,
                "class": class_name(classes, labels_N[i]),
                "a": class_name(classes, first_N[i]),
                "b": class_name(classes, second_N[i]),
                "loss_a": nan_to_none(float(losses_N2[i, 0])),
                "loss_b": nan_to_none(float(losses_N2[i, 1])),
            }
            for i in chosen[np.argsort(-gap, kind="stable")][:most].tolist()
        ]

    return {
        "pair": pair_images(labels_N, first_N, second_N),
        "left_out": len(mine.indices_N) + len(others.indices_N) - 2 * len(labels_N),
        "both_wrong": int(wrong_N.sum()),
        "both_wrong_otherwise": int((wrong_N & (first_N != second_N)).sum()),
        "classes": _by_class(classes, labels_N, right_N2),
        "only_a": images(0),
        "only_b": images(1),
    }


def class_name(classes: Sequence[str], label: int) -> str:
    """The name of a class; "none" if the scores were not finite."""
    return "none" if label < 0 else classes[label] if label < len(classes) else f"class {label}"


def _by_class(classes: Sequence[str], labels_N: np.ndarray, right_N2: np.ndarray) -> list[Record]:
    """Accuracy of each class in percent, those that changed most first."""
    found: list[Record] = []
    for label in np.unique(labels_N).tolist():
        rows_M2 = right_N2[labels_N == label]
        a, b = (100.0 * rows_M2.mean(axis=0)).tolist()
        name = class_name(classes, label)
        found.append({"class": name, "images": len(rows_M2), "a": a, "b": b, "difference": b - a})
    return sorted(found, key=lambda row: -abs(row["difference"]))


def _names(source: Images) -> list[str]:
    """The images' names without their common folder, as the data may have been moved."""
    names = [source.name(index) for index in range(len(source))]
    # A table may mix relative and absolute paths, which have no common folder.
    with suppress(ValueError):
        common = os.path.commonpath({name.rpartition(os.sep)[0] for name in names}) + os.sep
        names = [name.removeprefix(common) for name in names]
    return names


def report_folds(folders: Sequence[str], report: str) -> None:
    """Write the page of `pycls-fast test report=FOLDER` for the images of all folds, each with the last prediction of
    the run that was not trained on it. A `UserError` if these are not runs of different folds of the same images, these
    have changed or have several labels, or the page cannot be written."""
    index = output_file(f"{report}/index.html", key="report")
    files = [read_run_files(str(path)) for path in find_runs(folders)]
    parts: list[Predictions] = []
    wholes = set()
    for each in files:
        if not isinstance(each.source, Subset) or each.predictions is None or each.source.label_sets is not None:
            reason = each.missing or "they have several labels, have not been evaluated, or are no fold"
            raise UserError(f"report: the images of {each.run.path} cannot be shown: {reason}")
        whole, rows_M = each.source.source, each.source.rows[each.predictions.indices_N]
        wholes.add((whole.where, whole.classes, len(whole)))
        parts.append(replace(each.predictions, indices_N=rows_M.astype(np.int64)))
    found = Predictions(*map(np.concatenate, zip(*(vars(part).values() for part in parts), strict=True)))
    # Settings may differ: some are chosen anew by each run.
    if len(wholes) > 1 or len(np.unique(found.indices_N)) < len(found.indices_N):
        raise UserError("report: these are not runs of different folds of the same images; give those alone")
    scores, top1 = class_scores(found, whole.classes), 100.0 * float(found.right.mean())
    facts = {
        "runs": ", ".join(str(each.run.path) for each in files),
        "images": f"{len(found.indices_N):,} of {len(whole):,}",
        "top-1": f"{top1:.2f}%",
        "balanced accuracy": f"{scores['class_top1']:.2f}%",
        "F1, mean of the classes": f"{scores['f1']:.2f}%",
    }
    result = Evaluation(top1, np.nan, None, len(found.indices_N), found)
    title, classes, how = f"{whole.where}: {len(files)} folds", scores["classes"], files[0].conversion
    write_report(index, result, whole, title, list(facts.items()), classes=classes, convert=how)
    print(f"page: {index}")
