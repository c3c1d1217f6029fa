"""Tar shards: webdataset's own, on disk, whole and broken."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import pytest

from tests.unit.data.layouts import CLASSES, add_member, expected, make_content, mistake, opened, samples_of, write_tars

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
    # So that a random split, and a run that resumes, know the images by their keys.
    assert splits["train"].names_id().startswith("names-")


def test_labels_in_json_and_names_with_dots_and_folders(tmp_path: Path) -> None:
    write_tars(tmp_path / "json", CONTENT, label="json")
    assert samples_of(opened("tar", tmp_path / "json")["train"]) == expected(CONTENT["train"])
    with tarfile.open(tmp_path / "other.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        for key, kind in (("a/x", "dog"), ("b.c/x", "cat"), (f"{'long' * 60}/y", "dog"), ("z", "cat")):
            add_member(tar, f"{key}.JPG", JPEG)
            add_member(tar, f"{key}.json", json.dumps({"kind": kind}).encode())
    splits = opened("tar", tmp_path, train="other.tar", val="other.tar", label_column="kind")
    assert samples_of(splits["train"]) == [(JPEG, kind) for kind in ("dog", "cat", "dog", "cat")]
    names = [splits["train"].name(index).partition("[")[2] for index in range(4)]
    assert names == ["a/x]", "b.c/x]", f"{'long' * 60}/y]", "z]"]


def tar_of(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            add_member(tar, name, data)
    return path


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"x.jpg": JPEG}, "images without labels"),
        ({"x.cls": b"1", "x.jpg": JPEG, "x.png": JPEG}, "sample x has 2 images, expected one"),
        ({"x.json": b'{"label": [1, 4]}', "x.jpg": JPEG}, "the label [1, 4] is no whole number or name"),
        ({"x.json": b"{", "x.jpg": JPEG}, "the label of sample x is damaged"),
        ({}, "images without labels, or none"),
    ],
)
def test_samples_that_are_incomplete(tmp_path: Path, members: dict[str, bytes], says: str) -> None:
    tar_of(tmp_path / "train.tar", members)
    assert says in mistake("tar", tmp_path)


@pytest.mark.parametrize("label", [{}, {"x.json": b'{"width": 9}'}, {"x.cls": b"-1"}])
def test_test_shards_without_labels_are_left_out(tmp_path: Path, label: dict[str, bytes]) -> None:
    write_tars(tmp_path, CONTENT)
    tar_of(tmp_path / "set-test-000000.tar", {"x.jpg": JPEG, **label})
    assert set(opened("tar", tmp_path)) == {"train", "val"}
    # One with a label and one without are a mistake.
    tar_of(tmp_path / "set-test-000001.tar", {"x.jpg": JPEG, "x.cls": b"1"})
    assert "1 of 2 images have no label" in mistake("tar", tmp_path)


def test_shards_that_are_cut_off_anywhere(tmp_path: Path) -> None:
    whole = tar_of(tmp_path / "train.tar", {"a.cls": b"0", "a.jpg": JPEG, "b.cls": b"1", "b.jpg": JPEG}).read_bytes()
    blocks = len(whole.rstrip(b"\0")) // 512 + 1
    for size in [*range(1, blocks * 512, 300), *range(512, blocks * 512, 512)]:
        (tmp_path / "train.tar").write_bytes(whole[:size])
        assert "train.tar cannot be read after" in mistake("tar", tmp_path)
    (tmp_path / "train.tar").write_bytes(b"<html>" * 1000)
    assert "cannot be read after 0 samples" in mistake("tar", tmp_path)


@pytest.mark.parametrize("attack", ["names", "backwards"])
def test_headers_that_lead_nowhere_are_one_line(tmp_path: Path, attack: str) -> None:
    with tarfile.open(tmp_path / "train.tar", "w") as tar:
        add_member(tar, "a.cls", b"0")
        add_member(tar, "a.jpg", JPEG)
    header = tarfile.TarInfo("._x")
    header.size = -512
    lost = header.tobuf(tarfile.GNU_FORMAT)
    if attack == "names":
        # Each is of the next one, and tarfile calls itself.
        header.type, header.size = tarfile.GNUTYPE_LONGNAME, 0
        lost = 2000 * header.tobuf(tarfile.GNU_FORMAT)
    whole = (tmp_path / "train.tar").read_bytes().rstrip(b"\0")
    (tmp_path / "train.tar").write_bytes(whole + bytes(-len(whole) % 512) + lost + bytes(1024))
    assert "train.tar cannot be read after" in mistake("tar", tmp_path)


def test_a_shard_that_shrinks_later(tmp_path: Path) -> None:
    write_tars(tmp_path, CONTENT)
    source = opened("tar", tmp_path)["train"]
    os.truncate(tmp_path / "set-train-000000.tar", 1000)
    with pytest.raises(OSError, match="ends before the image does"):
        source.read(1)
    (tmp_path / "set-train-000000.tar").unlink()
    with pytest.raises(FileNotFoundError):
        source.read(1)


def test_members_beside_the_samples_are_passed_over(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "train.tar", "w") as tar:
        for name, data in (("README", b"x"), ("./._a.jpg", b"x"), ("a.jpg", JPEG), ("a.cls", b"0"), ("b.jpg", JPEG)):
            add_member(tar, name, data)
        folder = tarfile.TarInfo("folder.d")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name, data in (("b.cls", b"1"), ("c.jpg", JPEG), ("c.cls", b"0")):
            add_member(tar, name, data)
    splits = opened("tar", tmp_path, train="train.tar", val="train.tar")
    assert [label for _, label in samples_of(splits["train"])] == ["0", "1", "0"]
