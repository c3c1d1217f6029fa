"""The page of wrong predictions over all folds of a cross-validation: `pycls-fast runs RUN... report=FOLDER`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pycls_fast.data.sources.base import Subset
from pycls_fast.errors import UserError
from pycls_fast.ledger.compare import read_run_files
from pycls_fast.ledger.runs import find_runs
from pycls_fast.train.by_class import class_scores
from pycls_fast.train.evaluate import Evaluation, Predictions
from pycls_fast.train.folder import output_file
from pycls_fast.train.pictures import write_report


def report_folds(folders: Sequence[str], report: str) -> None:
    """Write the page of `pycls-fast test report=FOLDER` for the images of all folds, each with the last prediction of
    the run that was not trained on it.

    Raises:
        UserError: these are not runs of different folds of the same images, these have changed or have several labels,
            or the page cannot be written.
    """
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
    columns = zip(*(vars(part).values() for part in parts), strict=True)
    found = Predictions(*map(np.concatenate, columns))
    # Settings may differ: some are chosen anew by each run.
    if len(wholes) > 1 or len(np.unique(found.indices_N)) < len(found.indices_N):
        raise UserError("report: these are not runs of different folds of the same images; give those alone")
    scores, top1 = class_scores(found, whole.classes), 100.0 * float(found.right.mean())
    facts = {
        "runs": ", ".join(str(each.run.path) for each in files),
        "images": f"{len(found.indices_N):,} of {len(whole):,}",
        "top-1": f"{top1:.2f}%",
        "F1, mean of the classes": f"{scores['f1']:.2f}%",
    }
    result = Evaluation(top1, np.nan, None, len(found.indices_N), found)
    title, classes, how = f"{whole.where}: {len(files)} folds", scores["classes"], files[0].conversion
    write_report(index, result, whole, title, list(facts.items()), classes=classes, convert=how)
    print(f"page: {index}")
