"""Packing: what is stored, what is checked, and going on after a kill; copies that `prepare verify` finds."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pycls_fast.data import pack as packing
from pycls_fast.data.check import _near, copies, left_out, verify
from pycls_fast.data.pack import PackSettings, pack
from pycls_fast.data.sources.base import Images
from pycls_fast.data.sources.folders import scan_classes
from pycls_fast.data.sources.index import read_arrays, write_arrays
from pycls_fast.data.sources.packed import PackedImages
from pycls_fast.data.to_rgb import Conversion
from pycls_fast.errors import UserError
from tests.integration.runs import ROOT, environment
from tests.processes import Started
from tests.unit.data.layouts import (
    expected,
    make_content,
    mistake,
    opened,
    samples_of,
    write_folder,
    write_manifest,
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


@pytest.mark.parametrize(
    ("settings", "keys", "said"),
    [
        (PackSettings(store="raw", convert=Conversion(upright=True)), {}, "orientation=true data.transparent=drop;"),
        (PackSettings(store="raw"), {"exif_orientation": True}, "orientation=false data.transparent=drop;"),
        (PackSettings(12, convert=Conversion(on_white=True)), {}, "orientation=false data.transparent=white;"),
        (PackSettings(store="raw", convert=Conversion(upright=True)), {"exif_orientation": True}, ""),
        (PackSettings(12), {"exif_orientation": True}, ""),
        (PackSettings(), {"transparent": "white"}, ""),
    ],
)
def test_pixels_that_were_converted_otherwise_than_predictions_are_told(
    folder: Path, settings: PackSettings, keys: dict[str, object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pack(scan_classes(folder / "train"), folder.parent / "out/train", settings, workers=0, title="")
    opened("packed", folder.parent / "out", **keys)
    err = capsys.readouterr().err
    assert said in err if said else not err


@pytest.mark.parametrize("quality", [30, 90])
def test_large_images_are_made_smaller_by_pillow_and_small_ones_stay(
    tmp_path: Path, folder: Path, quality: int
) -> None:
    source, how = scan_classes(folder / "train"), PackSettings(12, quality)
    pack(source, tmp_path / "encoded", how, workers=0, title="")
    pack(source, tmp_path / "raw", replace(how, store="raw"), workers=0, title="")
    encoded, raw = PackedImages(tmp_path / "encoded"), PackedImages(tmp_path / "raw")
    shrunk = 0
    for index, sample in enumerate(CONTENT["train"]):
        image, wanted = Image.open(io.BytesIO(sample.data)).convert("RGB"), io.BytesIO(sample.data)
        if min(image.size) > 12:
            image = image.resize([round(side * 12 / min(image.size)) for side in image.size], Image.Resampling.BICUBIC)
            image.save(wanted := io.BytesIO(), "JPEG", quality=quality)
            shrunk += 1
        assert encoded.read(index) == wanted.getvalue()
        np.testing.assert_array_equal(raw.read(index), np.asarray(image))
    assert shrunk > 3
    said = f"16 packed images of 3 classes (short side at most 12, JPEG quality {quality}, 0.0 MB)"
    assert encoded.describe().startswith(said)
    # So that a random split holds out the same images.
    assert encoded.names_id() == raw.names_id() == source.names_id()


@pytest.mark.slow
def test_several_processes_write_the_same(tmp_path: Path, folder: Path) -> None:
    source = scan_classes(folder / "train")
    for count in (0, 2):
        pack(source, tmp_path / f"out{count}", PackSettings(12), workers=count, title="")
    one, other = (contents(tmp_path / f"out{count}") for count in (0, 2))
    assert one == other
    assert len([name for name in one if name.endswith(".bin")]) == 4
    (tmp_path / "out2/00002.bin").write_bytes(bytes(len(one["00002.bin"])))
    parts = verify(PackedImages(tmp_path / "out2"), workers=2, title="")
    assert [found.position for part in parts for found in part.damaged] == [8, 9, 10, 11]


def contents(folder: Path) -> dict[str, object]:
    """The files; of tables their arrays, since the archive has the time of writing."""
    return {
        file.name: str(read_arrays(file)) if file.suffix == ".npz" else file.read_bytes() for file in folder.iterdir()
    }


def test_a_killed_packing_goes_on_with_the_shard(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = scan_classes(folder / "train"), tmp_path / "out" / "train"
    pack(source, tmp_path / "once", PackSettings(), workers=0, title="")
    made: list[int] = []
    real = packing.store

    def store(own: Images, number: int, settings: PackSettings) -> object:
        if len(made) == 9:
            raise KeyboardInterrupt
        made.append(number)
        return real(own, number, settings)

    monkeypatch.setattr(packing, "store", store)
    with pytest.raises(KeyboardInterrupt):
        pack(source, out, PackSettings(), workers=0, title="")
    with pytest.raises(UserError, match="holds no packed split"):
        opened("packed", out.parent)
    made.clear()
    pack(source, out, PackSettings(), workers=0, title="")
    assert made == list(range(8, 16))
    assert contents(out) == contents(tmp_path / "once")
    assert samples_of(PackedImages(out)) == expected(CONTENT["train"])
    made.clear()
    # Killed when it was complete, with its parts still there.
    for name in ("00000.npz", "00003.npz", "plan.json"):
        (out / name).touch()
    pack(source, out, PackSettings(), workers=0, title="")
    assert made == []
    assert contents(out) == contents(tmp_path / "once")


@pytest.mark.parametrize("ends", ["index.npz", "00002.npz"])
def test_a_full_disk(tmp_path: Path, folder: Path, ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = scan_classes(folder / "train"), tmp_path / "out" / "train"
    real = Path.replace

    def replace_(path: Path, target: Path) -> Path:
        if target.name == ends:
            raise OSError(28, "No space left on device")
        return real(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace_)
        with pytest.raises(UserError, match=r"cannot be written \(No space left on device\); run the same"):
            pack(source, out, PackSettings(), workers=0, title="")
    assert not (out / "index.npz").exists()
    assert samples_of(pack(source, out, PackSettings(), workers=0, title="")) == expected(CONTENT["train"])


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
    told = running.communicate()[1]
    assert told == ("interrupted: Ctrl-C ended this at once\n" if number == signal.SIGINT else "")
    deadline = time.monotonic() + 60
    while left := [pid for pid in orphans if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert subprocess.run(command, env=environment(), check=False).returncode == 0
    assert not any(part.damaged for part in verify(PackedImages(tmp_path / "out/train"), workers=1, title=""))


def test_another_packing_is_not_gone_on_with(tmp_path: Path, folder: Path) -> None:
    source, out = scan_classes(folder / "train"), tmp_path / "train"
    pack(source, out, PackSettings(12), workers=0, title="")
    with pytest.raises(UserError, match=r"^output: .* or a packing of other names, labels or settings"):
        pack(source, out, PackSettings(14), workers=0, title="")
    os.truncate(out / "index.npz", 20)
    with pytest.raises(UserError, match="train is not a complete packed split"):
        pack(source, out, PackSettings(12), workers=0, title="")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("all of it")
    with pytest.raises(UserError, match="holds something else"):
        pack(source, tmp_path / "full", PackSettings(), workers=0, title="")


def test_damaged_images_are_left_out_and_named(tmp_path: Path, folder: Path) -> None:
    source = scan_classes(folder / "train")
    bad = [Path(source.name(index)) for index in (0, 5, 11)]
    bad[0].write_bytes(b"")
    bad[1].write_bytes(bad[1].read_bytes()[:200])
    bad[2].unlink()
    done = pack(source, tmp_path / "out" / "train", PackSettings(12), workers=0, title="")
    assert [name for name, _ in done.about["damaged"]] == list(map(str, bad))
    assert len(done) == len(source) - 3
    pack(scan_classes(folder / "val"), tmp_path / "out" / "val", PackSettings(), workers=0, title="")
    names = [split(tmp_path / "out").name(index) for index in range(len(done))]
    kept = [sample.name for index, sample in enumerate(CONTENT["train"]) if index not in (0, 5, 11)]
    assert [name.rpartition("/")[2].rstrip("]") for name in names] == kept
    # Asked again, it says the same.
    for path, sample in zip(bad, (CONTENT["train"][i] for i in (0, 5, 11)), strict=True):
        path.write_bytes(sample.data)
    assert pack(source, tmp_path / "out" / "train", PackSettings(12), workers=0, title="").about == done.about


def test_changed_pixels_are_found(tmp_path: Path, folder: Path) -> None:
    """Only their checksums can tell, in a part of a packed split, too."""
    pack(scan_classes(folder / "train"), tmp_path / "out/train", PackSettings(store="raw"), workers=0, title="")
    with (tmp_path / "out/train/00000.bin").open("r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]))
    # No validation split: it is drawn from the images.
    sources = opened("packed", tmp_path / "out")
    assert not isinstance(sources["train"], PackedImages)
    parts = (part for name in ("train", "val") for part in verify(sources[name], workers=0, title=""))
    (found,) = (damaged for part in parts for damaged in part.damaged)
    assert "checksum" in found.reason


def test_packed_splits_that_are_damaged(tmp_path: Path) -> None:
    root = Path(write_packed(tmp_path / "packed", CONTENT))
    for folder in (root / "train", tmp_path):
        assert "holds no packed split" in mistake("packed", folder)
    file = root / "train/index.npz"
    whole = file.read_bytes()
    arrays, about = read_arrays(file)
    write_arrays(file, arrays, {**about, "version": 7})
    assert "is not a complete packed split (version 7 instead of" in mistake("packed", root)
    np.savez(file, **arrays)
    assert "is not a complete packed split" in mistake("packed", root)
    file.write_bytes(whole[:-9])
    assert "is not a complete packed split" in mistake("packed", root)
    file.write_bytes(whole)
    os.truncate(root / "train/00003.bin", 9)
    assert "00003.bin should have" in mistake("packed", root)


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
    others = ("loose.jpg", "train/notes.txt", "train/one/phone.HEIC", "train/one/other.heic", ".hidden/x.jpg", "why")
    for name in others:
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


@pytest.mark.parametrize(("kind", "write"), [("packed", write_packed), ("manifest", write_manifest)])
def test_no_files_are_left_out_beside_tables_and_packed_images(
    tmp_path: Path, kind: str, write: Callable[..., str]
) -> None:
    root = write(tmp_path / "root", CONTENT)
    assert left_out(Path(root), opened(kind, root).values()) == {}


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
