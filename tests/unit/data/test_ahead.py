"""Copies of remote shards: who fetches them, when, within which limit, and what happens if that fails."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path

import numpy as np
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from pycls_fast.data import (
    Batch,
    EvalSampler,
    EvalTransform,
    ImageDataset,
    ImageLoader,
    Source,
    TrainSampler,
    make_loader,
)
from pycls_fast.data.ahead import Fetcher, Window, budget_of, fetch_ahead
from pycls_fast.data.sources import FileCache, copied_shards, remote
from pycls_fast.data.sources.shard_cache import CopiedShards
from pycls_fast.data.sources.splits import Subset
from pycls_fast.errors import UserError
from tests.unit.data.layouts import make_content, opened, write_tars

CONTENT = make_content()
IMAGES = [sample.data for sample in CONTENT["train"]]
SHARDS = 4
UNLIMITED = float("inf")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four shards of four images."""
    return f"file://{write_tars(tmp_path_factory.mktemp('remote'), CONTENT, shards=SHARDS)}"


def source_of(address: str, folder: Path, *, shards: float | None = None) -> Source:
    """The training split with copies in a folder, which has room for so many shards."""
    limit = None if shards is None else int(shards * max(size or 0 for size in shards_of(address, folder).sizes))
    return opened("tar", address, shard_cache=FileCache(folder, limit))["train"]


def shards_of(address: str, folder: Path) -> CopiedShards:
    return copied(source_of(address, folder))


def copied(source: Source) -> CopiedShards:
    found = copied_shards(source)
    assert found is not None
    return found


def place(shards: CopiedShards, number: int) -> tuple[Path, int | None]:
    return shards.cache.place(shards.addresses[number], shards.versions[number]), shards.sizes[number]


def there(shards: CopiedShards) -> list[int]:
    return [number for number in range(SHARDS) if place(shards, number)[0].exists()]


def drafts(shards: CopiedShards) -> list[Path]:
    return list(shards.cache.folder.glob(".*.part"))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def fetcher_of(shards: CopiedShards, batches: list[tuple[int, ...]]) -> Fetcher:
    return Fetcher(shards, Window(iter(batches), shards.sizes, budget=budget_of(shards), in_flight=1))


def run(fetcher: Fetcher, consumed: int) -> None:
    """Steps until nothing is left to do."""
    fetcher.step(consumed)
    while fetcher._running:
        wait(fetcher._running.values(), timeout=60)
        fetcher.step(consumed)


class TestWindow:
    BATCHES = ((0, 1), (0, 1), (2, 1), (2, 3), (4, 3))

    def window(self, budget: float, in_flight: int = 1) -> Window:
        return Window(iter(self.BATCHES), [1] * 5, budget=budget, in_flight=in_flight)

    def test_holds_what_fits(self) -> None:
        window = self.window(4)
        assert [window.move(consumed) for consumed in range(6)] == [
            [0, 1, 2, 3], [0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4], [3, 4], [],
        ]  # fmt: skip
        assert window.move(9) == []

    def test_holds_the_batches_in_flight_however_large(self) -> None:
        assert self.window(0).move(0) == [0, 1]
        assert self.window(0, in_flight=3).move(0) == [0, 1, 2]

    def test_catches_up(self) -> None:
        assert self.window(0).move(4) == [4, 3]

    def test_ends_after_the_next_shard_of_each_lane_and_one_for_each_thread(self) -> None:
        lanes = [(number // 64, 1_000 + number // 64) for number in range(6_400)]
        window = Window(iter(lanes), [None] * 2_000, budget=UNLIMITED, in_flight=1)
        assert len(window.move(0)) == 2 * 2 + 8


def test_an_image_does_not_wait_for_a_shard_that_someone_else_fetches(address: str, tmp_path: Path) -> None:
    source = source_of(address, tmp_path)
    shards = copied(source)
    lock = shards.cache.claim(place(shards, 0)[0])
    assert lock is not None
    assert source.read(0)[0] == IMAGES[0]
    assert there(shards) == []
    lock.close()
    assert source.read(0)[0] == IMAGES[0]
    assert there(shards) == [0]


def test_incomplete_copies_count(address: str, tmp_path: Path) -> None:
    source = source_of(address, tmp_path, shards=2.5)
    shards = copied(source)
    cache = shards.cache
    locks = [cache.claim(place(shards, number)[0]) for number in range(2)]
    assert all(cache.reserve(*place(shards, number)) for number in range(2))
    assert not cache.reserve(*place(shards, 2))
    # Neither room nor a wait.
    assert source.read(len(source) - 1)[0] == IMAGES[-1]
    assert there(shards) == []
    # The process is killed.
    for lock in locks:
        assert lock is not None
        lock.close()
    assert source.read(len(source) - 1)[0] == IMAGES[-1]
    assert there(shards) == [SHARDS - 1]
    assert drafts(shards) == []


def test_what_is_in_use_is_not_evicted_for_what_is_not_needed_yet(address: str, tmp_path: Path) -> None:
    source = source_of(address, tmp_path, shards=2.5)
    shards = copied(source)
    for index in (0, 4):
        source.read(index)
    assert not shards.cache.reserve(*place(shards, 2), ahead=True)
    assert there(shards) == [0, 1]
    os.utime(place(shards, 0)[0], (1, 1))
    assert shards.cache.reserve(*place(shards, 2), ahead=True)
    assert there(shards) == [1]


class TestFetcher:
    def test_copies_within_the_limit_and_in_the_order_of_use(self, address: str, tmp_path: Path) -> None:
        shards = copied(source_of(address, tmp_path, shards=2.5))
        fetcher = fetcher_of(shards, [(3,), (1,), (0,), (2,)])
        run(fetcher, 0)
        assert there(shards) == [1, 3]
        # It makes room only when what was used last is old.
        os.utime(place(shards, 3)[0], (1, 1))
        run(fetcher, 1)
        assert there(shards) == [0, 1]
        assert not fetcher._claims
        assert drafts(shards) == []

    def test_waits_for_room_with_the_lock_so_that_nobody_else_evicts(self, address: str, tmp_path: Path) -> None:
        source = source_of(address, tmp_path, shards=1.5)
        shards = copied(source)
        fetcher = fetcher_of(shards, [(0, 1), (1,)])
        run(fetcher, 0)
        assert there(shards) == [0]
        assert source.read(4)[0] == IMAGES[4]
        assert there(shards) == [0]
        os.utime(place(shards, 0)[0], (1, 1))
        run(fetcher, 1)
        assert there(shards) == [1]

    def test_copies_of_others_give_way_to_the_batch_in_flight_only(self, address: str, tmp_path: Path) -> None:
        """As in an evaluation during training, whose shards fill the cache and are in use."""
        shards = copied(source_of(address, tmp_path, shards=2.5))
        run(fetcher_of(shards, [(0, 1)]), 0)
        fetcher = fetcher_of(shards, [(2,), (3,)])
        run(fetcher, 0)
        assert 2 in there(shards)
        assert 3 not in there(shards)
        assert len(there(shards)) == 2
        # Frees the lock of the one that waits for room.
        run(fetcher, 2)
        assert not fetcher._claims

    def test_a_shard_that_fails_is_left_to_who_needs_it(
        self, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = source_of(address, tmp_path)
        shards = copied(source)
        calls = []

        def fail(self: object, path: str, draft: str) -> None:
            calls.append(path)
            raise ConnectionError("reset by peer")

        monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)
        fetcher = fetcher_of(shards, [(0,), (0,), (1,)])
        with monkeypatch.context() as patch:
            patch.setattr(LocalFileSystem, "get_file", fail)
            for consumed in (0, 1):
                run(fetcher, consumed)
            # Each has the usual attempts, once.
            assert len(calls) == 8
            with pytest.raises(UserError, match=r"fetching .*set-train-000000.tar failed 4 times: reset by peer"):
                source.read(0)
        assert source.read(0)[0] == IMAGES[0]
        assert drafts(shards) == []

    def test_a_folder_that_cannot_be_written(self, address: str, tmp_path: Path) -> None:
        (tmp_path / "full").write_text("a file")
        fetcher = fetcher_of(shards_of(address, tmp_path / "full"), [(0,)])
        fetcher.step(0)
        assert fetcher._failed == {0}
        assert not fetcher._claims

    def test_two_fetch_nothing_twice(self, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        fetched = record_downloads(monkeypatch, tmp_path / "log")
        shards = shards_of(address, tmp_path)
        first, second = (fetcher_of(shards, [(0, 1, 2, 3)]) for _ in range(2))
        first.step(0)
        run(second, 0)
        run(first, 0)
        run(second, 0)
        assert there(shards) == [0, 1, 2, 3]
        assert len(fetched()) == len(set(fetched())) == SHARDS

    def test_forgets_what_is_no_longer_needed(self, address: str, tmp_path: Path) -> None:
        shards = copied(source_of(address, tmp_path, shards=1.5))
        fetcher = fetcher_of(shards, [(0, 1), (2,)])
        run(fetcher, 0)
        assert list(fetcher._claims) == [1]
        os.utime(place(shards, 0)[0], (1, 1))
        run(fetcher, 1)
        assert there(shards) == [2]
        lock = shards.cache.claim(place(shards, 1)[0])
        assert lock is not None
        lock.close()


def record_downloads(monkeypatch: pytest.MonkeyPatch, log: Path) -> Callable[[], list[str]]:
    """Writes the names of fetched files to a log, from all processes; the function returned reads it."""
    real = LocalFileSystem.get_file
    log.touch()

    def get_file(self: LocalFileSystem, path: str, draft: str) -> None:
        with log.open("a") as file:
            file.write(f"{path}\n")
        real(self, path, draft)

    monkeypatch.setattr(LocalFileSystem, "get_file", get_file)
    return lambda: log.read_text().split()


def loader_of(source: Source, workers: int) -> ImageLoader:
    dataset = ImageDataset(source, EvalTransform(image_size=16), training=True, repeats=2)
    sampler = TrainSampler(len(source), seed=1, global_batch_size=4, total_steps=9, repeats=2)
    return make_loader(dataset, sampler, num_workers=workers)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_any_other_source(
    address: str, tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = list(loader_of(opened("tar", address)["train"], 0))
    fetched = record_downloads(monkeypatch, tmp_path / "log")
    source = source_of(address, tmp_path)
    for _ in range(2):
        for batch, other in zip(loader_of(source, workers), plain, strict=True):
            # Otherwise the end of a short loader would interrupt downloads.
            until(lambda: len(there(copied(source))) == SHARDS)
            assert isinstance(batch, Batch)
            assert torch.equal(batch.images_BHWC, other.images_BHWC)
            assert torch.equal(batch.indices_B, other.indices_B)
        assert not multiprocessing.active_children()
    assert len(fetched()) == len(set(fetched())) == SHARDS
    assert drafts(copied(source)) == []


def test_shards_are_fetched_before_anybody_reads(address: str, tmp_path: Path) -> None:
    source = source_of(address, tmp_path)
    shards = copied(source)
    # The images of the first and the last shard.
    part = Subset(source, np.array([0, 1, 14, 15]))  # type: ignore[arg-type]
    with fetch_ahead(part, EvalSampler(4, batch_size=2), in_flight=1) as count:
        (process,) = multiprocessing.active_children()
        # A launcher sends these to all processes.
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(process.pid or 0, number)
        until(lambda: there(shards) == [0, SHARDS - 1])
        count()
        assert process.is_alive()
    assert not process.is_alive()


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloads that do not end."""

    def get_file(self: object, path: str, draft: str) -> None:
        Path(draft).write_bytes(b"half")
        time.sleep(30)

    monkeypatch.setattr(LocalFileSystem, "get_file", get_file)


@pytest.mark.usefixtures("endless")
def test_workers_fetch_themselves_if_the_process_is_killed(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of(address, tmp_path)
    shards = copied(source)
    with fetch_ahead(source, EvalSampler(len(source), batch_size=4), in_flight=1) as count:
        until(lambda: len(drafts(shards)) == SHARDS)
        (process,) = multiprocessing.active_children()
        process.kill()
        process.join()
        monkeypatch.undo()
        assert source.read(0)[0] == IMAGES[0]
        count()
    assert there(shards) == [0]
    assert drafts(shards) == []


@pytest.mark.usefixtures("endless")
def test_the_end_of_a_loader_ends_downloads(address: str, tmp_path: Path) -> None:
    source = source_of(address, tmp_path)
    shards = copied(source)
    batches = iter(loader_of(source, 1))
    # The workers do not wait for them either.
    assert len(next(batches).labels_B) == 4
    until(lambda: len(drafts(shards)) == SHARDS)
    batches.close()  # type: ignore[attr-defined]  # a generator
    assert not multiprocessing.active_children()
    assert drafts(shards) == []


def _hold(source: Source) -> None:
    with fetch_ahead(source, EvalSampler(len(source), batch_size=4), in_flight=1):
        time.sleep(30)


@pytest.mark.usefixtures("endless")
def test_a_killed_run_leaves_nothing(address: str, tmp_path: Path) -> None:
    source = source_of(address, tmp_path)
    shards = copied(source)
    killed = multiprocessing.Process(target=_hold, args=(source,))
    killed.start()
    until(lambda: len(drafts(shards)) == SHARDS)
    killed.kill()
    killed.join()
    until(lambda: not drafts(shards))
