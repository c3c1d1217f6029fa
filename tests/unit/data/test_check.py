"""What `pycls-fast prepare verify` finds besides damaged images: copies."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from pycls_fast.data.check import _near, copies, left_out, verify
from pycls_fast.data.sources.folders import scan_classes


def test_copies_within_and_across_splits(tmp_path: Path) -> None:
    random, folders = np.random.default_rng(0), {}
    for split in ("train", "val"):
        folders[split] = tmp_path / split / "one"
        folders[split].mkdir(parents=True)
        for number in range(12):
            low = Image.fromarray(random.integers(0, 256, (6, 6, 3), dtype=np.uint8))
            low.resize((90, 70), Image.Resampling.BICUBIC).save(folders[split] / f"{number:02}.png")
    first, second = (Image.open(folders["train"] / f"{number:02}.png") for number in (0, 1))
    first.save(folders["val"] / "same.bmp")
    buffer = io.BytesIO()
    second.resize((60, 47)).save(buffer, "JPEG", quality=70)
    (folders["train"] / "small.jpg").write_bytes(buffer.getvalue())
    (folders["train"] / "broken.jpg").write_bytes(buffer.getvalue()[:300])
    sources = {split: scan_classes(tmp_path / split) for split in folders}
    parts = {split: list(verify(source, workers=1, title="")) for split, source in sources.items()}
    assert [Path(found.name).name for part in parts["train"] for found in part.damaged] == ["broken.jpg"]
    for name in (
        "loose.jpg",
        "train/notes.txt",
        "train/one/phone.HEIC",
        "train/one/other.heic",
        ".hidden/x.jpg",
        "why",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert left_out(tmp_path, sources.values()) == {
        "": ["why"],
        ".heic": ["train/one/other.heic", "train/one/phone.HEIC"],
        ".jpg": ["loose.jpg"],
        ".txt": ["train/notes.txt"],
    }
    found = copies({split: np.concatenate([part.seen for part in made]) for split, made in parts.items()})
    named = {
        kind: [[(split, Path(sources[split].name(index)).name) for split, index in group] for group in groups]
        for kind, groups in found.items()
    }
    assert named == {
        "identical": [[("train", "00.png"), ("val", "same.bmp")]],
        "alike": [[("train", "01.png"), ("train", "small.jpg")]],
    }


def test_looks_that_differ_in_three_bits_are_found_wherever_the_bits_are() -> None:
    random = np.random.default_rng(1)
    looks = random.integers(0, 2**64, 300, dtype=np.uint64)
    copied = []
    for number, look in enumerate(looks[:200].tolist()):
        bits = random.choice(64, size=number % 5, replace=False)
        copied.append(look ^ sum(1 << int(bit) for bit in bits))
    labels = _near(np.concatenate([looks, np.array(copied, dtype=np.uint64)]))
    assert len(set(labels[:300].tolist())) == 300
    assert (labels[:200] == labels[300:]).tolist() == [number % 5 <= 3 for number in range(200)]
