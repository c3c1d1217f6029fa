"""ImageNet as downloaded: validation images in one folder, labels in the development kit or Kaggle's table."""

from __future__ import annotations

import csv
import io
import os
import re
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pycls_fast.data.sources.arrays import Texts
from pycls_fast.data.sources.files import EXTENSIONS, FileSource
from pycls_fast.errors import UserError, first_few

_DEVKIT = "ILSVRC2012_devkit_t12"
_GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
_META = "meta.mat"
_KAGGLE_TABLE = "LOC_val_solution.csv"
_KAGGLE_IMAGES = Path("ILSVRC/Data/CLS-LOC")
VAL_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})")
"""Finds the number of a validation image in its name."""


def kaggle_root(root: Path) -> Path:
    """The folder with train/ and val/ of Kaggle's archive, if `root` is that archive's; else `root`."""
    inner = root / _KAGGLE_IMAGES
    return inner if (inner / "train").is_dir() else root


def flat_validation(root: Path, classes: Sequence[str]) -> FileSource | None:
    """The validation images in `root` itself, in the order that class folders would give them.

    Labels come from Kaggle's `LOC_val_solution.csv` or the development kit (its folder, its two files, or the archive
    as downloaded), beside `root` or above it. None when `root` holds no images with ImageNet's names.

    Args:
        classes: WordNet ids of the training classes.

    Raises:
        UserError: no labels, or labels that do not fit.
    """
    with os.scandir(root) as entries:
        files = [entry.name for entry in entries if entry.name.lower().endswith(EXTENSIONS)]
    stems = {name: name.partition(".")[0] for name in files}
    numbered = [name for name, stem in stems.items() if VAL_NUMBER.fullmatch(stem)]
    if not numbered:
        return None
    strange = sorted(set(files) - set(numbered))
    if strange:
        raise UserError(f"{root}: {first_few(strange)}: not named like ImageNet's validation images; remove them")
    wnid_of, table = _labels(root)
    missing = sorted(stem for stem in stems.values() if stem not in wnid_of)
    if missing:
        raise UserError(f"{table} has no label for {first_few(missing)} in {root}")
    label_of = {wnid: label for label, wnid in enumerate(classes)}
    unknown = sorted({wnid_of[stem] for stem in stems.values()} - set(label_of))
    if unknown:
        raise UserError(f"{root}: there are no training images of the class {first_few(unknown)}, which {table} names")
    labelled = sorted((label_of[wnid_of[stem]], os.fsencode(name)) for name, stem in stems.items())
    labels = np.array([label for label, _ in labelled], dtype=np.int32)
    return FileSource(root, classes, Texts.of(name for _, name in labelled), labels)


def _labels(root: Path) -> tuple[Mapping[str, str], Path]:
    """Image name without extension -> WordNet id, and the file with that mapping."""
    for folder in (root, *root.absolute().parents[:4]):
        table = folder / _KAGGLE_TABLE
        if table.is_file():
            return _read_kaggle(table), table
        for place in (folder / _DEVKIT / "data", folder / "data", folder):
            truth, meta = place / _GROUND_TRUTH, place / _META
            if truth.is_file() and meta.is_file():
                return _read_devkit(truth.read_bytes(), meta.read_bytes(), truth), truth
            if truth.is_file():
                raise UserError(f"{truth} needs {_META} of the development kit beside it, which is not there")
        archive = folder / f"{_DEVKIT}.tar.gz"
        if archive.is_file():
            return _read_archive(archive), archive
    raise UserError(
        f"{root} holds ImageNet's validation images without class folders, and their labels are not there; put "
        f"{_DEVKIT}.tar.gz or {_KAGGLE_TABLE} beside {root.name}/, or sort the images into class folders"
    )


def _read_kaggle(table: Path) -> dict[str, str]:
    """`ImageId,PredictionString`, the second as "WNID x y x y", once for each box."""
    with table.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames is None or not {"ImageId", "PredictionString"} <= set(reader.fieldnames):
            raise UserError(f"{table}: expected the columns ImageId and PredictionString; got {reader.fieldnames}")
        return {row["ImageId"]: row["PredictionString"].split()[0] for row in reader if row["PredictionString"].strip()}


def _read_archive(archive: Path) -> dict[str, str]:
    try:
        with tarfile.open(archive) as tar:
            files = {
                Path(member.name).name: tar.extractfile(member)
                for member in tar.getmembers()
                if member.isfile() and Path(member.name).name in (_GROUND_TRUTH, _META)
            }
            contents = {name: file.read() for name, file in files.items() if file is not None}
    except (tarfile.TarError, OSError, EOFError) as error:
        raise UserError(f"{archive} cannot be read ({error}); download it again") from error
    if len(contents) < 2:
        raise UserError(f"{archive}: expected {_GROUND_TRUTH} and {_META} in it; download it again")
    return _read_devkit(contents[_GROUND_TRUTH], contents[_META], archive)


def _read_devkit(truth: bytes, meta: bytes, where: Path) -> dict[str, str]:
    """Line k of the ground truth is the `ILSVRC2012_ID` of image k; `meta.mat` has its WordNet id."""
    # Installed with scikit-learn, which the digits need.
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    try:
        synsets = loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
        wnid_of = {int(synset["ILSVRC2012_ID"]): str(synset["WNID"]) for synset in np.atleast_1d(synsets)}
        ids = [int(line) for line in truth.split()]
        return {f"ILSVRC2012_val_{number:08d}": wnid_of[own] for number, own in enumerate(ids, start=1)}
    except (MatReadError, ValueError, KeyError, IndexError, TypeError, NotImplementedError) as error:
        raise UserError(f"{where}: not the ground truth of ILSVRC2012 ({error!r}); download the kit again") from error
