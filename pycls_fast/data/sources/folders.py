"""Datasets as folders: one folder per class, with or without train/ and val/ above them; ImageNet as downloaded."""

from __future__ import annotations

import csv
import io
import os
import re
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from pycls_fast.data.progress import progress
from pycls_fast.data.source import Opening, Source
from pycls_fast.data.sources.base import Images, Labels, Subset
from pycls_fast.data.sources.files import (
    EXTENSIONS,
    SPLIT_OF,
    UNREAD_EXTENSIONS,
    FileImages,
    labels_of,
    note_unread,
    walk,
)
from pycls_fast.data.sources.index import CachePolicy, Index, Stamp, load_or_build
from pycls_fast.data.sources.texts import Texts, digest
from pycls_fast.errors import UserError, first_few, is_first_of_node, refusing
from pycls_fast.files import LEDGERS, RUNS
from pycls_fast.reading import TABLE_BYTES, open_file, read_bytes

_OURS = (RUNS, LEDGERS)
VAL_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})")
"""Finds the number of a validation image of ImageNet in its name."""
_DEVKIT = "ILSVRC2012_devkit_t12"
_GROUND_TRUTH, _META = "ILSVRC2012_validation_ground_truth.txt", "meta.mat"
_KAGGLE_TABLE = "LOC_val_solution.csv"

_LAYOUT = (
    "expected ROOT/train/CLASS/IMAGE and ROOT/val/CLASS/IMAGE, or ROOT/CLASS/IMAGE; data.source=NAME chooses another "
    "layout (data/README.md)"
)
# Split folders that are something else if they hold no class folders.
_MAY_BE_OTHER = ("dev", "eval", "evaluation", "test", "testing")
_SCAN_THREADS = 16
# A folder that changed less than this before it was listed may have changed again within the same mtime.
_TIME_STEP_NS = 2 * 10**9


def open_folder(root: str | Path, data: Source, how: Opening) -> dict[str, Images]:
    """The parts of a dataset on disk.

    They are the folders `train/` and `val/`, `valid/`, `validation/`, `dev/`, `eval/` or `test/` (in any case,
    `Training/` and so on, too); with both a validation and a test folder there is "test" too. A `dev/`, `eval/` or
    `test/` without class folders (a development kit, images without labels) is left out. ImageNet's validation images
    may lie in `val/` without class folders, if their labels are there. Class folders directly in `root` are "all". With
    `data.label_separator` an image is of all classes whose folders hold it or a link to it.

    Raises:
        OSError: there is no such folder.
        UserError: the folders are not such a dataset; says what was expected and what was found.
    """
    root, cache = Path(root), CachePolicy.of(data, how)
    if root.is_file():
        raise UserError(f"{root} is a file; unpack it, or say what it is: data.source=tar (shards), manifest (a table)")

    def scan(folder: Path) -> Images:
        found = scan_classes(folder, cache)
        return found if data.label_separator is None else _merge_links(found)

    # Kaggle's archive.
    inner = root / "ILSVRC/Data/CLS-LOC"
    root = inner if (inner / "train").is_dir() else root
    folders = subfolders(root)
    names = {name.lower(): name for name in folders if name.lower() in SPLIT_OF}
    nested = {name for name in names.values() if subfolders(root / name)}
    parts: dict[str, str] = {}
    for word, split in SPLIT_OF.items():
        if word in names and (names[word] in nested or word not in _MAY_BE_OTHER):
            parts.setdefault(split, names[word])
    # `train/` may also be a class of that name (buses, cars, trains).
    if "train" not in parts or not (parts["train"] in nested or len(names) == len(folders)):
        if nested or (len(folders) == 1 and subfolders(root / folders[0])):
            raise UserError(f"{root} holds {first_few(folders)}, with folders in them but no train/; {_LAYOUT}")
        return {"all": scan(root)}
    train = scan(root / parts["train"])
    opened: dict[str, Images] = {"train": train}
    for split, name in parts.items():
        if split != "train":
            flat = None if name in nested else _flat_validation(root / name, train.classes)
            opened[split] = flat or scan(root / name)
    if is_first_of_node():
        # Those that hold no folders may hold 100,000 files, as ImageNet's test/ does.
        others = set(folders) - set(parts.values()) - (set(names.values()) - nested)
        readable = (name for name in sorted(others) if os.access(root / name, os.R_OK))
        unread = [name for name in readable if not set(train.classes).isdisjoint(subfolders(root / name))]
        _note_class_folders(root, parts.values(), unread)
    return opened


def _note_class_folders(root: Path, read: Iterable[str], unread: Sequence[str]) -> None:
    if unread:
        places = f"{', '.join(read)}, not from the class folders in {first_few(unread)}"
        print(f"note: {root}: images are read from {places}", file=sys.stderr)


def scan_classes(root: Path, cache: CachePolicy | None = None) -> FileImages:
    """Index class folders: every image below `root/CLASS/`, at any depth, hidden files and folders left out.

    They are ordered by class name and, within a class, by the file names' bytes. Listing runs in threads, because on
    network file systems it mostly waits.

    A cached index is rebuilt after a class folder, or anything in one (which changes its mtime), was added, removed or
    renamed. Not noticed: a linked folder replaced by one with the same mtime; changes on a file system that does not
    keep folders' mtimes.
    """
    index = load_or_build(
        root.absolute(),
        "class_folders",
        cache or CachePolicy(),
        build=partial(_scan, root),
        is_fresh=partial(_is_fresh, root),
    )
    return FileImages(root, index.names, index.labels)


def _merge_links(source: FileImages) -> Images:
    """Each file once, under its first name, with the classes of all its names."""
    names: dict[tuple[int, int], list[int]] = {}
    for index in range(len(source)):
        try:
            status = Path(source.name(index)).stat()
            file = (status.st_dev, status.st_ino)
        except OSError:
            # A broken link is a damaged image.
            file = (-1, index)
        names.setdefault(file, []).append(index)
    found = Subset(source, np.array([own[0] for own in names.values()]))
    _, found.labels, found.label_sets = labels_of(
        (source.labels[own].tolist() for own in names.values()), source.classes
    )
    return found


def _scan(root: Path) -> Index:
    classes = subfolders(root)
    if not classes:
        raise UserError(f"{root} holds no class folders; {_LAYOUT}")
    names, counts, folders, unread = list[bytes](), list[int](), dict[str, int](), Counter[str]()
    with ThreadPoolExecutor(_SCAN_THREADS) as pool, progress(f"index {root}", len(classes), "folders") as advance:
        for own, times, others in pool.map(lambda name: _list_class(root, name), classes):
            names += own
            counts.append(len(own))
            folders |= times
            unread += others
            advance(1)
    note_unread(root, unread)
    empty = [f"{name}/" for name, count in zip(classes, counts, strict=True) if not count]
    # Its charts are images.
    with_run = [f"{name}/" for name in _OURS if name in classes and any((root / name).rglob("config.yaml"))]
    if empty or with_run:
        what = f"a run is among the images of the class folder {first_few(with_run)}; move it, and"
        if empty:
            # Perhaps the folder of the run itself, which the user cannot see: if it is new, it is removed again.
            none = f"no images ({' '.join(EXTENSIONS)}) in the class folder {first_few(empty)}"
            what = f"{none}; remove it, or, if a run is in it,"
        raise UserError(f"{root}: {what} give run_dir=PATH outside of the classes")
    labels = np.repeat(np.arange(len(classes), dtype=np.int32), counts)
    stamp = {"classes": digest("\0".join(classes)), "folders": folders}
    return Index(Texts.of(names), Labels(tuple(classes), labels), stamp)


def _is_fresh(root: Path, stamp: Stamp) -> bool:
    # The mtime of `root` itself says nothing: the index may lie in it.
    if digest("\0".join(subfolders(root))) != stamp["classes"]:
        return False
    folders = list(stamp["folders"].items())
    # One share per thread: submitting each of 22,000 folders takes longer than checking it.
    shares = [folders[first::_SCAN_THREADS] for first in range(_SCAN_THREADS)]
    with ThreadPoolExecutor(_SCAN_THREADS) as pool:
        return all(pool.map(lambda share: all(_time_of_change(f"{root}/{n}") == then for n, then in share), shares))


def _time_of_change(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns  # noqa: PTH116  # 22,000 times at each start
    except OSError:
        return -1


def _list_class(root: Path, name: str) -> tuple[list[bytes], dict[str, int], Counter[str]]:
    """The images of a class folder, relative to `root`; the folders' mtimes; how many images of which extensions are
    in formats that are not read."""
    found, times, unread = list[bytes](), dict[str, int](), Counter[str]()
    for folder, status, _, files in walk(f"{root}/{name}"):
        place = os.path.relpath(folder, root)
        # An mtime in the far future (a server's clock, a zip archive from another time zone) is as good as an old one.
        is_settled = abs(time.time_ns() - status.st_mtime_ns) > _TIME_STEP_NS
        times[place] = status.st_mtime_ns if is_settled else 0
        for image in files:
            if image.lower().endswith(EXTENSIONS):
                # Not checked to be a file: a broken link is then reported as a damaged image, not overlooked.
                found.append(os.fsencode(f"{place}/{image}"))
            elif image.lower().endswith(UNREAD_EXTENSIONS):
                unread[os.path.splitext(image)[1].lower()] += 1  # noqa: PTH122  # faster than a Path
    # Sorted as bytes, whatever the locale.
    return sorted(found), times, unread


def subfolders(root: Path) -> list[str]:
    """Names of the folders in a folder, sorted; hidden ones, those of the system, `runs/` and `ledgers/` left out."""
    return [name for name in next(walk(str(root)))[2] if name not in _OURS or _is_class(root / name)]


def _is_class(folder: Path) -> bool:
    """Whether a folder with the name of ours, which `data=.` finds, has images to the second level that are no pictures
    of a run, which lie beside its `config.yaml`."""
    inside = (each for pattern in ("*", "*/*") for each in folder.glob(pattern))
    images = (each for each in inside if each.suffix.lower() in EXTENSIONS and each.name[0] != ".")
    return any(not (each.parent / "config.yaml").is_file() for each in images)


def _flat_validation(root: Path, classes: Sequence[str]) -> FileImages | None:
    """ImageNet's validation images in `root` itself, in the order that class folders would give them; None if there are
    no images with ImageNet's names."""
    # macOS's archives have a hidden `._NAME` beside each image.
    names = (file.name for file in root.iterdir())
    files = [name for name in names if name[0] != "." and name.lower().endswith(EXTENSIONS)]
    stems = {name: name.partition(".")[0] for name in files}
    if not any(VAL_NUMBER.fullmatch(stem) for stem in stems.values()):
        return None
    wnid_of, where = _validation_labels(root)
    label_of = {wnid: label for label, wnid in enumerate(classes)}
    unknown = sorted(name for name, stem in stems.items() if wnid_of.get(stem) not in label_of)
    if unknown:
        raise UserError(f"{root}: no training class for {first_few(unknown)} in {where}")
    labelled = sorted((label_of[wnid_of[stem]], os.fsencode(name)) for name, stem in stems.items())
    labels = np.array([label for label, _ in labelled], dtype=np.int32)
    return FileImages(root, Texts.of(name for _, name in labelled), Labels(tuple(classes), labels))


def _validation_labels(root: Path) -> tuple[Mapping[str, str], object]:
    """Image name without extension -> WordNet id, and where that is written: Kaggle's table or the development kit (its
    folder, or the archive as downloaded), beside `root` or above it."""
    for folder in (root, *root.absolute().parents[:4]):
        for name, read in (
            (_KAGGLE_TABLE, _read_kaggle),
            (f"{_DEVKIT}/data", _read_devkit),
            (f"{_DEVKIT}.tar.gz", _read_devkit),
        ):
            # scipy's error for a damaged matrix is an Exception.
            with refusing(f"{folder / name} does not hold ImageNet's validation labels", Exception):
                if (folder / name).exists():
                    return read(folder / name), folder / name
    return {}, f"{_DEVKIT}.tar.gz or {_KAGGLE_TABLE}, which are expected beside {root.name}/"


def _read_kaggle(table: Path) -> dict[str, str]:
    """`ImageId,PredictionString`, the second as "WNID x y x y", once for each box."""
    with open_file(table, TABLE_BYTES) as opened, io.TextIOWrapper(opened, "utf-8", newline="") as file:
        return {row["ImageId"]: row["PredictionString"].split()[0] for row in csv.DictReader(file)}


def _unpack(archive: Path) -> dict[str, bytes]:
    with open_file(archive, TABLE_BYTES) as opened, tarfile.open(fileobj=opened) as tar:
        files = {Path(member.name).name: tar.extractfile(member) for member in tar.getmembers() if member.isfile()}
        return {name: file.read() for name, file in files.items() if name in (_GROUND_TRUTH, _META) and file}


def _read_devkit(kit: Path) -> dict[str, str]:
    """A folder or an archive: line k of the ground truth is the `ILSVRC2012_ID` of image k; `meta.mat` has its WordNet
    id."""
    # Installed with scikit-learn, which the digits need.
    from scipy.io import loadmat

    files = (_GROUND_TRUTH, _META)
    contents = {name: read_bytes(kit / name) for name in files} if kit.is_dir() else _unpack(kit)
    synsets = loadmat(io.BytesIO(contents[_META]), squeeze_me=True)["synsets"]
    wnid_of = {int(synset["ILSVRC2012_ID"]): str(synset["WNID"]) for synset in np.atleast_1d(synsets)}
    ids = [int(line) for line in contents[_GROUND_TRUTH].split()]
    return {f"ILSVRC2012_val_{number:08d}": wnid_of[own] for number, own in enumerate(ids, start=1)}
