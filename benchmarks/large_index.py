"""Cost of an index of ImageNet-21k's size: opening it from the cache, memory per worker, order of an epoch.

    python benchmarks/large_index.py [--images 14000000] [--classes 21841] [--folder PATH]

Empty class folders are created, so that checking their modification times costs what it would. The 14 million names
are invented and written directly as an index, as creating so many files would take an hour. The rate of building is
measured on `--files` real files. Each figure is measured in a separate process.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from pycls_fast.data import CachePolicy, FileSource, epoch_order
from pycls_fast.data.sources import index, scan_classes
from pycls_fast.data.sources.arrays import Texts
from pycls_fast.data.sources.folders import _digest

_READS = 20_000


def make(root: Path, images: int, classes: int) -> None:
    """Create class folders without files, and an index that lists `images` files in them."""
    names = [f"n{number:08d}" for number in range(classes)]
    for name in names:
        (root / name).mkdir(parents=True, exist_ok=True)
    counts = np.full(classes, images // classes)
    counts[: images % classes] += 1
    parts = []
    for name, count in zip(names, counts.tolist(), strict=True):
        parts.append(Texts.of(f"{name}/{name}_{number}.JPEG".encode() for number in range(count)))
    joined = Texts.join(parts)
    folders = {name: (root / name).stat().st_mtime_ns for name in names}
    arrays = {
        "names": joined.data,
        "name_ends": joined.ends,
        "labels": np.repeat(np.arange(classes, dtype=np.int32), counts),
    }
    stamp = {"classes": _digest(names), "folders": folders}
    made = index.Index(arrays, {"classes": names}, stamp)
    index._save(made, place(root) / "class_folders")
    # Until they are on disk, pages of the file count as written by every process that maps them.
    os.sync()


def place(root: Path) -> Path:
    """The folder of the root's index files."""
    return index._places(root, "auto")[0]


def own_mib() -> float:
    """Private memory written by this process, without pages mapped from files or shared after a fork."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty"):
            return int(line.split()[1]) / 1024
    raise OSError("no Private_Dirty in /proc/self/smaps_rollup")


def read_names(source: FileSource, seed: int) -> None:
    """Use the index as a worker does, without the images, which do not exist."""
    for number in np.random.default_rng(seed).integers(0, len(source), _READS).tolist():
        source.name(number)
        int(source.labels[number])


def measure_start(root: Path) -> dict[str, float]:
    """Time opening from the cache; measure the pickled size and the memory of a forked worker."""
    before = own_mib()
    start = time.perf_counter()
    source = scan_classes(root)
    seconds = time.perf_counter() - start
    found = {"images": len(source), "open_seconds": seconds, "open_own_mib": own_mib() - before}
    found["sent_mib"] = len(pickle.dumps(source)) / 2**20
    reading, writing = os.pipe()
    if os.fork() == 0:
        read_names(source, 1)
        os.write(writing, json.dumps(own_mib()).encode())
        os._exit(0)
    found["forked_worker_own_mib"] = json.loads(os.read(reading, 1000))
    os.wait()
    return found


def measure_sent(root: Path) -> dict[str, float]:
    """A spawned worker: the memory that the source adds to a process that has only done its imports."""
    sent = pickle.dumps(scan_classes(root))
    before = own_mib()
    source = pickle.loads(sent)
    read_names(source, 2)
    return {"spawned_worker_own_mib": own_mib() - before}


def measure_order(images: int) -> dict[str, float]:
    """The order of one epoch, in the main process."""
    start = time.perf_counter()
    order = epoch_order(0, 1, images)
    return {"epoch_order_seconds": time.perf_counter() - start, "epoch_order_mib": order.nbytes / 2**20}


def measure_build(root: Path, files: int) -> dict[str, float]:
    """Rate of listing real files that are in the file system's cache."""
    for number in range(files):
        folder = root / f"n{number // 600:08d}"
        if number % 600 == 0:
            folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{folder.name}_{number}.JPEG").touch()
    start = time.perf_counter()
    scan_classes(root, CachePolicy("off"))
    return {"listed_files_per_second": files / (time.perf_counter() - start)}


def main() -> None:
    """Create the folder, measure, print and remove it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--images", type=int, default=14_000_000)
    parser.add_argument("--classes", type=int, default=21_841)
    parser.add_argument("--files", type=int, default=120_000)
    parser.add_argument("--folder", type=Path, help="created, and removed at the end (default: a temporary one)")
    parser.add_argument("--measure", choices=["start", "sent", "order", "build"])
    chosen = parser.parse_args()
    if chosen.folder is None:
        chosen.folder = Path(tempfile.mkdtemp(prefix="large_index_"))
    root = chosen.folder / "train"
    if chosen.measure:
        actions = {
            "start": lambda: measure_start(root),
            "sent": lambda: measure_sent(root),
            "order": lambda: measure_order(chosen.images),
            "build": lambda: measure_build(chosen.folder / "files", chosen.files),
        }
        print(json.dumps(actions[chosen.measure]()))
        return
    make(root, chosen.images, chosen.classes)
    found: dict[str, float] = {}
    for what in ("start", "sent", "order", "build"):
        command = [sys.executable, __file__, "--measure", what, "--folder", str(chosen.folder)]
        command += ["--images", str(chosen.images), "--files", str(chosen.files)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ})
        found |= json.loads(done.stdout)
    found["index_mib"] = sum(file.stat().st_size for file in place(root).rglob("*.*")) / 2**20
    print(json.dumps(found, indent=1))
    shutil.rmtree(chosen.folder)


if __name__ == "__main__":
    main()
