"""Remote shards: read image by image or from copies, which a process fetches ahead within a limit."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from pycls_fast.data.batch import Batch
from pycls_fast.data.choices import Augment
from pycls_fast.data.dataset import ImageDataset
from pycls_fast.data.loader import ImageLoader
from pycls_fast.data.sampling import EvalSampler, TrainSampler
from pycls_fast.data.sources import remote
from pycls_fast.data.sources.base import Images, Subset
from pycls_fast.data.sources.fetch_ahead import Fetcher, fetch_ahead
from pycls_fast.data.sources.tars import TarImages
from pycls_fast.data.transforms import EvalTransform
from pycls_fast.errors import UserError
from tests.unit.data.layouts import CLASSES, expected, make_content, opened, samples_of, write_tars

CONTENT = make_content()
IMAGES = [sample.data for sample in CONTENT["train"]]
SHARDS = 4


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four shards of four images."""
    return f"file://{write_tars(tmp_path_factory.mktemp('remote'), CONTENT, shards=SHARDS)}"


@pytest.fixture(autouse=True)
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are in use for an hour after they were read."""
    monkeypatch.setattr(remote, "_IN_USE_SECONDS", 3600.0)


def source_of(address: str, folder: Path, *, room: float | None = None) -> TarImages:
    """The training split with copies in a folder, which has room for so many shards."""
    sizes = [path.stat().st_size for path in Path(address.removeprefix("file://")).glob("*train*")]
    limit = None if room is None else room * max(sizes) / 2**30
    source = opened("tar", address, shard_cache=str(folder), shard_cache_gib=limit)["train"]
    assert isinstance(source, TarImages)
    return source


def place(source: TarImages, number: int) -> Path:
    return source.cache.place(*source.shard(number)[:2])


def there(source: TarImages) -> list[int]:
    return [number for number in range(SHARDS) if place(source, number).exists()]


def drafts(source: TarImages) -> list[Path]:
    return list(place(source, 0).parent.glob(".*.part"))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def fetch(source: TarImages, *batches: tuple[int, ...], consumed: int = 0) -> Fetcher:
    """A fetcher that has copied all that it can."""
    fetcher = Fetcher(source, batches)
    step(fetcher, consumed)
    return fetcher


def step(fetcher: Fetcher, consumed: int) -> None:
    fetcher.step(consumed)
    while fetcher._running:
        wait([copying for _, copying in fetcher._running.values()])
        fetcher.step(consumed)


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The names of the fetched files, from all processes."""
    real, log = LocalFileSystem.get_file, tmp_path / "log"
    log.touch()

    def get_file(self: LocalFileSystem, path: str, draft: str) -> None:
        with log.open("a") as file:
            file.write(f"{path}\n")
        real(self, path, draft)

    monkeypatch.setattr(LocalFileSystem, "get_file", get_file)
    return lambda: log.read_text().split()


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[str]:
    """The shards at an address."""
    files = fsspec.filesystem("memory")
    for path in Path(write_tars(tmp_path / "local", CONTENT)).glob("*.tar"):
        files.pipe_file(f"/bucket/{path.name}", path.read_bytes())
    yield "memory://bucket"
    files.rm("/bucket", recursive=True)


def test_remote_shards(tmp_path: Path, memory: str) -> None:
    policy = str(tmp_path / "index")
    splits = opened("tar", memory, index_cache=policy)
    plain = [(data, CLASSES.index(name)) for data, name in expected(CONTENT["train"])]
    assert [(data, int(name)) for data, name in samples_of(splits["train"])] == plain
    assert splits["train"].prefers_blocks
    # The index is kept however small it is, and made anew when a shard changes.
    assert len(list((tmp_path / "index").rglob("*.npz"))) == 2
    fsspec.filesystem("memory").pipe_file("/bucket/set-train-000000.tar", b"changed")
    with pytest.raises(UserError, match="cannot be read after"):
        opened("tar", memory, index_cache=policy)
    with pytest.raises(UserError, match=r"there are no .tar files in memory://nowhere"):
        opened("tar", "memory://nowhere")
    with pytest.raises(UserError, match=r"fsspec cannot read it"):
        opened("tar", "nonsense://bucket")


def test_a_network_that_fails_now_and_then(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = opened("tar", memory)["train"]
    files = type(remote.file_system(memory)[0])
    real, calls = files.cat_file, []

    def flaky(self: object, *arguments: object, **options: object) -> bytes:
        calls.append(1)
        if len(calls) % 3:
            raise ConnectionError("reset by peer")
        return real(self, *arguments, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(files, "cat_file", flaky)
    assert source.read(0) == IMAGES[0]
    assert len(calls) == 3
    monkeypatch.setattr(files, "cat_file", lambda *a, **k: (_ for _ in ()).throw(ConnectionError("reset by peer")))
    # No image is damaged by that: the run stops.
    with pytest.raises(UserError, match=r"reading memory://.* failed 4 times: reset by peer"):
        source.read(0)


def test_images_come_from_whole_copies_only(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(address, tmp_path)
    assert source.read(0) == IMAGES[0]
    assert there(source) == [], "who reads does not fetch"
    fetch(source, (0,))
    with monkeypatch.context() as patch:
        patch.setattr(remote, "read_range", lambda *arguments: pytest.fail("over the network"))
        assert source.read(0) == IMAGES[0]


def test_what_is_in_use_stays_and_the_rest_makes_room(address: str, tmp_path: Path) -> None:
    source = source_of(address, tmp_path, room=2.5)
    folder = place(source, 0).parent
    # The folder may be one that people use for other things, too.
    mine = [tmp_path / name for name in ("thesis.tex", "0a-old.tar")]
    # A copy that another version left, a draft of a process that was killed.
    old, draft = folder / f"{'0' * 16}-old.tar", folder / f".{'0' * 16}-x.tar.9.part"
    for file in (*mine, old, draft):
        file.write_bytes(bytes(12_000))
        os.utime(file, (1, 1))
    fetch(source, (0, 1))
    assert there(source) == [0, 1]
    assert not old.exists()
    assert not draft.exists()
    # Who reads a copy uses it.
    os.utime(place(source, 0), (1, 1))
    assert source.read(0) == IMAGES[0]
    fetch(source, (2,))
    assert there(source) == [0, 1], "both were used just now"
    os.utime(place(source, 1), (2, 2))
    # A draft of another process takes its room, and nobody else makes the same copy.
    other = source.cache and source.cache.begin(place(source, 3), source.shard(3)[2] or 0)
    fetch(source, (2,), (3,))
    assert there(source) == [0]
    other.unlink()
    fetch(source, (2,))
    assert there(source) == [0, 2]
    assert all(file.exists() for file in mine)


def test_the_next_batches_come_first_as_far_as_there_is_room(address: str, tmp_path: Path) -> None:
    source = source_of(address, tmp_path, room=2.1)
    fetcher = fetch(source, (3, 1), (1,), (0,), (2,))
    assert there(source) == [1, 3]
    for number in (1, 3):
        os.utime(place(source, number), (1, 1))
    step(fetcher, 1)
    # Shard 1 is still needed, 3 is not.
    assert there(source) == [0, 1]
    step(fetcher, 9)
    assert there(source) == [0, 1]


def test_a_failed_copy_is_told_once(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(LocalFileSystem, "get_file", lambda self, path, draft: Path(draft).write_bytes(b"half"))
    source = source_of(address, tmp_path)
    fetch(source, (0, 1), (2,))
    assert there(source) == drafts(source) == []
    (line,) = capsys.readouterr().err.splitlines()
    assert "4 bytes arrived instead of" in line
    assert source.read(0) == IMAGES[0]


def test_two_ranks_fetch_nothing_twice(address: str, tmp_path: Path, downloads: Callable[[], list[str]]) -> None:
    source = source_of(address, tmp_path)
    first, second = (Fetcher(source, [(0, 1, 2, 3)]) for _ in range(2))
    first.step(0)
    step(second, 0)
    step(first, 0)
    assert there(source) == [0, 1, 2, 3]
    assert len(downloads()) == len(set(downloads())) == SHARDS


def loader_of(source: Images, workers: int) -> ImageLoader:
    dataset = ImageDataset(source, EvalTransform(Augment(), image_size=16), training=True)
    sampler = TrainSampler(len(source), seed=1, global_batch_size=4, total_steps=9, repeats=2)
    return ImageLoader(dataset, sampler, num_workers=workers)


@pytest.mark.slow
def test_batches_are_those_of_any_other_source(
    address: str, tmp_path: Path, downloads: Callable[[], list[str]]
) -> None:
    plain = list(loader_of(opened("tar", address)["train"], 0))
    source = source_of(address, tmp_path)
    for workers in (0, 2):
        for batch, other in zip(loader_of(source, workers), plain, strict=True):
            # Otherwise the end of a short loader would interrupt downloads.
            until(lambda: len(there(source)) == SHARDS)
            assert isinstance(batch, Batch)
            assert torch.equal(batch.images_BHWC, other.images_BHWC)
            assert torch.equal(batch.indices_B, other.indices_B)
        assert not multiprocessing.active_children()
    assert len(downloads()) == len(set(downloads())) == SHARDS
    assert drafts(source) == []


def test_shards_are_fetched_before_anybody_reads(address: str, tmp_path: Path) -> None:
    source = source_of(address, tmp_path)
    # The images of the first and the last shard; both are labelled anew.
    part = Subset(Subset(source, np.array([0, 1, 14, 15])), classes=CLASSES, new_label=np.arange(3))
    with fetch_ahead(part, EvalSampler(4, batch_size=2)) as count:  # type: ignore[arg-type]
        until(lambda: there(source) == [0, SHARDS - 1])
        (process,) = multiprocessing.active_children()
        # A launcher sends these to all processes.
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(process.pid or 0, number)
        count()
        assert process.is_alive()
    assert not process.is_alive()


def test_a_training_ends_though_its_fetcher_was_killed(address: str, tmp_path: Path) -> None:
    """As by the kernel, for want of memory."""
    source = source_of(address, tmp_path)
    with fetch_ahead(source, EvalSampler(4, batch_size=4)):
        until(lambda: there(source) == [0])
        (process,) = multiprocessing.active_children()
        # While it waits between two looks.
        time.sleep(0.05)
        process.kill()
        process.join()
    assert source.read(0) == IMAGES[0]


def _hold(source: Images) -> None:
    with fetch_ahead(source, EvalSampler(len(source), batch_size=4)):  # type: ignore[arg-type]
        time.sleep(30)


def test_the_end_of_a_loader_or_of_its_run_ends_downloads(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get_file(self: object, path: str, draft: str) -> None:
        Path(draft).write_bytes(b"half")
        time.sleep(30)

    monkeypatch.setattr(LocalFileSystem, "get_file", get_file)
    source = source_of(address, tmp_path)
    batches = iter(loader_of(source, 1))
    # The workers do not wait for them either.
    assert len(next(batches).labels_B) == 4
    until(lambda: len(drafts(source)) == SHARDS)
    batches.close()  # type: ignore[attr-defined]  # a generator
    assert not multiprocessing.active_children()
    assert drafts(source) == []
    killed = multiprocessing.Process(target=_hold, args=(source,))
    killed.start()
    until(lambda: len(drafts(source)) == SHARDS)
    killed.kill()
    killed.join()
    until(lambda: not drafts(source))
