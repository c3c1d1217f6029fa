"""Reading what a comparison needs from a run folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pycls_fast import build
from pycls_fast.config.saved import of_run, saved_config
from pycls_fast.data import Source
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
        source: the images of the latest evaluation; None if they can no longer be opened.
        missing: why there is no `source`.
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

    @property
    def evaluations(self) -> list[Record]:
        """Evaluations of the weights that were evaluated last: the average if there is one."""
        found = [r for r in self.records if r["kind"] == "eval"]
        return [r for r in found if (r["split"], r["weights"]) == (found[-1]["split"], found[-1]["weights"])]


def read_run(text: str) -> RunFiles:
    """Read a run folder.

    Raises:
        UserError: it is not a run folder, or its files are damaged.
    """
    folder = RunFolder(user_path(text))
    saved = of_run(folder.path)
    summary, environment = (_json(folder.path / name) for name in ("summary.json", "environment.json"))
    source, missing = _source(saved.values, str(saved.file))
    return RunFiles(
        path=folder.path,
        config=saved.values,
        records=list(folder.records()),
        summary=summary,
        environment=environment or {},
        classes=_classes(folder) or (source.classes if source is not None else None),
        predictions=Predictions.load(folder.predictions) if folder.predictions.is_file() else None,
        source=source,
        missing=missing,
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


def _classes(folder: RunFolder) -> tuple[str, ...] | None:
    for checkpoint in checkpoints(folder.checkpoints):
        try:
            return tuple(json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))["classes"])
        except (OSError, ValueError, KeyError):
            continue
    return None


def _source(config: Mapping[str, Any], where: str) -> tuple[Source | None, str | None]:
    """The run's own evaluation images, or why they cannot be opened; the device of its training is not needed."""
    here: dict[str, Any] = {
        # Nothing is built but the data.
        "imports": [],
        "run_dir": None,
        "weights": None,
        "parallel": {"name": "single"},
        "runtime": {"device": "cpu"},
    }
    try:
        checked = saved_config({**config, **here}, where)
        with build.world(checked) as world:
            return build.sources(checked, world)["val"], None
    except UserError as error:
        return None, error.lines[0]
    except OSError as error:
        return None, str(error)
