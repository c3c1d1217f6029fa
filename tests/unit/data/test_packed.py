"""The packed format: what is stored, what is checked, and going on after a kill."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pycls_fast.data import pack as packing
from pycls_fast.data.pack import PackSettings, pack, verify
from pycls_fast.data.sources.base import Images, Relabelled
from pycls_fast.data.sources.folders import scan_classes
from pycls_fast.data.sources.packed import PackedImages, open_packed_split
from pycls_fast.errors import UserError
from tests.integration.runs import ROOT, environment
from tests.started import Started
from tests.unit.data.layouts import (
    expected,
    make_content,
    opened,
    samples_of,
    write_folder,
    write_packed,
)

CONTENT = make_content()


def split(root: Path, name: str = "train") -> PackedImages:
    source = opened("packed", root)[name]
    assert isinstance(source, PackedImages)
    return source


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_SMALLEST_SHARD", 4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Class folders to pack."""
    return Path(write_folder(tmp_path / "folders", CONTENT))


def test_large_images_are_made_smaller_and_small_ones_stay(tmp_path: Path, folder: Path) -> None:
    for name in ("train", "val"):
        pack(scan_classes(folder / name), tmp_path / "out" / name, PackSettings(12, 90), workers=0, title="")
    packed = split(tmp_path / "out")
    shrunk = 0
    for index, sample in enumerate(CONTENT["train"]):
        data, label = packed.read(index)
        assert isinstance(data, bytes)
        before = Image.open(io.BytesIO(sample.data)).convert("RGB")
        after = Image.open(io.BytesIO(data)).convert("RGB")
        assert label == sample.label
        if min(before.size) <= 12:
            assert data == sample.data
            continue
        shrunk += 1
        assert min(after.size) == 12
        assert max(after.size) == round(max(before.size) * 12 / min(before.size))
    assert shrunk > 3
    assert packed.describe().startswith(
        "16 packed images of 3 classes (short side at most 12, JPEG quality 90, 0.00 GiB)"
    )


@pytest.mark.parametrize("quality", [30, 90])
@pytest.mark.parametrize("filter_name", ["bilinear", "bicubic", "lanczos"])
def test_what_is_made_smaller_has_the_filter_and_the_quality(tmp_path: Path, filter_name: Any, quality: int) -> None:
    folder = tmp_path / "folder" / "cat"
    folder.mkdir(parents=True)
    before = Image.radial_gradient("L").resize((60, 40)).convert("RGB")
    before.save(folder / "a.png")
    source, settings = scan_classes(tmp_path / "folder"), PackSettings(16, quality, filter=filter_name)
    small = before.resize((24, 16), Image.Resampling[filter_name.upper()])
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=quality)
    pack(source, tmp_path / "jpeg", settings, workers=0, title="")
    assert open_packed_split(tmp_path / "jpeg").read(0)[0] == buffer.getvalue()
    pack(source, tmp_path / "raw", replace(settings, store="raw"), workers=0, title="")
    np.testing.assert_array_equal(open_packed_split(tmp_path / "raw").read(0)[0], np.asarray(small))


def test_raw_pixels_are_the_decoded_ones(tmp_path: Path, folder: Path) -> None:
    for name in ("train", "val"):
        pack(scan_classes(folder / name), tmp_path / "out" / name, PackSettings(store="raw"), workers=0, title="")
    packed = split(tmp_path / "out")
    for index, sample in enumerate(CONTENT["train"]):
        pixels, label = packed.read(index)
        assert isinstance(pixels, np.ndarray)
        np.testing.assert_array_equal(pixels, np.asarray(Image.open(io.BytesIO(sample.data)).convert("RGB")))
        assert label == sample.label
        assert not pixels.flags.owndata, "a copy"


@pytest.mark.slow
def test_several_processes_write_the_same(tmp_path: Path, folder: Path) -> None:
    source = scan_classes(folder / "train")
    for count in (0, 2):
        pack(source, tmp_path / f"out{count}", PackSettings(12), workers=count, title="")
    one, other = (contents(tmp_path / f"out{count}") for count in (0, 2))
    assert one == other
    assert len([name for name in one if name.endswith(".bin")]) == 4
    (tmp_path / "out2/00002.bin").write_bytes(bytes(len(one["00002.bin"])))
    damaged = list(verify(open_packed_split(tmp_path / "out2"), workers=2, title=""))
    assert [found.position for found in damaged] == [8, 9, 10, 11]
    assert all("checksum" in found.reason for found in damaged)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def interrupt_at(index: int, source: Images, out: Path) -> None:
    """A packing that Ctrl-C ends at an image."""
    real = packing.store

    def failing(own: Images, number: int, settings: PackSettings) -> object:
        if number == index:
            raise KeyboardInterrupt
        return real(own, number, settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "store", failing)
        with pytest.raises(KeyboardInterrupt):
            pack(source, out, PackSettings(), workers=0, title="")


def test_a_killed_packing_goes_on_with_the_shard(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = scan_classes(folder / "train"), tmp_path / "out" / "train"
    interrupt_at(9, source, out)
    with pytest.raises(UserError, match="which resumes an unfinished one"):
        opened("packed", out.parent)
    made: list[int] = []
    real = packing.store
    monkeypatch.setattr(packing, "store", lambda own, index, how: made.append(index) or real(own, index, how))
    pack(source, out, PackSettings(), workers=0, title="")
    assert made == list(range(8, 16))
    pack(source, tmp_path / "once", PackSettings(), workers=0, title="")
    assert contents(out) == contents(tmp_path / "once")
    assert samples_of(open_packed_split(out)) == expected(CONTENT["train"])
    made.clear()
    assert not pack(source, out, PackSettings(), workers=0, title="").is_new
    assert made == []


@pytest.mark.parametrize("ends", ["table.npy", "about.json", "plan.json"])
def test_a_packing_that_fails_at_its_end_goes_on(
    tmp_path: Path, folder: Path, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk while a last file is written or named, and at the very beginning."""
    source, out = scan_classes(folder / "train"), tmp_path / "out" / "train"
    real_rename, real_open = Path.rename, Path.open

    def rename(path: Path, target: Path) -> Path:
        if target.name == ends:
            raise OSError(28, "No space left on device")
        return real_rename(path, target)

    def open_(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if path.name == ends and mode == "wb":
            raise OSError(28, "No space left on device")
        return real_open(path, mode, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        patch.setattr(Path, "open", open_)
        with pytest.raises(UserError, match=r"cannot be written \(No space left on device\); run the same"):
            pack(source, out, PackSettings(), workers=0, title="")
    assert not (out / "about.json").exists()
    assert pack(source, out, PackSettings(), workers=0, title="").is_new
    assert samples_of(open_packed_split(out)) == expected(CONTENT["train"])


def descendants(process: str) -> list[str]:
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [*children, *(below for child in children for below in descendants(child))]


@pytest.mark.slow
@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_end_of_the_command_ends_its_processes(
    tmp_path: Path, digits: Path, number: signal.Signals, started: Started
) -> None:
    """Without their tracebacks; the same command goes on."""
    command = [sys.executable, str(ROOT / "tools/prepare_data.py"), "pack", f"data.root={digits}", "split=train"]
    command += [f"output={tmp_path / 'out'}", "data.num_workers=2", "short_side=4"]
    running = started(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not list((tmp_path / "out/train").glob("*.npz")):
        assert running.poll() is None
        time.sleep(0.002)
    orphans = descendants(str(running.pid))
    if number == signal.SIGKILL:
        running.kill()
    else:
        os.killpg(running.pid, number)
    said, told = "Ctrl-C" if number == signal.SIGINT else number.name, running.communicate()[1]
    assert number == signal.SIGKILL or told == f"interrupted: {said} ended this at once\n"
    deadline = time.monotonic() + 60
    while left := [pid for pid in orphans if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert subprocess.run(command, env=environment(), check=False).returncode == 0
    packed = open_packed_split(tmp_path / "out/train")
    assert all(packed.checksum_holds(index) for index in range(len(packed)))


def test_another_packing_is_not_gone_on_with(tmp_path: Path, folder: Path) -> None:
    source, out = scan_classes(folder / "train"), tmp_path / "train"
    pack(source, out, PackSettings(12), workers=0, title="")
    with pytest.raises(UserError, match=r"^output: .* holds another packing: names, labels or settings differ"):
        pack(source, out, PackSettings(14), workers=0, title="")
    os.truncate(out / "about.json", 20)
    with pytest.raises(UserError, match="train is not a complete packed split"):
        pack(source, out, PackSettings(12), workers=0, title="")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("all of it")
    with pytest.raises(UserError, match="is not empty and holds no packed images"):
        pack(source, tmp_path / "full", PackSettings(), workers=0, title="")


def test_damaged_images_are_left_out_and_named(tmp_path: Path, folder: Path) -> None:
    source = scan_classes(folder / "train")
    bad = [Path(source.name(index)) for index in (0, 5, 11)]
    bad[0].write_bytes(b"")
    bad[1].write_bytes(bad[1].read_bytes()[:200])
    bad[2].unlink()
    done = pack(source, tmp_path / "out" / "train", PackSettings(12), workers=0, title="")
    assert [name for name, _ in done.damaged] == list(map(str, bad))
    assert done.count == len(source) - 3
    pack(scan_classes(folder / "val"), tmp_path / "out" / "val", PackSettings(), workers=0, title="")
    names = [split(tmp_path / "out").name(index) for index in range(done.count)]
    kept = [sample.name for index, sample in enumerate(CONTENT["train"]) if index not in (0, 5, 11)]
    assert [name.rpartition("/")[2].rstrip("]") for name in names] == kept
    assert json.loads((tmp_path / "out/train/about.json").read_text())["damaged"][0] == list(done.damaged[0])
    # Asked again, it says the same.
    for path, sample in zip(bad, (CONTENT["train"][i] for i in (0, 5, 11)), strict=True):
        path.write_bytes(sample.data)
    assert pack(source, tmp_path / "out" / "train", PackSettings(12), workers=0, title="").damaged == done.damaged


def test_names_that_are_no_utf_8(tmp_path: Path) -> None:
    """Of classes, images and damaged images."""
    content = [sample.data for sample in CONTENT["train"][:3]]
    folder = tmp_path / "images" / os.fsdecode(b"caf\xe9")
    folder.mkdir(parents=True)
    (tmp_path / "images" / "tea").mkdir()
    for number, data in enumerate(content):
        (folder / os.fsdecode(b"%d\xe9.jpg" % number)).write_bytes(data)
        (tmp_path / "images" / "tea" / f"{number}.jpg").write_bytes(data)
    damaged = folder / os.fsdecode(b"1\xe9.jpg")
    damaged.write_bytes(b"")
    source, out = scan_classes(tmp_path / "images"), tmp_path / "out" / "train"
    done = pack(source, out, PackSettings(), workers=0, title="")
    assert [name for name, _ in done.damaged] == [str(damaged)]
    packed = open_packed_split(out)
    assert packed.classes == source.classes == (folder.name, "tea")
    assert packed.name(0).endswith(f"[0: {folder.name}/{Path(source.name(0)).name}]")
    assert samples_of(packed)[:2] == [(content[0], folder.name), (content[2], folder.name)]
    again = pack(source, out, PackSettings(), workers=0, title="")
    assert (again.is_new, again.damaged) == (False, done.damaged)


def test_changed_pixels_of_a_random_split_are_found(tmp_path: Path, folder: Path) -> None:
    """Only their checksums can tell."""
    pack(scan_classes(folder / "train"), tmp_path / "out/train", PackSettings(store="raw"), workers=0, title="")
    with (tmp_path / "out/train/00000.bin").open("r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]))
    sources = opened("packed", tmp_path / "out")
    train, val = sources["train"], sources["val"]
    assert not isinstance(train, PackedImages)
    for parts in ((train, val), (as_reversed(train), as_reversed(val))):
        (found,) = (damaged for part in parts for damaged in verify(part, workers=0, title=""))
        assert "checksum" in found.reason


def as_reversed(source: Any) -> Images:
    """The same images with the classes in reverse order."""
    count = len(source.classes)
    return Relabelled(source, source.classes[::-1], np.arange(count)[::-1])


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("00003.bin", r"not a complete packed split \(00003.bin should have [\d,]+ bytes\); copy or pack it again"),
        ("table.npy", "not a complete packed split"),
        ("names.npy", "not a complete packed split"),
        ("about.json", "not a complete packed split"),
    ],
)
def test_a_file_that_is_cut_off(tmp_path: Path, name: str, pattern: str) -> None:
    root = Path(write_packed(tmp_path / "packed", CONTENT))
    path = root / "train" / name
    os.truncate(path, path.stat().st_size - 9)
    with pytest.raises(UserError, match=pattern):
        opened("packed", root)


def test_wrong_folders(tmp_path: Path) -> None:
    root = Path(write_packed(tmp_path / "packed", CONTENT))
    with pytest.raises(UserError, match="is no folder above packed splits"):
        opened("packed", root / "train")
    with pytest.raises(UserError, match="is no folder above packed splits; make them with"):
        opened("packed", tmp_path)
    about = json.loads((root / "val/about.json").read_text())
    (root / "val/about.json").write_text(json.dumps({**about, "version": 7}))
    with pytest.raises(UserError, match=r"is not a complete packed split .*version 7 instead of 2"):
        opened("packed", root)


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("name_ends.npy", lambda ends: ends[::-1]),
        ("table.npy", lambda table: np.where(np.arange(len(table)) == 0, 99, table["label"])),
    ],
)
def test_damaged_arrays_are_one_line(tmp_path: Path, file: str, change: Any) -> None:
    root = Path(write_packed(tmp_path / "packed", make_content()))
    array = np.load(root / "train" / file)
    if array.dtype.names:
        array["label"] = change(array)
    else:
        array = np.ascontiguousarray(change(array))
    np.save(root / "train" / file, array)
    with pytest.raises(UserError, match=r"is not a complete packed split \((the names|table\.npy)"):
        open_packed_split(root / "train")
