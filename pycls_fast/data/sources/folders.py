"""Datasets as folders: one folder per class, with or without train/ and val/ above them; ImageNet as downloaded."""

from __future__ import annotations

import csv
import hashlib
import io
import os
import re
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pycls_fast.data.sources.arrays import Texts
from pycls_fast.data.sources.base import LabelledSource, Source
from pycls_fast.data.sources.files import EXTENSIONS, UNREAD_EXTENSIONS, FileSource, is_folder
from pycls_fast.data.sources.find import SPLIT_OF
from pycls_fast.data.sources.index import CachePolicy, Index, Stamp, load_or_build
from pycls_fast.data.sources.progress import progress
from pycls_fast.data.sources.splits import OpenOptions, like_train, refuse_folds, undivided
from pycls_fast.errors import UserError, first_few

_VAL_NAMES, _TEST_NAMES = ("val", "valid", "validation"), ("test", "testing")
_LAYOUT = "expected ROOT/train/CLASS/IMAGE and ROOT/val/CLASS/IMAGE, or ROOT/CLASS/IMAGE (see data/README.md)"
_SCAN_THREADS = 16
# A folder that changed this shortly before it was listed may have changed again within the same mtime.
_TIME_STEP_NS = 2 * 10**9


def open_folder(root: str | Path, options: OpenOptions, *, by_name: bool = True) -> dict[str, Source]:
    """Find the splits of a dataset on disk.

    With `train/` and one of `val/`, `valid/`, `validation/`, `dev/`, `test/` (in any case, `Training/` and `Testing/`,
    too) these are "train" and "val"; with both a validation and a test folder there is "test" too. A test folder
    without class folders (ImageNet's, and those of competitions, have no labels) is left out. ImageNet's validation
    images may lie in `val/` without class folders, if their labels are there (see `flat_validation`). With only
    `train/`, or with class folders directly in `root`, the images are split at random, class by class.

    Args:
        by_name: see `split_at_random`.

    Raises:
        UserError: the folders are not such a dataset; says what was expected and what was found.
    """
    root = kaggle_root(Path(root))
    folders, cache = _list_root(root), options.cache
    named = {name.lower(): name for name in folders if name.lower() in SPLIT_OF}
    nested = [name for name in named.values() if subfolders(root / name)]
    train_name = named.get("train", named.get("training"))
    # `train/` may also be a class of that name (buses, cars, trains).
    if train_name is None or not (train_name in nested or len(named) == len(folders)):
        _check_classes(root, folders, nested)
        return undivided(scan_classes(root, cache), options, by_name=by_name, where=str(root))
    train = scan_classes(root / train_name, cache)
    # `dev/` and `test/` without class folders are a development kit and images without labels.
    found = [name for word, name in named.items() if word in _VAL_NAMES]
    found += [named[word] for word in ("dev", *_TEST_NAMES) if named.get(word) in nested]
    if not found:
        return undivided(train, options, by_name=by_name, where=str(train.root))
    refuse_folds(str(root), options.folds)
    sources: dict[str, Source] = {"train": train, "val": _scan_validation(root / found[0], train, cache)}
    test = next((name for name in found[1:] if name.lower() in _TEST_NAMES), None)
    if test is not None:
        sources["test"] = _scan_like(root / test, train, cache)
    return sources


def _check_classes(root: Path, folders: list[str], nested: list[str]) -> None:
    """Refuse folders of splits, or of a whole dataset, that would be read as classes."""
    # A class may be called dev.
    if nested and (nested != ["dev"] or folders == nested):
        raise UserError(f"{root}: found {_folders(nested)} but no train/; {_LAYOUT}")
    if len(folders) == 1 and subfolders(root / folders[0]):
        raise UserError(f"{root} holds one class, {folders[0]}; did you mean data.root={root / folders[0]}?")


def _scan_validation(root: Path, train: FileSource, cache: CachePolicy) -> LabelledSource:
    flat = None if subfolders(root) else flat_validation(root, train.classes)
    return _scan_like(root, train, cache) if flat is None else flat


def _scan_like(root: Path, train: FileSource, cache: CachePolicy) -> LabelledSource:
    return like_train(scan_classes(root, cache), train, where=str(root), train_where=str(train.root))


class _Listing(NamedTuple):
    """The images of one class folder: names relative to the folder above, and the folders' mtimes."""

    names: Texts
    stamp: dict[str, int]
    unread: Counter[str]
    """Number of images by extension in formats that are not read."""


def scan_classes(root: Path, cache: CachePolicy | None = None) -> FileSource:
    """Index class folders: every image below `root/CLASS/`, at any depth, hidden files and folders left out.

    They are ordered by class name and, within a class, by the file names' bytes. Listing runs in threads, because on
    network file systems it mostly waits.

    A cached index is rebuilt after a class folder, or anything in one (which changes its mtime), was added, removed or
    renamed. Not noticed: a linked folder replaced by one with the same mtime; changes on a file system that does not
    keep folders' mtimes.

    Raises:
        UserError: no class folders, or a class folder without images.
    """
    index = load_or_build(
        root.absolute(),
        "class_folders",
        cache or CachePolicy(),
        build=lambda: _scan(root),
        count=lambda index: len(index.arrays["labels"]),
        is_fresh=lambda stamp: _is_fresh(root, stamp),
    )
    _report_unread(root, index.more["unread"])
    names = Texts(index.arrays["names"], index.arrays["name_ends"])
    return FileSource(root, index.more["classes"], names, index.arrays["labels"])


def _scan(root: Path) -> Index:
    classes = subfolders(root)
    if not classes:
        raise UserError(_no_class_folders(root))
    listings: list[_Listing] = []
    with ThreadPoolExecutor(_SCAN_THREADS) as pool, progress(f"index {root}", len(classes), "folders") as advance:
        for listing in pool.map(lambda name: _list_class(root, name), classes):
            listings.append(listing)
            advance(1)
    counts = [len(listing.names) for listing in listings]
    empty = [f"{name}/" for name, count in zip(classes, counts, strict=True) if not count]
    unread: Counter[str] = Counter()
    for listing in listings:
        unread.update(listing.unread)
    if empty:
        _report_unread(root, unread)
        raise UserError(
            f"{root}: no images in the class folder{'s' if len(empty) > 1 else ''} {first_few(empty)}; "
            f"add images ({' '.join(EXTENSIONS)}) or remove the folder"
        )
    names = Texts.join(listing.names for listing in listings)
    arrays = {
        "names": names.data,
        "name_ends": names.ends,
        "labels": np.repeat(np.arange(len(classes), dtype=np.int32), counts),
    }
    folders = {name: time for listing in listings for name, time in listing.stamp.items()}
    return Index(arrays, {"classes": classes, "unread": unread}, {"classes": _digest(classes), "folders": folders})


def _report_unread(root: Path, unread: Mapping[str, int]) -> None:
    # Once per node: each rank opens the dataset.
    if unread and int(os.environ.get("LOCAL_RANK", "0")) == 0:
        counts = ", ".join(f"{count:,} {extension}" for extension, count in sorted(unread.items()))
        print(
            f"note: {root}: images in formats that are not read are left out ({counts}); convert them", file=sys.stderr
        )


def _is_fresh(root: Path, stamp: Stamp) -> bool:
    # The mtime of `root` itself says nothing: the index may lie in it.
    if _digest(subfolders(root)) != stamp["classes"]:
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


def _digest(names: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(names).encode("utf-8", "surrogateescape")).hexdigest()


def _list_class(root: Path, name: str) -> _Listing:
    stamp: dict[str, int] = {}
    unread: Counter[str] = Counter()
    # Names sorted as bytes (whatever the locale), relative to the class folder.
    found = sorted(_walk_images(root, name, "", frozenset(), stamp, unread))
    prefix = os.fsencode(f"{name}/")
    return _Listing(Texts.of(prefix + image for image in found), stamp, unread)


def _walk_images(
    root: Path,
    name: str,
    prefix: str,
    above: frozenset[tuple[int, int]],
    stamp: dict[str, int],
    unread: Counter[str],
) -> Iterator[bytes]:
    folder = f"{root}/{name}/{prefix}".rstrip("/")
    status = Path(folder).stat()
    # An mtime far ahead (a server's clock, a zip archive from another time zone) is as good as an old one.
    is_settled = abs(time.time_ns() - status.st_mtime_ns) > _TIME_STEP_NS
    stamp[f"{name}/{prefix}".rstrip("/")] = status.st_mtime_ns if is_settled else 0
    nested: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            image = entry.name
            if image[0] == ".":
                continue
            if is_folder(entry):
                nested.append(image)
            elif image.lower().endswith(EXTENSIONS):
                # Not checked to be a file: a broken link is then reported as a damaged image, not overlooked.
                yield os.fsencode(prefix + image)
            elif image.lower().endswith(UNREAD_EXTENSIONS):
                unread[os.path.splitext(image)[1].lower()] += 1  # noqa: PTH122  # faster than a Path
    here = (status.st_dev, status.st_ino)
    if nested and here in above:
        raise UserError(f"{folder} is a link to a folder above it; remove the link")
    for inner in nested:
        yield from _walk_images(root, name, f"{prefix}{inner}/", above | {here}, stamp, unread)


def subfolders(root: Path) -> list[str]:
    """Names of the folders in a folder, sorted, hidden ones and those of the system left out."""
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if entry.name[0] != "." and is_folder(entry))


def _list_root(root: Path) -> list[str]:
    if not root.exists():
        raise UserError(
            f"there is no dataset folder {root.absolute()}; {_LAYOUT}; check one with "
            "pycls-fast prepare verify data.root=ROOT"
        )
    if not root.is_dir():
        raise UserError(f"the dataset {root.absolute()} is a file, not a folder; {_LAYOUT}")
    return subfolders(root)


def _no_class_folders(root: Path) -> str:
    with os.scandir(root) as entries:
        images = sum(entry.name.lower().endswith(EXTENSIONS) for entry in entries)
    if images:
        return (
            f"{root} holds {images:,} images but no class folders: "
            f"an image's label is the name of its folder, so sort them into {root}/CLASS/"
        )
    return f"{root} holds no class folders; {_LAYOUT}"


def _folders(names: Sequence[str]) -> str:
    return f"folder{'s' if len(names) > 1 else ''} {first_few([f'{name}/' for name in names])}"


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
