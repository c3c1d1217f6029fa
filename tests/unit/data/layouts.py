"""One small dataset in every layout: the same images in the same order."""

from __future__ import annotations

import csv
import io
import json
import os
import pickle
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pycls_fast.data.choices import Source
from pycls_fast.data.pack import PackSettings, pack
from pycls_fast.data.source import Opening
from pycls_fast.data.sources.base import Images
from pycls_fast.data.sources.folders import scan_classes
from pycls_fast.data.sources.splits import as_splits
from pycls_fast.errors import UserError


def opened(
    kind: str, root: Path | str, *, whole: bool = False, index_all: bool = False, **keys: Any
) -> dict[str, Images]:
    """What `data.source` and `data.root` name, with further keys of `data`."""
    source = Source.choices()[kind](**{"index_cache": "off", **keys})
    parts = source.open(str(root), Opening(index_all=index_all))
    return as_splits(parts, source, where=str(root), whole=whole)


CLASSES = ("n01440764", "n02119789", "n09876543")


@dataclass(frozen=True)
class Sample:
    """One encoded image."""

    name: str
    label: int
    data: bytes


def make_samples(split: str, counts: Sequence[int], seed: int = 0) -> list[Sample]:
    """Random JPEGs of several sizes, class after class."""
    generator = np.random.default_rng([seed, len(split)])
    made = []
    for label, count in enumerate(counts):
        for number in range(count):
            height, width = (int(n) for n in generator.integers(8, 25, 2))
            pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, "JPEG")
            made.append(Sample(f"{split}_{label}_{number:04d}.JPEG", label, buffer.getvalue()))
    return made


Content = dict[str, list[Sample]]


def make_content(train: Sequence[int] = (4, 7, 5), val: Sequence[int] = (2, 1, 3)) -> Content:
    """A training and a validation split."""
    return {"train": make_samples("train", train), "val": make_samples("val", val)}


def write_folder(root: Path, content: Content) -> str:
    for split, samples in content.items():
        for sample in samples:
            path = root / split / CLASSES[sample.label] / sample.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(sample.data)
    return str(root)


def write_manifest(root: Path, content: Content, *, extension: str = ".csv") -> str:
    write_folder(root / "images", content)
    for split, samples in content.items():
        rows = [(f"images/{split}/{CLASSES[s.label]}/{s.name}", CLASSES[s.label]) for s in samples]
        if extension == ".parquet":
            import pyarrow
            import pyarrow.parquet

            columns = {"path": [path for path, _ in rows], "label": [label for _, label in rows]}
            pyarrow.parquet.write_table(pyarrow.table(columns), root / f"{split}.parquet")
            continue
        with (root / f"{split}{extension}").open("w", newline="") as file:
            writer = csv.writer(file, delimiter="\t" if extension == ".tsv" else ",")
            writer.writerows([("path", "label"), *rows])
    return str(root)


def hub_datasets(content: Content) -> Any:
    """By the hub's names of splits."""
    import datasets

    datasets.disable_progress_bars()
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))})
    return datasets.DatasetDict({
        {"val": "validation"}.get(split, split): datasets.Dataset.from_dict(
            {"image": [{"bytes": s.data, "path": None} for s in samples], "label": [s.label for s in samples]},
            features=kinds,
        )
        for split, samples in content.items()
    })  # fmt: skip


def write_hub(root: Path, content: Content) -> str:
    hub_datasets(content).save_to_disk(str(root))
    return str(root)


def write_hub_parquet(root: Path, content: Content, *, shards: int = 2) -> str:
    """As the hub lays datasets out."""
    (root / "data").mkdir(parents=True)
    for split, made in hub_datasets(content).items():
        for number in range(shards):
            file = root / "data" / f"{split}-{number:05d}-of-{shards:05d}.parquet"
            made.shard(shards, number, contiguous=True).to_parquet(str(file))
    return str(root)


def add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def write_tars(root: Path, content: Content, *, shards: int = 3, label: str = "cls") -> str:
    """As webdataset's ShardWriter does: `KEY.cls`, `KEY.jpg`."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "classes.txt").write_text("".join(f"{name}\n" for name in CLASSES))
    for split, samples in content.items():
        for number, part in enumerate(np.array_split(np.arange(len(samples)), shards)):
            with tarfile.open(root / f"set-{split}-{number:06d}.tar", "w") as tar:
                for i in part.tolist():
                    text = str(samples[i].label)
                    if label == "json":
                        add_member(tar, f"{i:06d}.json", json.dumps({"label": samples[i].label, "x": None}).encode())
                    else:
                        add_member(tar, f"{i:06d}.cls", text.encode())
                    add_member(tar, f"{i:06d}.jpg", samples[i].data)
    return str(root)


def write_packed(root: Path, content: Content) -> str:
    folders = root.with_name(f"{root.name}-folders")
    write_folder(folders, content)
    for split in content:
        pack(scan_classes(folders / split), root / split, PackSettings(), workers=0, title="pack")
    return str(root)


LAYOUTS = {
    "folder": write_folder, "manifest": write_manifest, "parquet": write_hub_parquet, "tar": write_tars,
    "packed": write_packed, "hub": write_hub,
}  # fmt: skip


def open_layout(kind: str, root: Path, content: Content) -> dict[str, Images]:
    """Write a layout and open it."""
    return opened(kind, LAYOUTS[kind](root, content))


def mistake(kind: str, root: Path | str, **options: Any) -> str:
    """The one line that is told instead."""
    with pytest.raises(UserError) as caught:
        opened(kind, root, **options)
    (line,) = caught.value.lines
    return line


def write_cifar10(root: Path, images_NHWC: np.ndarray, labels: Sequence[int], names: Sequence[str]) -> str:
    """The pickles of CIFAR-10, with protocol 2 as the original; the last sixth is the test batch."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    parts = np.array_split(np.arange(len(labels)), 6)
    for name, part in zip([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"], parts, strict=True):
        data = np.ascontiguousarray(images_NHWC[part].transpose(0, 3, 1, 2)).reshape(len(part), -1)
        batch = {
            b"batch_label": name.encode(),
            b"labels": [labels[i] for i in part.tolist()],
            b"data": data,
            b"filenames": [f"{i}.png".encode() for i in part.tolist()],
        }
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    meta = {b"num_cases_per_batch": 10000, b"label_names": [n.encode() for n in names], b"num_vis": 3072}
    (folder / "batches.meta").write_bytes(pickle.dumps(meta, protocol=2))
    return str(root)


def samples_of(source: Images) -> list[tuple[Any, str]]:
    """(encoded image or pixels' bytes, class name) of every image."""
    read = map(source.read, range(len(source)))
    images = (data if isinstance(data, bytes) else data.tobytes() for data in read)
    return [(data, source.classes[label]) for data, label in zip(images, source.labels, strict=True)]


def names(source: Images) -> list[str]:
    return [source.name(index) for index in range(len(source))]


def said(source: Images) -> list[frozenset[str]]:
    """The class names of each image, if it has several."""
    assert source.label_sets is not None
    return [source.classes_of(index) for index in range(len(source))]


def expected(samples: Sequence[Sample]) -> list[tuple[bytes, str]]:
    return [(sample.data, CLASSES[sample.label]) for sample in samples]


def touch_older(root: Path, seconds: float = 10.0) -> None:
    """Make everything below a folder that much older, as if it had been there for a while."""
    for path in [root, *root.rglob("*")]:
        status = path.stat()
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - int(seconds * 1e9)))
