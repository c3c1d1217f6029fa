"""Tar shards: webdataset's own, on disk and behind fsspec, whole and broken."""

from __future__ import annotations

import fcntl
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest

from pycls_fast.data import block_ends, block_order, prefers_blocks, shard_sizes
from pycls_fast.data.sources import CachePolicy, FileCache, tars
from pycls_fast.data.sources import remote as remote_files
from pycls_fast.data.sources.splits import Relabelled, Subset
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
    assert block_ends(splits["train"]).tolist() == [5, 10, 15, 16]  # type: ignore[union-attr]
    assert not prefers_blocks(splits["train"])


def test_labels_in_json_and_names_with_dots_and_folders(tmp_path: Path) -> None:
    write_tars(tmp_path, CONTENT, label="json")
    assert samples_of(opened("tar", tmp_path)["train"]) == expected(CONTENT["train"])
    with tarfile.open(tmp_path / "other.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        for key, kind in (("a/x", "dog"), ("b.c/x", "cat"), (f"{'long' * 60}/y", "dog"), ("z", "cat")):
            add_member(tar, f"{key}.JPG", JPEG)
            add_member(tar, f"{key}.json", json.dumps({"kind": kind}).encode())
    with pytest.raises(UserError, match="neither the name nor a folder says train or val"):
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
        ({"x.jpg": JPEG}, r"sample x has no label in a .cls or .json member \(members: jpg\)"),
        ({"x.cls": b"1"}, r"sample x has 0 images, expected one \(members: cls\)"),
        ({"x.cls": b"1", "x.jpg": JPEG, "x.png": JPEG}, r"sample x has 2 images, expected one"),
        ({"x.json": b'{"y": 1}', "x.jpg": JPEG}, r"no label 'label' \(it has y\); choose one with data.label_column"),
        ({"x.json": b'{"label": [1, 4]}', "x.jpg": JPEG}, r"sample x has the label \[1, 4\]: one whole number or name"),
        ({"x.json": b"{", "x.jpg": JPEG}, r"the .json of sample x is damaged"),
        ({"x.cls": b"-1", "x.jpg": JPEG}, r"the label -1"),
        ({"x.cls": b" ", "x.jpg": JPEG}, r"sample x has no label"),
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


def test_a_folder_and_a_link_to_it(tmp_path: Path) -> None:
    write_tars(tmp_path / "2024-05", CONTENT)
    (tmp_path / "latest").symlink_to("2024-05")
    assert {split: len(source) for split, source in opened("tar", tmp_path).items()} == {"train": 16, "val": 6}
    # Training's own images as the validation split, for a trial.
    trial = tmp_path / "trial"
    trial.mkdir()
    tar_of(trial / "train/000.tar", {"x.jpg": JPEG, "x.cls": b"0"})
    (trial / "val").symlink_to("train")
    assert {split: len(source) for split, source in opened("tar", trial).items()} == {"train": 1, "val": 1}


def test_shards_that_are_cut_off_anywhere(tmp_path: Path) -> None:
    whole = tar_of(tmp_path / "train.tar", {"a.cls": b"0", "a.jpg": JPEG, "b.cls": b"1", "b.jpg": JPEG}).read_bytes()
    blocks = len(whole.rstrip(b"\0")) // 512 + 1
    for size in [*range(1, blocks * 512, 300), *range(512, blocks * 512, 512)]:
        (tmp_path / "train.tar").write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"train.tar is damaged after \d samples .*; download it again"):
            opened("tar", tmp_path)
    (tmp_path / "train.tar").write_bytes(b"<html>" * 1000)
    with pytest.raises(UserError, match="is damaged after 0 samples"):
        opened("tar", tmp_path)


def test_compressed_tars_are_not_shards(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "train.tar", "w:gz") as tar:
        add_member(tar, "x.jpg", JPEG)
    with pytest.raises(UserError, match=r"train.tar is damaged after 0 samples"):
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


def test_indexes_of_very_few_samples_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_tars(tmp_path / "tars", CONTENT)
    for smallest, kept in ((1_000, 0), (10, 1)):
        monkeypatch.setattr(tars, "_SMALLEST", smallest)
        opened("tar", root, cache=CachePolicy(str(tmp_path / "index")))
        assert len(list((tmp_path / "index").rglob("about.json"))) == kept


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[str]:
    """The shards at an address."""
    files = fsspec.filesystem("memory")
    for path in Path(write_tars(tmp_path / "local", CONTENT)).glob("*.tar"):
        files.pipe_file(f"/bucket/{path.name}", path.read_bytes())
    yield "memory://bucket"
    files.rm("/bucket", recursive=True)


@pytest.mark.parametrize("cached", [False, True])
def test_remote_shards(tmp_path: Path, memory: str, cached: bool) -> None:
    cache = FileCache(tmp_path / "shards", None) if cached else None
    policy = CachePolicy(str(tmp_path / "index"))
    splits = opened("tar", memory, cache=policy, shard_cache=cache)
    plain = [(data, CLASSES.index(name)) for data, name in expected(CONTENT["train"])]
    assert [(data, int(name)) for data, name in samples_of(splits["train"])] == plain
    assert prefers_blocks(splits["train"])
    sizes = [fsspec.filesystem("memory").size(f"/bucket/set-train-{number:06d}.tar") for number in range(3)]
    part = Subset(splits["train"], np.arange(5))  # type: ignore[arg-type]
    for source in (splits["train"], part, Relabelled(part, CLASSES, np.arange(3))):
        assert shard_sizes(source) == (sizes if cached else None)
    assert len(list((tmp_path / "shards/pycls_fast_shards").glob("*.tar"))) == (3 if cached else 0)
    # The index is kept however small it is, and made anew when a shard changes.
    assert len(list((tmp_path / "index").rglob("about.json"))) == 2
    fsspec.filesystem("memory").pipe_file("/bucket/set-train-000000.tar", b"changed")
    with pytest.raises(UserError, match="is damaged"):
        opened("tar", memory, cache=policy)


def test_the_folder_of_shards_keeps_to_its_limit(tmp_path: Path, memory: str) -> None:
    size = fsspec.filesystem("memory").size("/bucket/set-train-000000.tar")
    cache = FileCache(tmp_path / "shards", int(2.5 * size))
    source = opened("tar", memory, shard_cache=cache)["train"]
    for epoch in range(2):
        for index in range(len(source)):
            assert source.read(index)[0] == CONTENT["train"][index].data, epoch
            assert len(list((tmp_path / "shards/pycls_fast_shards").glob("*.tar"))) <= 2


def test_making_room_leaves_what_is_not_a_copy(tmp_path: Path, memory: str) -> None:
    """The folder may be one that people use for other things, too."""
    cache = FileCache(tmp_path / "disk", 1)
    source = opened("tar", memory, shard_cache=cache)["train"]
    source.read(0)
    (first,) = cache.folder.glob("*.tar")
    files = [place / name for place in (tmp_path / "disk", cache.folder) for name in ("thesis.tex", "0a-old.tar")]
    for file in files:
        file.write_text("mine")
    folders = [tmp_path / "disk/photos", cache.folder / f"{'0' * 16}-photos"]
    for folder in folders:
        folder.mkdir()
    for path in (*files, *folders):
        os.utime(path, (1, 1))
    source.read(len(source) - 1)
    assert not first.exists()
    assert [file.read_text() for file in files] == ["mine"] * 4
    assert all(folder.is_dir() for folder in folders)


def test_what_was_half_fetched_does_not_stay(tmp_path: Path, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = FileCache(tmp_path / "shards", None)
    source = opened("tar", memory, shard_cache=cache)["train"]
    files = type(remote_files.file_system(memory)[0])

    def half(self: object, path: str, draft: str) -> None:
        Path(draft).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(remote_files.time, "sleep", lambda seconds: None)
    with monkeypatch.context() as patch:
        patch.setattr(files, "get_file", half)
        with pytest.raises(UserError, match="No space left on device"):
            source.read(0)
    assert not list(cache.folder.glob(".*.part"))
    # Those of a process that was killed, and of one that is at work.
    left, used = (cache.folder / f".{digit * 16}-x.tar.9.part" for digit in "01")
    for draft in (left, used):
        draft.write_bytes(b"half")
    with (cache.folder / f".{'1' * 16}-x.tar.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert source.read(0)[0] == CONTENT["train"][0].data
    assert list(cache.folder.glob(".*.part")) == [used]


def test_a_copy_that_a_power_cut_truncated_is_fetched_again(tmp_path: Path, memory: str) -> None:
    cache = FileCache(tmp_path / "shards", None)
    source = opened("tar", memory, shard_cache=cache)["train"]
    source.read(0)
    (copy,) = cache.folder.glob("*.tar")
    for size in (0, 700):
        os.truncate(copy, size)
        assert source.read(0)[0] == CONTENT["train"][0].data


def test_a_shard_that_arrives_in_part(tmp_path: Path, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = opened("tar", memory, shard_cache=FileCache(tmp_path / "shards", None))["train"]
    files = type(remote_files.file_system(memory)[0])
    real, calls = files.get_file, []

    def part(self: object, path: str, draft: str) -> None:
        real(self, path, draft)
        calls.append(path)
        if len(calls) < 3:
            os.truncate(draft, 700)

    monkeypatch.setattr(remote_files.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(files, "get_file", part)
    assert source.read(0)[0] == CONTENT["train"][0].data
    assert len(calls) == 3


def test_two_servers_are_two_file_systems() -> None:
    first, second = (remote_files.file_system(f"memory://{host}/x.tar")[0] for host in "ab")
    assert first is not second
    assert remote_files.file_system("memory://a/y.tar")[0] is first


def test_a_copy_that_another_process_removes_meanwhile(
    tmp_path: Path, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = FileCache(tmp_path / "shards", 1)
    source = opened("tar", memory, shard_cache=cache)["train"]
    source.read(0)
    real = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        path.unlink(missing_ok=True)
        return real(path)

    monkeypatch.setattr(Path, "lstat", lstat)
    assert not list(cache._copies())


def test_another_users_copy_is_read(tmp_path: Path, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = FileCache(tmp_path / "shards", None)
    source = opened("tar", memory, shard_cache=cache)["train"]
    assert source.read(0)[0] == CONTENT["train"][0].data

    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "utime", refuse)
    assert source.read(0)[0] == CONTENT["train"][0].data
    monkeypatch.setattr(Path, "open", refuse)
    # Without that all images would count as damaged.
    with pytest.raises(UserError, match=r"^data.shard_cache: .*set-train-000000.tar cannot be read"):
        source.read(0)


def test_a_shard_that_changed_is_fetched_anew(tmp_path: Path) -> None:
    address = f"file://{tmp_path}/remote"
    cache = FileCache(tmp_path / "shards", None)
    for data in (JPEG, CONTENT["train"][1].data + b"longer"):
        tar_of(tmp_path / "remote/train.tar", {"x.cls": b"0", "x.jpg": data, "y.cls": b"1", "y.jpg": data[::-1]})
        source = opened("tar", address, train="train.tar", val="train.tar", shard_cache=cache)["train"]
        assert [source.read(index)[0] for index in range(2)] == [data, data[::-1]]


def test_a_network_that_fails_now_and_then(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = opened("tar", memory)["train"]
    monkeypatch.setattr(remote_files.time, "sleep", lambda seconds: None)
    files = type(remote_files.file_system(memory)[0])
    real, calls = files.cat_file, []

    def flaky(self: object, *arguments: object, **options: object) -> bytes:
        calls.append(1)
        if len(calls) % 3:
            raise ConnectionError("reset by peer")
        return real(self, *arguments, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(files, "cat_file", flaky)
    assert source.read(0)[0] == CONTENT["train"][0].data
    assert len(calls) == 3

    def broken(self: object, *arguments: object, **options: object) -> bytes:
        raise ConnectionError("reset by peer")

    monkeypatch.setattr(files, "cat_file", broken)
    # No image is damaged by that: the run stops.
    with pytest.raises(UserError, match=r"reading memory://.* failed 4 times: reset by peer"):
        source.read(0)


def test_addresses_that_are_nowhere(memory: str) -> None:
    with pytest.raises(UserError, match=r"there are no .tar files in memory://nowhere"):
        opened("tar", "memory://nowhere")
    with pytest.raises(UserError, match=r"there is no file memory://bucket/x-000001.tar"):
        opened("tar", memory, train="x-{000001..000002}.tar", val="x-000003.tar")
    with pytest.raises(UserError, match=r"nonsense"):
        opened("tar", "nonsense://bucket")


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


def test_block_order_with_one_block_or_odd_batches() -> None:
    for ends, batch in (([7], 3), ([1, 2, 3], 1), ([5, 5, 9], 9), ([40], 32)):
        order = block_order(0, 0, np.array(ends), buffer=4, global_batch_size=batch)
        np.testing.assert_array_equal(np.sort(order), np.arange(ends[-1]))


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
