"""Rate of random reads of encoded images from each layout, without decoding.

    python benchmarks/read_rates.py PATH [--rounds 5]

PATH holds class folders. The same files are written as Parquet (without compression and dictionaries, as `datasets`
writes them, and with snappy), tar shards and a packed file, in row groups and shards of 100. One process, the system's
file cache warm, in turns.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import statistics
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from pycls_fast.data.choices import Source
from pycls_fast.data.pack import PackSettings, pack
from pycls_fast.data.source import Opening
from pycls_fast.data.sources.base import Images
from pycls_fast.data.sources.folders import scan_classes
from pycls_fast.data.sources.index import CachePolicy

GROUP = 100
READS, SECONDS = 2000, 3.0
# A dataset without a validation split would be divided in two.
SPLITS = ("train", "val")


def write_parquet(source: Images, folder: Path, compression: str) -> None:
    """One image file as on the Hugging Face hub: a struct with the bytes, and a label."""
    folder.mkdir(parents=True)
    table = pa.table(
        {
            "image": [{"bytes": source.read(i), "path": source.name(i)} for i in range(len(source))],
            "label": source.labels.tolist(),
        }
    )
    for split in SPLITS:
        file = folder / f"{split}-00000-of-00001.parquet"
        pa.parquet.write_table(table, file, compression=compression, row_group_size=GROUP, use_dictionary=False)


def write_tars(source: Images, folder: Path) -> None:
    """Write shards as webdataset does."""
    folder.mkdir(parents=True)
    for shard in range(0, len(source), GROUP):
        with tarfile.open(folder / f"train-{shard // GROUP:06d}.tar", "w") as tar:
            for index in range(shard, min(shard + GROUP, len(source))):
                image, label = source.read(index), source.labels[index]
                assert isinstance(image, bytes)
                for name, data in ((f"{index:06d}.jpg", image), (f"{index:06d}.cls", str(int(label)).encode())):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    for file in sorted(folder.iterdir()):
        shutil.copy(file, file.with_name(file.name.replace("train", "val")))


def rate(source: Images, seed: int) -> float:
    """Images per second."""
    indices = np.random.default_rng(seed).integers(0, len(source), READS).tolist()
    begin = time.perf_counter()
    done = 0
    while done < READS and time.perf_counter() - begin < SECONDS:
        source.read(indices[done])
        done += 1
    return done / (time.perf_counter() - begin)


def main() -> None:
    """Write the layouts, read them in turns, print the rates."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", type=Path, help="class folders of images")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    files = scan_classes(chosen.path, CachePolicy("off"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for compression in ("none", "snappy"):
            write_parquet(files, folder / f"parquet, {compression}", compression)
        write_tars(files, folder / "tar")
        for split in SPLITS:
            pack(files, folder / "packed" / split, PackSettings(), workers=1, title=split)
        names = ("parquet, none", "parquet, snappy", "tar", "packed")
        sources = {"files": files} | {
            name: Source.choices()[name.split(",")[0]](index_cache="off").open(str(folder / name), Opening())["train"]
            for name in names
        }
        rates: dict[str, list[float]] = {name: [] for name in sources}
        for number in range(chosen.rounds + 1):
            for name, source in sources.items():
                found = rate(source, number)
                # The first round, which fills caches and opens files, is left out.
                rates[name] += [found] if number else []
        print(json.dumps({name: round(statistics.median(found)) for name, found in rates.items()}, indent=1))


if __name__ == "__main__":
    main()
