"""The packed format: what is stored, what is checked, and going on after a kill."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pycls_fast.data.packing import PackSettings, draft, pack, packer, verify, workers
from pycls_fast.data.packing.stored_image import StoredImage
from pycls_fast.data.sources import FileSource, Source, open_splits, scan_classes
from pycls_fast.data.sources.arrays import Texts
from pycls_fast.data.sources.packed import ENTRY, PackedSource, open_packed, open_packed_split
from pycls_fast.data.sources.splits import Relabelled
from pycls_fast.errors import UserError
from tests.integration.runs import ROOT, environment
from tests.started import Started
from tests.unit.data.layouts import NO_CACHE, expected, make_content, samples_of, write_folder, write_packed

CONTENT = make_content()


def split(root: Path, name: str = "train") -> PackedSource:
    source = open_packed(root, NO_CACHE)[name]
    assert isinstance(source, PackedSource)
    return source


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


def test_the_images_are_not_mapped(tmp_path: Path) -> None:
    """The page tables of every process would grow with them, and a disk's error would be a SIGBUS."""
    packed = split(Path(write_packed(tmp_path / "packed", CONTENT)))
    assert samples_of(packed) == expected(CONTENT["train"])
    maps = Path("/proc/self/maps").read_text()
    assert f"{packed.folder}/table.npy" in maps
    assert f"{packed.folder}/images.bin" not in maps
    os.truncate(packed.folder / "images.bin", 0)
    for read in (packed.read, packed.checksum_holds):
        with pytest.raises(OSError, match=r"images.bin ends before the image does"):
            read(3)


@pytest.mark.slow
def test_several_processes_write_the_same(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_SECONDS_WITHOUT", 0.0)
    source = scan_classes(folder / "train")
    for count in (0, 2):
        pack(source, tmp_path / f"out{count}", PackSettings(12), workers=count, title="")
    one, other = ((tmp_path / f"out{count}" / "images.bin").read_bytes() for count in (0, 2))
    assert one == other


def position_and_processes(source: Any, index: int) -> tuple[int, int, int]:
    return source[index], os.getpid(), os.getppid()


@pytest.mark.slow
def test_few_images_start_no_processes_and_splits_share_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    source: Any = range(100)
    found = list(workers.map_images(source, position_and_processes, start=2, workers=2))
    assert found == [(index, (index, os.getpid(), os.getppid())) for index in range(2, 100)]
    monkeypatch.setattr(workers, "_SECONDS_WITHOUT", 0.0)
    servers = set()
    for _ in range(2):
        found = list(workers.map_images(source, position_and_processes, workers=1))
        assert [(index, position) for index, (position, _, _) in found] == [(index, index) for index in range(100)]
        assert os.getpid() not in {process for _, (_, process, _) in found}
        servers |= {server for _, (_, _, server) in found}
    assert len(servers) == 1
    assert os.getpid() not in servers


@pytest.mark.slow
@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_to_all_processes_is_one_line(tmp_path: Path, number: signal.Signals, started: Started) -> None:
    """No traceback of a process that reads images, and no lock that is left."""
    (tmp_path / "slow.py").write_text("import time\ndef work(source, index):\n    time.sleep(0.02)\n")
    (tmp_path / "tool.py").write_text(
        "import pycls_fast.ctrl_c, slow\n"
        "from pycls_fast.config import cleanup_at_signals, command_line\n"
        "from pycls_fast.data.packing import workers\n"
        "def main(config, options):\n"
        "    workers._SECONDS_WITHOUT = 0.0\n"
        "    with cleanup_at_signals():\n"
        "        for index, _ in workers.map_images(range(10**6), slow.work, workers=2):\n"
        "            print(index, flush=True)\n"
        "if __name__ == '__main__': command_line(main)\n"
    )
    running = started(
        [sys.executable, str(tmp_path / "tool.py")],
        env={**environment(), "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    assert running.stdout.readline() == "0\n"
    os.killpg(running.pid, number)
    said = "Ctrl-C" if number == signal.SIGINT else number.name
    assert running.communicate()[1] == f"interrupted: {said} ended this at once\n"
    assert running.returncode == 128 + number


@pytest.mark.parametrize("damage", ["nothing", "half an image", "half a line", "zeros", "no line"])
def test_a_killed_packing_goes_on(tmp_path: Path, folder: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was written when it was killed, the result is that of an undisturbed run."""
    source, out = scan_classes(folder / "train"), tmp_path / "out" / "train"
    made: list[int] = []
    real = packer.store

    def failing(own: object, index: int, *, settings: PackSettings) -> object:
        made.append(index)
        if index == 9 and len(made) == 10:
            raise KeyboardInterrupt
        return real(source, index, settings=settings)

    monkeypatch.setattr(packer, "store", failing)
    with pytest.raises(KeyboardInterrupt):
        pack(source, out, PackSettings(), workers=0, title="")
    with pytest.raises(UserError, match="is unfinished; run the same"):
        open_packed(out.parent, NO_CACHE)
    images, table = out / "images.bin.part", out / "table.part"
    assert len(table.read_bytes()) == 9 * ENTRY.itemsize
    if damage == "half an image":
        os.truncate(images, images.stat().st_size - 5)
    elif damage == "half a line":
        with table.open("ab") as file:
            file.write(b"\1" * 7)
    elif damage == "zeros":
        with images.open("r+b") as file:
            file.seek(-10, os.SEEK_END)
            file.write(bytes(10))
    elif damage == "no line":
        with images.open("ab") as file:
            file.write(b"the next image")
    made.clear()
    pack(source, out, PackSettings(), workers=0, title="")
    assert made[0] == (8 if damage in ("half an image", "zeros") else 9)
    pack(scan_classes(folder / "val"), out.parent / "val", PackSettings(), workers=0, title="")
    assert samples_of(split(out.parent)) == expected(CONTENT["train"])
    assert not [path for path in out.iterdir() if path.suffix in (".part", ".json") and path.name != "about.json"]
    made.clear()
    pack(source, out, PackSettings(), workers=0, title="")
    assert made == []


@pytest.mark.parametrize("when", ["writing", "naming"])
def test_a_packing_that_fails_at_its_end_goes_on(
    tmp_path: Path, folder: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk while the last file is written, or a kill before it has its name."""
    source, out = scan_classes(folder / "train"), tmp_path / "out" / "train"
    real_write, real_rename = packer.write_about, Path.rename

    def half(file: Path, **about: Any) -> None:
        real_write(file, **about)
        os.truncate(file, 20)
        raise OSError(28, "No space left on device")

    def killed(path: Path, target: Path) -> Path:
        if target.name == "about.json":
            raise KeyboardInterrupt
        return real_rename(path, target)

    with monkeypatch.context() as patch:
        if when == "writing":
            patch.setattr(packer, "write_about", half)
        else:
            patch.setattr(Path, "rename", killed)
        with pytest.raises((UserError, KeyboardInterrupt)):
            pack(source, out, PackSettings(), workers=0, title="")
    assert not (out / "about.json").exists()
    assert pack(source, out, PackSettings(), workers=0, title="").is_new
    assert sorted(file.name for file in out.iterdir()) == [
        "about.json", "images.bin", "name_ends.npy", "names.npy", "table.npy",
    ]  # fmt: skip
    assert samples_of(open_packed_split(out)) == expected(CONTENT["train"])


@pytest.mark.parametrize("hole", [slice(3, 4), slice(2, 6), slice(0, 1)])
def test_entries_that_were_lost_are_written_again(tmp_path: Path, folder: Path, hole: slice) -> None:
    """As two processes that wrote into one folder would leave them, or a power cut."""
    source, out = scan_classes(folder / "train"), tmp_path / "out" / "train"
    interrupt_after(source, out, 9)
    entries = np.fromfile(out / "table.part", dtype=ENTRY)
    entries[hole] = np.zeros((), dtype=ENTRY)
    entries.tofile(out / "table.part")
    pack(source, out, PackSettings(), workers=0, title="")
    assert samples_of(open_packed_split(out)) == expected(CONTENT["train"])


def test_images_that_were_lost_since_the_last_sync_are_written_again(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those before it, on which a power cut had no effect, are not read."""
    monkeypatch.setattr(draft, "DURABLE_EVERY", 4)
    source, out = scan_classes(folder / "train"), tmp_path / "out" / "train"
    interrupt_after(source, out, 11)
    entries = np.fromfile(out / "table.part", dtype=ENTRY)
    with (out / "images.bin.part").open("r+b") as file:
        file.seek(int(entries[9]["offset"]))
        file.write(bytes(int(entries[9]["size"])))
    assert draft.whole_entries(out / "images.bin.part", out / "table.part", {}) == (9, int(entries[9]["offset"]))
    pack(source, out, PackSettings(), workers=0, title="")
    assert samples_of(open_packed_split(out)) == expected(CONTENT["train"])


def interrupt_after(source: Source, out: Path, count: int) -> None:
    """A packing of `count` images that Ctrl-C ends."""
    real = packer.store

    def failing(own: Source, index: int, *, settings: PackSettings) -> object:
        if index == count:
            raise KeyboardInterrupt
        return real(own, index, settings=settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packer, "store", failing)
        with pytest.raises(KeyboardInterrupt):
            pack(source, out, PackSettings(), workers=0, title="")


def test_damaged_images_are_named_after_a_kill(tmp_path: Path, folder: Path) -> None:
    source, out = scan_classes(folder / "train"), tmp_path / "out" / "train"
    for index in (1, 6):
        Path(source.name(index)).write_bytes(b"")
    interrupt_after(source, out, 9)
    with (out / "damaged.part").open("r+b") as log:
        # The second line was cut off.
        log.truncate(len(log.read()) - 9)
    done = pack(source, out, PackSettings(), workers=0, title="")
    assert [name for name, _ in done.damaged] == [source.name(1), source.name(6)]
    assert done.count == len(source) - 2


@pytest.mark.parametrize("repaired", [(), (6,), (1, 6), (1, 2, 6)])
def test_a_resumed_packing_tries_again_what_could_not_be_read(
    tmp_path: Path, folder: Path, repaired: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """As after an outage of the disk: the result is that of an undisturbed run on the files as they are now."""
    source, out = scan_classes(folder / "train"), tmp_path / "out" / "train"
    content = {index: Path(source.name(index)).read_bytes() for index in (1, 2, 6)}
    for index in content:
        Path(source.name(index)).unlink()
    interrupt_after(source, out, 9)
    for index in repaired:
        Path(source.name(index)).write_bytes(content[index])
    done = pack(source, out, PackSettings(), workers=0, title="")
    undisturbed = pack(source, tmp_path / "again", PackSettings(), workers=0, title="")
    assert done == undisturbed
    assert [name for name, _ in done.damaged] == [source.name(index) for index in content if index not in repaired]
    for name in ("images.bin", "table.npy", "names.npy"):
        assert (out / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    noted = f"note: {source.name(repaired[0])} was left out and can be read now" if repaired else ""
    assert noted in capsys.readouterr().err


def test_what_still_cannot_be_read_is_tried_only_once_more(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = scan_classes(folder / "train"), tmp_path / "out" / "train"
    Path(source.name(1)).unlink()
    interrupt_after(source, out, 9)
    made: list[int] = []
    real = packer.store
    monkeypatch.setattr(packer, "store", lambda own, index, **more: made.append(index) or real(own, index, **more))
    shown: list[tuple[str, int | None]] = []
    bar = packer.progress
    monkeypatch.setattr(
        packer, "progress", lambda what, total, unit: shown.append((what, total)) or bar(what, total, unit)
    )
    pack(source, out, PackSettings(), workers=0, title="pack")
    assert made == [1, *range(9, len(source))]
    assert shown == [("retry images that were left out", 1), ("pack", len(source))]


def test_a_folder_that_another_process_packs_into(tmp_path: Path, folder: Path) -> None:
    source, out = scan_classes(folder / "train"), tmp_path / "out" / "train"
    interrupt_after(source, out, 9)
    before = (out / "table.part").read_bytes()
    hold = (
        f"import fcntl, sys; f = open({str(out / 'lock.part')!r}, 'a'); fcntl.lockf(f, fcntl.LOCK_EX); print(); input()"
    )
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(UserError, match="another process is packing into"):
            pack(source, out, PackSettings(), workers=0, title="")
        other.stdin.close()
    assert (out / "table.part").read_bytes() == before
    assert pack(source, out, PackSettings(), workers=0, title="").count == len(source)


def test_a_full_disk_at_the_beginning(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = scan_classes(folder / "train"), tmp_path / "out" / "train"

    def full(path: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", full)
        with pytest.raises(UserError, match="No space left on device"):
            pack(source, out, PackSettings(), workers=0, title="")
    assert pack(source, out, PackSettings(), workers=0, title="").count == len(source)
    other = tmp_path / "other"
    other.mkdir()
    (other / "letter.txt").touch()
    with pytest.raises(UserError, match="is not empty"):
        pack(source, other, PackSettings(), workers=0, title="")
    assert [file.name for file in other.iterdir()] == ["letter.txt"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_a_folder_that_cannot_be_flushed(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A file system that flushes no folders is one thing, a failing disk another."""
    source, out = scan_classes(folder / "train"), tmp_path / "out" / "train"
    fsync = os.fsync

    def files_only(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", files_only)
    if number == errno.EIO:
        with pytest.raises(UserError, match=r"cannot be written \(Input/output error\)"):
            pack(source, out, PackSettings(), workers=0, title="")
    else:
        assert pack(source, out, PackSettings(), workers=0, title="").count == len(source)


def descendants(process: str) -> list[str]:
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [*children, *(below for child in children for below in descendants(child))]


@pytest.mark.slow
def test_kill_9_again_and_again(tmp_path: Path, digits: Path, started: Started) -> None:
    tool = (
        "import runpy; from pycls_fast.data.packing import workers; workers._SECONDS_WITHOUT = 0.0; "
        f"runpy.run_path({str(ROOT / 'tools' / 'prepare_data.py')!r}, run_name='__main__')"
    )
    command = [sys.executable, "-c", tool, "pack", f"data.root={digits}"]
    command += [f"output={tmp_path / 'out'}", "data.num_workers=1", "short_side=4"]
    kills = 0
    orphans: list[str] = []
    while True:
        running = started(command, env=environment(), stdout=subprocess.DEVNULL)
        part = tmp_path / "out" / "train" / "images.bin.part"
        before = part.stat().st_size if part.is_file() else 0
        while running.poll() is None and kills < 2:
            if part.is_file() and part.stat().st_size > before + 20_000:
                orphans += descendants(str(running.pid))
                running.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.002)
        status = running.wait()
        assert status in (0, -signal.SIGKILL)
        if status == 0:
            break
    assert kills > 0
    assert len(orphans) >= 3 * kills, "a server, the tracker of its locks and a process that reads images"
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in orphans) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in orphans if Path(f"/proc/{pid}").exists()], "workers outlive the killed process"
    packed = split(tmp_path / "out")
    assert all(packed.checksum_holds(index) for index in range(len(packed)))
    once = subprocess.run([*command[:-3], f"output={tmp_path / 'once'}", *command[-2:]], env=environment(), check=False)
    assert once.returncode == 0
    names = ("images.bin", "table.npy", "names.npy")
    for name in names:
        assert (tmp_path / "out/train" / name).read_bytes() == (tmp_path / "once/train" / name).read_bytes()


def test_another_packing_is_not_gone_on_with(tmp_path: Path, folder: Path) -> None:
    source, out = scan_classes(folder / "train"), tmp_path / "train"
    pack(source, out, PackSettings(12), workers=0, title="")
    with pytest.raises(UserError, match=r"^output: .* already holds other packed images .*short side at most 12"):
        pack(source, out, PackSettings(14), workers=0, title="")
    os.truncate(out / "about.json", 20)
    with pytest.raises(UserError, match=r"^output: .*train/about.json is damaged .*; remove .*train and pack it again"):
        pack(source, out, PackSettings(12), workers=0, title="")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("all of it")
    with pytest.raises(UserError, match="is not empty and holds no packed images"):
        pack(source, tmp_path / "full", PackSettings(), workers=0, title="")


def test_one_other_label_or_name_is_another_packing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of one image among more than could be looked at one by one."""
    names = [f"{index}.png" for index in range(2000)]
    labels = np.arange(2000, dtype=np.int32) % 2

    def source(names: list[str], labels: np.ndarray) -> FileSource:
        return FileSource(tmp_path, ("cat", "dog"), Texts.of(map(str.encode, names)), labels)

    other_names, other_labels = names.copy(), labels.copy()
    other_names[1501], other_labels[1501] = "new.png", 1 - labels[1501]
    others = (source(other_names, labels), source(names, other_labels))
    picture = StoredImage(b"picture", 0, 0, 0)

    def make(source: object, index: int, *, settings: PackSettings, stop: int = 2000) -> StoredImage:
        if index == stop:
            raise RuntimeError
        return picture

    monkeypatch.setattr(packer, "store", partial(make, stop=9))
    with pytest.raises(RuntimeError):
        pack(source(names, labels), tmp_path / "out", PackSettings(), workers=0, title="")
    for other in others:
        with pytest.raises(
            UserError, match=r"beginning of another packing .*: names, labels or settings differ; remove"
        ):
            pack(other, tmp_path / "out", PackSettings(), workers=0, title="")
    monkeypatch.setattr(packer, "store", make)
    assert pack(source(names, labels), tmp_path / "out", PackSettings(), workers=0, title="").is_new
    for other in others:
        with pytest.raises(UserError, match=r"already holds other packed .*: names, labels or settings differ; remove"):
            pack(other, tmp_path / "out", PackSettings(), workers=0, title="")
    assert not pack(source(names, labels), tmp_path / "out", PackSettings(), workers=0, title="").is_new


def test_a_table_of_relative_and_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = [sample.data for sample in CONTENT["train"][:2]]
    monkeypatch.chdir(tmp_path)
    for place, image in zip((Path("data/near"), tmp_path / "far"), data, strict=True):
        place.mkdir(parents=True)
        (place / "x.jpg").write_bytes(image)
    Path("data/table.csv").write_text(f"path,label\nnear/x.jpg,cat\n{tmp_path}/far/x.jpg,dog\n")
    options = replace(NO_CACHE, train="table.csv", val="table.csv")
    pack(open_splits("manifest", "data", options)["train"], tmp_path / "out/train", PackSettings(), workers=0, title="")
    packed = open_packed_split(tmp_path / "out/train")
    assert samples_of(packed) == [(data[0], "cat"), (data[1], "dog")]
    names = [packed.name(index).partition(": ")[2].rstrip("]") for index in range(2)]
    assert names == ["data/near/x.jpg", f"{tmp_path}/far/x.jpg"]


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


def test_nothing_could_be_read_at_first(tmp_path: Path, folder: Path) -> None:
    """As from a disk that is not mounted: the same command reads everything again."""
    source, out = scan_classes(folder / "train"), tmp_path / "out" / "train"
    (folder / "train").rename(folder / "away")
    for _ in range(2):
        with pytest.raises(UserError, match="no image can be read") as caught:
            pack(source, out, PackSettings(), workers=0, title="")
        assert "cannot be read: No such file" in str(caught.value)
    assert list(out.iterdir()) == []
    (folder / "away").rename(folder / "train")
    assert pack(source, out, PackSettings(), workers=0, title="").damaged == []
    assert samples_of(open_packed_split(out)) == expected(CONTENT["train"])


@pytest.mark.parametrize("plan", [b"{}", b"[1]", b"{", b"\xff", b'{"digest": 1}'])
def test_a_plan_of_another_program(tmp_path: Path, folder: Path, plan: bytes) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "plan.json").write_bytes(plan)
    with pytest.raises(UserError, match="is not empty and holds no packed images; choose another output"):
        pack(scan_classes(folder / "train"), out, PackSettings(), workers=0, title="")
    assert [file.name for file in out.iterdir()] == ["plan.json"]


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


def test_changed_bytes_are_found(tmp_path: Path) -> None:
    root = Path(write_packed(tmp_path / "packed", CONTENT))
    assert list(verify(split(root), workers=0, title="")) == []
    offset = int(split(root)._table[3]["offset"])
    with (root / "train/images.bin").open("r+b") as file:
        file.seek(offset + 150)
        file.write(b"\0\1\2")
    (found,) = verify(split(root), workers=0, title="")
    assert found.position == 3
    assert "checksum" in found.reason


def test_changed_pixels_of_a_random_split_are_found(tmp_path: Path, folder: Path) -> None:
    """Only their checksums can tell."""
    pack(scan_classes(folder / "train"), tmp_path / "out/train", PackSettings(store="raw"), workers=0, title="")
    with (tmp_path / "out/train/images.bin").open("r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]))
    sources = open_packed(tmp_path / "out", NO_CACHE)
    train, val = sources["train"], sources["val"]
    assert not isinstance(train, PackedSource)
    for parts in ((train, val), (as_reversed(train), as_reversed(val))):
        (found,) = (damaged for part in parts for damaged in verify(part, workers=0, title=""))
        assert "checksum" in found.reason


def as_reversed(source: Any) -> Source:
    """The same images with the classes in reverse order."""
    count = len(source.classes)
    return Relabelled(source, source.classes[::-1], np.arange(count)[::-1])


@pytest.mark.parametrize("name", ["table.npy", "names.npy", "name_ends.npy"])
def test_a_file_that_is_empty(tmp_path: Path, name: str) -> None:
    root = Path(write_packed(tmp_path / "packed", CONTENT))
    os.truncate(root / "train" / name, 0)
    with pytest.raises(UserError, match="not a complete packed split"):
        open_packed(root, NO_CACHE)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("images.bin", r"images.bin has [\d,]+ bytes and should have [\d,]+; copy or pack it again"),
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
        open_packed(root, NO_CACHE)


def test_wrong_folders(tmp_path: Path) -> None:
    root = Path(write_packed(tmp_path / "packed", CONTENT))
    with pytest.raises(UserError, match=f"is one packed split; give the folder above it, {root}"):
        open_packed(root / "train", NO_CACHE)
    with pytest.raises(UserError, match="holds no packed images; make them with"):
        open_packed(tmp_path, NO_CACHE)
    about = json.loads((root / "val/about.json").read_text())
    (root / "val/about.json").write_text(json.dumps({**about, "version": 7}))
    with pytest.raises(UserError, match="version 7; this program reads"):
        open_packed(root, NO_CACHE)
