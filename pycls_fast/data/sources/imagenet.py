"""ImageNet's validation images as they are downloaded: one folder, and the labels in Kaggle's table or the devkit."""

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
from pycls_fast.data.sources.files import EXTENSIONS, FileImages
from pycls_fast.errors import UserError, first_few
from pycls_fast.reading import read_bytes

VAL_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})")
"""Finds the number of a validation image in its name."""
_DEVKIT = "ILSVRC2012_devkit_t12"
_GROUND_TRUTH, _META = "ILSVRC2012_validation_ground_truth.txt", "meta.mat"
_KAGGLE_TABLE = "LOC_val_solution.csv"


def kaggle_root(root: Path) -> Path:
    """The folder with train/ and val/ of Kaggle's archive, if `root` is that archive's; else `root`."""
    inner = root / "ILSVRC/Data/CLS-LOC"
    return inner if (inner / "train").is_dir() else root


def flat_validation(root: Path, classes: Sequence[str]) -> FileImages | None:
    """The validation images in `root` itself, in the order that class folders would give them.

    Labels come from Kaggle's `LOC_val_solution.csv` or the development kit (its folder, or the archive as downloaded),
    beside `root` or above it. None when `root` holds no images with ImageNet's names.

    Args:
        classes: WordNet ids of the training classes.

    Raises:
        UserError: no labels, or labels that do not fit.
    """
    files = [entry.name for entry in os.scandir(root) if entry.name.lower().endswith(EXTENSIONS)]
    stems = {name: name.partition(".")[0] for name in files}
    if not any(VAL_NUMBER.fullmatch(stem) for stem in stems.values()):
        return None
    wnid_of, where = _labels(root)
    label_of = {wnid: label for label, wnid in enumerate(classes)}
    unknown = sorted(name for name, stem in stems.items() if wnid_of.get(stem) not in label_of)
    if unknown:
        raise UserError(f"{root}: {where} has no label of a training class for {first_few(unknown)}")
    labelled = sorted((label_of[wnid_of[stem]], os.fsencode(name)) for name, stem in stems.items())
    labels = np.array([label for label, _ in labelled], dtype=np.int32)
    return FileImages(root, classes, Texts.of(name for _, name in labelled), labels)


def _labels(root: Path) -> tuple[Mapping[str, str], Path]:
    """Image name without extension -> WordNet id, and where that is written."""
    for folder in (root, *root.absolute().parents[:4]):
        table, kit, archive = folder / _KAGGLE_TABLE, folder / _DEVKIT / "data", folder / f"{_DEVKIT}.tar.gz"
        try:
            if table.is_file():
                return _read_kaggle(table), table
            if kit.is_dir():
                return _read_devkit({name: read_bytes(kit / name) for name in (_GROUND_TRUTH, _META)}), kit
            if archive.is_file():
                return _read_devkit(_unpack(archive)), archive
        # scipy's error for a damaged matrix is an Exception.
        except Exception as error:
            where = next(place for place in (table, kit, archive) if place.exists())
            raise UserError(
                f"{where} does not hold ImageNet's validation labels ({error!r}); download again"
            ) from error
    raise UserError(
        f"{root} holds ImageNet's validation images without class folders, and their labels are not there; put "
        f"{_DEVKIT}.tar.gz or {_KAGGLE_TABLE} beside {root.name}/, or sort the images into class folders"
    )


def _read_kaggle(table: Path) -> dict[str, str]:
    """`ImageId,PredictionString`, the second as "WNID x y x y", once for each box."""
    with table.open(newline="", encoding="utf-8") as file:
        return {row["ImageId"]: row["PredictionString"].split()[0] for row in csv.DictReader(file)}


def _unpack(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as tar:
        files = {Path(member.name).name: tar.extractfile(member) for member in tar.getmembers() if member.isfile()}
        return {name: file.read() for name, file in files.items() if name in (_GROUND_TRUTH, _META) and file}


def _read_devkit(contents: Mapping[str, bytes]) -> dict[str, str]:
    """Line k of the ground truth is the `ILSVRC2012_ID` of image k; `meta.mat` has its WordNet id."""
    # Installed with scikit-learn, which the digits need.
    from scipy.io import loadmat

    synsets = loadmat(io.BytesIO(contents[_META]), squeeze_me=True)["synsets"]
    wnid_of = {int(synset["ILSVRC2012_ID"]): str(synset["WNID"]) for synset in np.atleast_1d(synsets)}
    ids = [int(line) for line in contents[_GROUND_TRUTH].split()]
    return {f"ILSVRC2012_val_{number:08d}": wnid_of[own] for number, own in enumerate(ids, start=1)}
