"""Reading what a comparison needs from a run folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pycls_fast import build
from pycls_fast.config.saved import saved_in_run, validate_saved
from pycls_fast.data import Source, is_drawn
from pycls_fast.errors import UserError
from pycls_fast.our_files import checkpoints
from pycls_fast.paths import user_path
from pycls_fast.train.evaluation import Predictions
from pycls_fast.train.run_folder import RunFolder

Record = dict[str, Any]


@dataclass(frozen=True)
class RunFiles:
    """A run as it is on disk, finished or not.

    Attributes:
        path: the run folder.
        config: plain values, as saved.
        records: the lines of `metrics.jsonl`.
        summary: None until the run is finished.
        environment: command, versions, commit and machine of its latest start; empty if they were not saved.
        classes: names; None if neither a checkpoint nor the data has them.
        predictions: of the latest evaluation; None before the first.
        source: the images of the latest evaluation; None if they can no longer be opened, or have changed.
        missing: why there is no `source`.
        changed: whether the images have changed since the evaluation.
    """

    path: Path
    config: Mapping[str, Any]
    records: list[Record]
    summary: Record | None
    environment: Mapping[str, Any]
    classes: tuple[str, ...] | None
    predictions: Predictions | None
    source: Source | None = field(repr=False)
    missing: str | None = None
    changed: bool = False

    @property
    def evaluations(self) -> list[Record]:
        """Evaluations of the weights that were evaluated last: the average if there is one."""
        found = [r for r in self.records if r["kind"] == "eval"]
        return [r for r in found if (r["split"], r["weights"]) == (found[-1]["split"], found[-1]["weights"])]


def read_run_files(text: str) -> RunFiles:
    """Read a run folder.

    Raises:
        UserError: it is not a run folder, or its files are damaged.
    """
    folder = RunFolder(user_path(text))
    saved = saved_in_run(folder.path)
    summary, environment = (_json(folder.path / name) for name in ("summary.json", "environment.json"))
    state = _newest_state(folder)
    predictions = Predictions.load(folder.predictions) if folder.predictions.is_file() else None
    splits, missing = _splits(saved.values, str(saved.file))
    source = splits.get("val")
    classes = state.get("classes") or (source.classes if source is not None else None)
    changed = source is not None and predictions is not None and not _same_images(splits, predictions, state)
    if changed:
        source, missing = None, "the images have changed since the evaluation"
    return RunFiles(
        path=folder.path,
        config=saved.values,
        records=list(folder.records()),
        summary=summary,
        environment=environment or {},
        classes=None if classes is None else tuple(classes),
        predictions=predictions,
        source=source,
        missing=missing,
        changed=changed,
    )


def _json(file: Path) -> Record | None:
    try:
        record = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    except ValueError as error:
        what = " ".join(str(error).split())
        raise UserError(f"{file}: cannot be read ({what}); remove it to compare without it") from error
    if not (record is None or isinstance(record, dict)):
        raise UserError(f"{file}: not an object; remove it to compare without it")
    return record


def _newest_state(folder: RunFolder) -> Record:
    """What the newest readable checkpoint has besides tensors; empty if there is none."""
    for checkpoint in checkpoints(folder.checkpoints):
        try:
            state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(state, dict):
            return state
    return {}


def _same_images(splits: Mapping[str, Source], predictions: Predictions, state: Record) -> bool:
    """Whether these are the images that were evaluated, as far as labels and, if split at random, names tell."""
    source, indices_N = splits["val"], predictions.indices_N
    if len(indices_N) and indices_N.max() >= len(source):
        return False
    labels = getattr(source, "labels", None)
    if labels is not None and (np.asarray(labels)[indices_N] != predictions.labels_N).any():
        return False
    # A random split of other images has other ones in both parts.
    names = state.get("train_names")
    return names is None or not is_drawn(source) or names == build.names_id(splits["train"])


def _splits(config: Mapping[str, Any], where: str) -> tuple[Mapping[str, Source], str | None]:
    """The run's own images by split, or why they cannot be opened; the device of its training is not needed."""
    here: dict[str, Any] = {
        # Nothing is built but the data.
        "imports": [],
        "run_dir": None,
        "weights": None,
        "parallel": {"name": "single"},
        "runtime": {"device": "cpu"},
    }
    try:
        checked = validate_saved({**config, **here}, where)
        with build.world(checked) as world:
            return build.sources(checked, world), None
    except UserError as error:
        return {}, error.lines[0]
    except OSError as error:
        return {}, str(error)
