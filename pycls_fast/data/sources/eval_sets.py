"""Further test sets for ImageNet classifiers, in their published layouts.

| set    | layout                                                 | scored as published                                |
|--------|--------------------------------------------------------|----------------------------------------------------|
| real   | `real.json`: for each validation image all its classes | right when the best class is any of them; images   |
|        | (Beyer et al. 2020, Are we done with ImageNet?)        | without one are left out                           |
| v2     | folders 0 to 999, in the order of sorted WordNet ids   | as ImageNet (Recht et al. 2019)                    |
| a, r   | folders of 200 WordNet ids                             | the best of the set's 200 classes (Hendrycks et    |
|        |                                                        | al. 2021: Natural adversarial examples; The many   |
|        |                                                        | faces of robustness)                               |
| sketch | folders of WordNet ids, perhaps below `sketch/`        | as ImageNet (Wang et al. 2019)                     |
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pycls_fast.data.sources.base import LabelledSource, Source
from pycls_fast.data.sources.folders import VAL_NUMBER, scan_classes, subfolders
from pycls_fast.data.sources.index import CachePolicy
from pycls_fast.data.sources.labels import read_lines
from pycls_fast.data.sources.splits import Relabelled
from pycls_fast.errors import UserError, first_few

_WNID = re.compile(r"n\d{8}")


@dataclass(frozen=True)
class EvalSet:
    """A test set and its scoring rule."""

    source: Source
    rule: str
    """A short description."""
    among: np.ndarray | None = None
    """int64, the outputs that count, ascending; None for all."""
    answers_NM: np.ndarray | None = None
    """int64, all correct classes of each image, padded with -1; None if only the label is correct."""


def open_eval_set(
    name: str, root: str | Path, *, classes: Sequence[str], wnids: str | Path | None, val: Source | None
) -> EvalSet:
    """Open one of the sets.

    Args:
        name: "real", "v2", "a", "r" or "sketch".
        root: the folder of the set, for "real" `real.json` or its folder.
        classes: the model's, in the order of its outputs.
        wnids: a file with the WordNet ids of the outputs, one per line (anything after them is ignored), if `classes`
            have other names.
        val: ImageNet's validation images, which "real" has labels for.

    Raises:
        UserError: files that are missing or not of that set, classes that the model does not know.
    """
    root = Path(root)
    if not root.exists():
        raise UserError(f"data.eval_root: there is no {root.absolute()}")
    ids = _wnids_of_outputs(classes, wnids)
    if name == "real":
        if val is None:
            raise ValueError("the images of ReaL are ImageNet's validation images")
        return _open_real(root, classes, ids, val)
    folder = _class_folders(root)
    scanned = scan_classes(folder, CachePolicy("off"))
    if name == "v2" and all(own.isdecimal() for own in scanned.classes):
        labels = _standard_order(classes, ids)
        numbers = [int(own) for own in scanned.classes]
        beyond = [str(number) for number in numbers if number >= len(labels)]
        if beyond:
            raise UserError(
                f"data.eval_root: {folder}: no class of the model's {len(labels):,} for {first_few(beyond)}"
            )
        return EvalSet(_relabel(scanned, classes, labels[numbers]), f"best of all {len(classes):,} classes")
    return _open_wnids(name, folder, scanned, classes, ids)


def _open_wnids(
    name: str, folder: Path, scanned: LabelledSource, classes: Sequence[str], ids: Sequence[str] | None
) -> EvalSet:
    """Open a set whose folders are named by WordNet ids."""
    if ids is None:
        raise UserError(
            f"data.wnids: not set; {folder} has folders of WordNet ids and the model's classes have other names "
            f"({first_few(classes, 2)}): give a file with the outputs' ids, one per line"
        )
    output_of = {wnid: output for output, wnid in enumerate(ids)}
    unknown = [own for own in scanned.classes if own not in output_of]
    if unknown:
        raise UserError(f"data.eval_root: {folder}: the model has no class {first_few(unknown)}")
    outputs = np.array([output_of[own] for own in scanned.classes], dtype=np.int64)
    source = _relabel(scanned, classes, outputs)
    if name in ("a", "r"):
        return EvalSet(source, f"best of the set's {len(outputs):,} classes", among=np.sort(outputs))
    return EvalSet(source, f"best of all {len(classes):,} classes")


def _open_real(root: Path, classes: Sequence[str], ids: Sequence[str] | None, val: Source) -> EvalSet:
    file = root / "real.json" if root.is_dir() else root
    try:
        lists = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(lists, list) or not all(isinstance(own, list) for own in lists):
            raise ValueError("expected a list of lists of classes")
    except (OSError, ValueError) as error:
        raise UserError(f"data.eval_root: {file} cannot be read as ReaL's labels: {error}") from error
    order = _standard_order(classes, ids)
    largest = max((label for own in lists for label in own), default=-1)
    if largest >= len(order):
        raise UserError(f"data.eval_root: {file}: the model has {len(order):,} classes and none for {largest}")
    answers_NM = np.full((len(val), max(map(len, lists), default=1) or 1), -1, dtype=np.int64)
    for index in range(len(val)):
        match = VAL_NUMBER.search(val.name(index))
        if match is None:
            raise UserError(
                f"data.root: {val.name(index)}: ReaL numbers the validation images by their names, "
                "ILSVRC2012_val_00000001 and so on, which this one does not have"
            )
        number = int(match[1])
        if not 1 <= number <= len(lists):
            raise UserError(f"data.eval_root: {file} has {len(lists):,} images and none for {val.name(index)}")
        own = lists[number - 1]
        answers_NM[index, : len(own)] = order[own]
    return EvalSet(val, "best class is any of the image's ReaL labels", answers_NM=answers_NM)


def _class_folders(root: Path) -> Path:
    """The folder with the class folders: `root`, or the only folder in it (`sketch/`, `imagenet-a/`)."""
    folders = subfolders(root) if root.is_dir() else []
    if not folders:
        raise UserError(f"data.eval_root: {root.absolute()} holds no folders of classes")
    return root / folders[0] if len(folders) == 1 and subfolders(root / folders[0]) else root


def _wnids_of_outputs(classes: Sequence[str], wnids: str | Path | None) -> tuple[str, ...] | None:
    """The WordNet id of each output, where known."""
    if wnids is None:
        return tuple(classes) if all(_WNID.fullmatch(name) for name in classes) else None
    file = Path(wnids)
    try:
        lines = read_lines(file)
    except OSError as error:
        raise UserError(f"data.wnids: {file} cannot be read: {error.strerror or error}") from error
    except UserError as error:
        raise UserError(f"data.wnids: {error}") from error
    ids = tuple(line.split()[0] for line in lines)
    wrong = [wnid for wnid in ids if not _WNID.fullmatch(wnid)]
    if wrong or len(ids) != len(classes) or len(set(ids)) != len(ids):
        what = (
            f"{first_few(wrong)} is not a WordNet id"
            if wrong
            else f"{len(set(ids)):,} ids for {len(classes):,} outputs"
        )
        raise UserError(
            f"data.wnids: {file}: {what}; expected one per line, like n01440764, in the order of the outputs"
        )
    return ids


def _standard_order(classes: Sequence[str], ids: Sequence[str] | None) -> np.ndarray:
    """The output of the k-th of the sorted WordNet ids; without ids the outputs are taken to be in that order."""
    return np.argsort(np.array(ids)) if ids is not None else np.arange(len(classes))


def _relabel(source: LabelledSource, classes: Sequence[str], outputs: np.ndarray) -> Relabelled:
    return Relabelled(source, classes, outputs.astype(np.int32))
