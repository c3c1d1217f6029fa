"""Tar shards: webdataset's own, on disk and behind fsspec, whole and broken."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

from pycls_fast.data.sampling import block_order
from pycls_fast.errors import UserError
from tests.unit.data.layouts import (
    CLASSES,
    add_member,
    expected,
    make_content,
    opened,
    samples_of,
    write_tars,
)

CONTENT = make_content()
JPEG = CONTENT["train"][0].data


def test_shards_of_webdatasets_own_writer(tmp_path: Path) -> None:
    import webdataset

    for split, samples in CONTENT.items():
        writer = webdataset.ShardWriter(str(tmp_path / f"imagenet-{split}-%06d.tar"), maxcount=5, verbose=0)
        with writer as sink:
            for index, sample in enumerate(samples):
                sink.write({"__key__": f"{index:08d}", "jpg": sample.data, "cls": sample.label})
    (tmp_path / "classes.txt").write_text("\n".join(CLASSES))
    splits = opened("tar", tmp_path)
    for split, samples in CONTENT.items():
        assert samples_of(splits[split]) == expected(samples)
    assert splits["train"].name(5) == f"{tmp_path}/imagenet-train-000001.tar[00000005]"
    assert splits["train"].block_ends.tolist() == [5, 10, 15, 16]  # type: ignore[union-attr]
    assert not splits["train"].prefers_blocks


def test_labels_in_json_and_names_with_dots_and_folders(tmp_path: Path) -> None:
    write_tars(tmp_path, CONTENT, label="json")
    assert samples_of(opened("tar", tmp_path)["train"]) == expected(CONTENT["train"])
    with tarfile.open(tmp_path / "other.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        for key, kind in (("a/x", "dog"), ("b.c/x", "cat"), (f"{'long' * 60}/y", "dog"), ("z", "cat")):
            add_member(tar, f"{key}.JPG", JPEG)
            add_member(tar, f"{key}.json", json.dumps({"kind": kind}).encode())
    with pytest.raises(UserError, match=r"no name or folder says that .*other.tar is train, val or test"):
        opened("tar", tmp_path)
    (tmp_path / "classes.txt").unlink()
    splits = opened("tar", tmp_path, train="other.tar", val="other.tar", label_column="kind")
    assert samples_of(splits["train"]) == [(JPEG, kind) for kind in ("dog", "cat", "dog", "cat")]
    names = [splits["train"].name(index).partition("[")[2] for index in range(4)]
    assert names == ["a/x]", "b.c/x]", f"{'long' * 60}/y]", "z]"]


def test_braces_and_stars(tmp_path: Path) -> None:
    write_tars(tmp_path, CONTENT)
    named = opened("tar", tmp_path, train="set-train-{000000..000002}.tar", val="set-val-*.tar")
    assert samples_of(named["train"]) == expected(CONTENT["train"])
    assert samples_of(named["val"]) == expected(CONTENT["val"])
    with pytest.raises(UserError, match=r"^data.train: there is no file .*set-train-000003.tar"):
        opened("tar", tmp_path, train="set-train-{000000..000003}.tar", val="set-val-*.tar")


def tar_of(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            add_member(tar, name, data)
    return path


@pytest.mark.parametrize(
    ("members", "pattern"),
    [
        ({"x.jpg": JPEG}, r"sample x has the label None; expected one whole number or name in .cls"),
        (
            {"x.cls": b"1", "x.jpg": JPEG, "x.png": JPEG},
            r"sample x has 2 images, expected one",
        ),
        ({"x.json": b'{"label": [1, 4]}', "x.jpg": JPEG}, r"the label \[1, 4\]; expected .* which data.label_column"),
        ({"x.json": b"{", "x.jpg": JPEG}, r"the label of sample x is damaged"),
        ({"x.cls": b"-1", "x.jpg": JPEG}, r"the label -1"),
        ({}, r"no images in 1 tar files"),
    ],
)
def test_samples_that_are_incomplete(tmp_path: Path, members: dict[str, bytes], pattern: str) -> None:
    tar_of(tmp_path / "train.tar", members)
    with pytest.raises(UserError, match=pattern):
        opened("tar", tmp_path)


@pytest.mark.parametrize(
    "members", [{"x.jpg": JPEG}, {"x.jpg": JPEG, "x.json": b'{"width": 9}'}, {"x.jpg": JPEG, "x.cls": b"-1"}]
)
def test_test_shards_without_labels_are_left_out(tmp_path: Path, members: dict[str, bytes]) -> None:
    write_tars(tmp_path, CONTENT)
    tar_of(tmp_path / "set-test-000000.tar", members)
    assert set(opened("tar", tmp_path)) == {"train", "val"}
    # One with a label and one without are a mistake.
    for label in (b"1", CLASSES[1].encode()):
        tar_of(tmp_path / "set-test-000001.tar", {"x.jpg": JPEG, "x.cls": label})
        with pytest.raises(UserError, match=r"1 of 2 test images have no label, or the label -1 \(number 1 first\)"):
            opened("tar", tmp_path)


def test_shards_that_are_cut_off_anywhere(tmp_path: Path) -> None:
    whole = tar_of(tmp_path / "train.tar", {"a.cls": b"0", "a.jpg": JPEG, "b.cls": b"1", "b.jpg": JPEG}).read_bytes()
    blocks = len(whole.rstrip(b"\0")) // 512 + 1
    for size in [*range(1, blocks * 512, 300), *range(512, blocks * 512, 512)]:
        (tmp_path / "train.tar").write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"train.tar cannot be read after \d samples .*; download it again"):
            opened("tar", tmp_path)
    (tmp_path / "train.tar").write_bytes(b"<html>" * 1000)
    with pytest.raises(UserError, match="cannot be read after 0 samples"):
        opened("tar", tmp_path)


def test_a_shard_that_shrinks_later(tmp_path: Path) -> None:
    write_tars(tmp_path, CONTENT)
    source = opened("tar", tmp_path)["train"]
    os.truncate(tmp_path / "set-train-000000.tar", 1000)
    with pytest.raises(OSError, match="ends before the image does"):
        source.read(1)
    (tmp_path / "set-train-000000.tar").unlink()
    with pytest.raises(FileNotFoundError):
        source.read(1)


def test_block_order_reads_few_shards_at_a_time() -> None:
    """Each rank of 4 touches a quarter of the shards, in runs; every epoch has another order."""
    sizes = np.random.default_rng(0).integers(80, 120, 256)
    ends = np.cumsum(sizes)
    count, batch = int(ends[-1]), 256
    order = block_order(1, 0, ends, buffer=640, global_batch_size=batch)
    np.testing.assert_array_equal(np.sort(order), np.arange(count))
    assert not np.array_equal(order, block_order(1, 1, ends, buffer=640, global_batch_size=batch))
    np.testing.assert_array_equal(order, block_order(1, 0, ends, buffer=640, global_batch_size=batch))
    steps = count // batch
    shard = np.searchsorted(ends, order[: steps * batch], side="right").reshape(steps, 4, batch // 4)
    for rank in range(4):
        own = shard[:, rank]
        assert len(np.unique(own)) <= 256 // 4 + 17, "about a quarter, and the ends of 16 lanes"
        for first in range(0, steps - 5, 5):
            # 16 lanes, of which each needs the shard it is in and the next.
            assert len(np.unique(own[first : first + 5])) <= 16 * 3
    # Shards come in another order in each epoch.
    other = block_order(1, 1, ends, buffer=640, global_batch_size=batch)
    first, second = (set(np.searchsorted(ends, own[:batch], side="right").tolist()) for own in (order, other))
    assert len(first & second) < len(first) / 2
    # Within a lane the shard's own order is gone.
    lane = order[: steps * batch].reshape(steps, batch)[:, :4].reshape(-1)
    assert np.mean(np.diff(lane) == 1) < 0.3


def test_members_beside_the_samples_are_passed_over(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "train.tar", "w") as tar:
        for name, data in (("README", b"x"), ("./._a.jpg", b"x"), ("a.jpg", JPEG), ("a.cls", b"0"), ("b.jpg", JPEG)):
            add_member(tar, name, data)
        folder = tarfile.TarInfo("folder.d")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        add_member(tar, "b.cls", b"1")
        add_member(tar, "c.jpg", JPEG)
        add_member(tar, "c.cls", b"0")
    splits = opened("tar", tmp_path, train="train.tar", val="train.tar")
    assert [label for _, label in samples_of(splits["train"])] == ["0", "1", "0"]
