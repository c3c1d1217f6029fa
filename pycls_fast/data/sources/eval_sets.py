"""Further test sets for ImageNet classifiers: ReaL, V2, A, R and Sketch, each with its own rule of what is right.

Classes are matched by WordNet ids, which ImageNet's own class folders are named by.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pycls_fast.data.sources.base import Images, Subset
from pycls_fast.data.sources.files import read_lines
from pycls_fast.data.sources.folders import VAL_NUMBER, scan_classes, subfolders
from pycls_fast.data.sources.index import CachePolicy
from pycls_fast.errors import UserError, first_few, refusing
from pycls_fast.reading import read_json

_WNID = re.compile(r"n\d{8}")


@dataclass(frozen=True)
class EvalSet:
    """A test set and its scoring rule."""

    source: Images
    rule: str | None = None
    """A short description; None: the most probable class, as usual."""
    among: np.ndarray | None = None
    """int64, the outputs that count, ascending; None for all."""
    answers_NM: np.ndarray | None = None
    """int64, all correct classes of each image, padded with -1; None if only the label is correct."""


def open_eval_set(
    name: str, root: str | Path, *, classes: Sequence[str], wnids: str | Path | None, val: Images | None
) -> EvalSet:
    """Open one of the sets: "real", "v2", "a", "r" or "sketch".

    Args:
        root: the folder of the set, for "real" `real.json` or its folder.
        classes: the model's, in the order of its outputs.
        wnids: a file with the WordNet ids of the outputs, one per line (anything after them is ignored), if `classes`
            have other names.
        val: ImageNet's validation images, which "real" has labels for.
    """
    root = Path(root)
    ids = _wnids_of_outputs(classes, wnids)
    if name == "real":
        assert val is not None
        return _open_real(root, classes, ids, val)
    with refusing(f"data.eval_root: {root.absolute()} cannot be read"):
        folders = subfolders(root)
    # The class folders may be in the only folder (`sketch/`, `imagenet-a/`).
    folder = root / folders[0] if len(folders) == 1 and subfolders(root / folders[0]) else root
    scanned = scan_classes(folder, CachePolicy("off"))
    if name == "v2" and all(own.isdecimal() for own in scanned.classes):
        output_of = {str(number): output for number, output in enumerate(_standard_order(classes, ids).tolist())}
    elif ids is not None:
        output_of = {wnid: output for output, wnid in enumerate(ids)}
    else:
        raise UserError(
            f"data.wnids: not set; {folder} has folders of WordNet ids and the model's classes have other names "
            f"({first_few(classes, 2)}): give a file with the outputs' ids, one per line"
        )
    unknown = [own for own in scanned.classes if own not in output_of]
    if unknown:
        raise UserError(f"data.eval_root: {folder}: the model has no class {first_few(unknown)}")
    outputs = np.array([output_of[own] for own in scanned.classes], dtype=np.int64)
    source = Subset(scanned, classes=classes, new_label=outputs.astype(np.int32))
    if name in ("a", "r"):
        return EvalSet(source, f"best of the set's {len(outputs):,} classes", among=np.sort(outputs))
    return EvalSet(source, f"best of all {len(classes):,} classes")


def _open_real(root: Path, classes: Sequence[str], ids: Sequence[str] | None, val: Images) -> EvalSet:
    file = root / "real.json" if root.is_dir() else root
    order = _standard_order(classes, ids)
    what = f"data.eval_root: {file} cannot be read as ReaL's labels, lists of the model's classes"
    with refusing(what, OSError, ValueError, TypeError, IndexError):
        answers = dict(enumerate((order[np.array(own, dtype=np.int64)] for own in read_json(file)), start=1))
        answers_NM = np.full((len(val), max(map(len, answers.values()), default=1) or 1), -1, dtype=np.int64)
        for index in range(len(val)):
            match = VAL_NUMBER.search(val.name(index))
            if match is None or int(match[1]) not in answers:
                raise ValueError(f"it has labels for ILSVRC2012_val_00000001 and so on, none for {val.name(index)}")
            own = answers[int(match[1])]
            answers_NM[index, : len(own)] = own
    return EvalSet(val, "best class is any of the image's ReaL labels", answers_NM=answers_NM)


def _wnids_of_outputs(classes: Sequence[str], wnids: str | Path | None) -> tuple[str, ...] | None:
    """The WordNet id of each output, where known."""
    if wnids is None:
        return tuple(classes) if all(_WNID.fullmatch(name) for name in classes) else None
    file = Path(wnids)
    ids = tuple(line.split()[0] for line in read_lines(file)) if file.is_file() else ()
    if not all(map(_WNID.fullmatch, ids)) or not len(ids) == len(set(ids)) == len(classes):
        raise UserError(
            f"data.wnids: {file}: expected one id per line, like n01440764, in the order of the {len(classes):,} "
            f"outputs; got {first_few(ids, 2)}"
        )
    return ids


def _standard_order(classes: Sequence[str], ids: Sequence[str] | None) -> np.ndarray:
    """The output of the k-th of the sorted WordNet ids; without ids the outputs are taken to be in that order."""
    return np.argsort(np.array(ids)) if ids is not None else np.arange(len(classes))


def imagenet_wnids() -> tuple[str, ...]:
    """ImageNet-1k's 1,000 WordNet ids in the order of every published model's outputs."""
    from timm.data import ImageNetInfo

    return tuple(ImageNetInfo("imagenet-1k").label_names())
