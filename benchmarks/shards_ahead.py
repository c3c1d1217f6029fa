"""How long training waits for remote shards, with copies that are fetched ahead and without.

    python benchmarks/shards_ahead.py [--rounds 3]

The store is a folder behind fsspec that sleeps before each request (20 ms) and for each byte of it (4 MB/s per stream),
as an object store does, on a smaller scale: 48 shards of 2 MB in 8 lanes. One epoch, 2 workers, 50 ms of "training"
(sleep) per batch; times are of whole epochs, without the opening of the dataset.
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
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem
from PIL import Image

from pycls_fast.data import (
    CachePolicy,
    ImageDataset,
    OpenOptions,
    ShardCache,
    Source,
    TrainSampler,
    TrainTransform,
    block_ends,
    block_order,
    make_loader,
    open_splits,
)

SHARDS, IMAGES_PER_SHARD = 48, 100
# Large files that are quick to decode: only waiting is measured.
SIDE, BYTES = 32, 20_000
# 8 lanes.
BATCH, STEP_SECONDS = 40, 0.05
REQUEST_SECONDS, BYTES_PER_SECOND = 0.02, 4e6


class SlowStore(LocalFileSystem):
    """A local folder as far away as an object store."""

    protocol = "slow"

    def get_file(self, path: str, draft: str, **options: Any) -> None:
        self._wait(Path(path).stat().st_size)
        super().get_file(path, draft, **options)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        data: bytes = super().cat_file(path, start, end, **options)
        self._wait(len(data))
        return data

    def _wait(self, size: int) -> None:
        time.sleep(REQUEST_SECONDS + size / BYTES_PER_SECOND)


def write_shards(folder: Path) -> None:
    """Tar files of noise, each image padded to its bytes."""
    random = np.random.default_rng(0)
    for number in range(SHARDS):
        with tarfile.open(folder / f"train-{number:03d}.tar", "w") as tar:
            for index in range(IMAGES_PER_SHARD):
                image = io.BytesIO()
                pixels = random.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(image, "JPEG", quality=95)
                for suffix, data in (("jpg", image.getvalue().ljust(BYTES, b"\0")), ("cls", str(index % 2).encode())):
                    member = tarfile.TarInfo(f"{index:04d}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    shutil.copy(folder / "train-000.tar", folder / "val-000.tar")


def epoch_seconds(source: Source) -> float:
    """One epoch from the first request for a batch on."""
    ends = block_ends(source)
    assert ends is not None
    sampler = TrainSampler(
        len(source),
        seed=0,
        global_batch_size=BATCH,
        total_steps=len(source) // BATCH,
        order=partial(block_order, block_ends=ends, buffer=400, global_batch_size=BATCH),
    )
    dataset = ImageDataset(source, TrainTransform(image_size=32), training=True)
    begin = time.perf_counter()
    for _ in make_loader(dataset, sampler, num_workers=2):
        time.sleep(STEP_SECONDS)
    return time.perf_counter() - begin


def main() -> None:
    """Time epochs with single requests and with shards fetched ahead in turns, and one with all copies there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    fsspec.register_implementation("slow", SlowStore)
    seconds: dict[str, list[float]] = {"one by one": [], "ahead": [], "all there": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "store").mkdir()
        write_shards(folder / "store")
        for number in range(chosen.rounds):
            for name in ("one by one", "ahead"):
                cache = ShardCache(folder / str(number), None) if name == "ahead" else None
                options = OpenOptions(cache=CachePolicy("off"), shard_cache=cache)
                source = open_splits("tar", f"slow://{folder}/store", options)["train"]
                seconds[name].append(epoch_seconds(source))
            seconds["all there"].append(epoch_seconds(source))
    ratios = [one / ahead for one, ahead in zip(seconds["one by one"], seconds["ahead"], strict=True)]
    medians = {name: round(statistics.median(found), 1) for name, found in seconds.items()}
    print(json.dumps({"seconds": medians, "ratios": [round(ratio, 2) for ratio in ratios]}, indent=1))


if __name__ == "__main__":
    main()
