"""Batches from workers: the same for any number of them, whatever happens to files and processes."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import resource
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.multiprocessing import reductions

from pycls_fast.data import dataset, loader
from pycls_fast.data.choices import Augment
from pycls_fast.data.dataset import ImageDataset
from pycls_fast.data.loader import ImageLoader
from pycls_fast.data.policies import RandAugment
from pycls_fast.data.sampling import EvalSampler, Key, TrainSampler
from pycls_fast.data.sources.arrays import SyntheticImages
from pycls_fast.data.sources.files import FileImages
from pycls_fast.data.sources.folders import scan_classes
from pycls_fast.data.transforms import EvalTransform, TrainTransform
from pycls_fast.errors import UserError
from tests.unit.data.conftest import assert_same, write_tree

TRAIN = TrainTransform(Augment(policy=RandAugment(num_ops=1), erase_probability=0.5), image_size=16)
EVAL = EvalTransform(Augment(), image_size=16)


class HookedImages(SyntheticImages):
    """Synthetic images; `hook(index)` runs before each read."""

    def __init__(self, count: int, hook: Callable[[int], None]) -> None:
        super().__init__(count, 20, 3, seed=1)
        self.hook = hook

    def read(self, index: int) -> np.ndarray:
        self.hook(index)
        return super().read(index)


@pytest.fixture
def damaged_folder(tmp_path: Path) -> FileImages:
    """Classes a and b of 10 images each, of which a/3 is empty, a/4 is half a file and b/9 is gone."""
    source = scan_classes(write_tree(tmp_path, {"a": 10, "b": 10}))
    (tmp_path / "a" / "3.png").write_bytes(b"")
    half = tmp_path / "a" / "4.png"
    half.write_bytes(half.read_bytes()[:200])
    (tmp_path / "b" / "9.png").unlink()
    return source


def train_loader(source: FileImages | SyntheticImages, num_workers: int, **options: int) -> ImageLoader:
    dataset = ImageDataset(source, TRAIN, seed=5, training=True)
    sampler = TrainSampler(len(dataset), seed=5, global_batch_size=6, **{"total_steps": 7, **options})
    return ImageLoader(dataset, sampler, num_workers=num_workers)


@pytest.mark.slow
def test_any_number_of_workers(damaged_folder: FileImages) -> None:
    """Across two epoch borders, with damaged files; and again the same in a second iteration."""
    torch.manual_seed(1)
    state, random_state = torch.get_rng_state(), random.getstate()
    batches = list(train_loader(damaged_folder, 0))
    assert_same(batches, list(train_loader(damaged_folder, 0)))
    torch.manual_seed(2)
    for num_workers in (1, 3):
        loader = train_loader(damaged_folder, num_workers)
        assert len(loader) == 7
        assert_same(batches, list(loader))
    assert_same(batches, list(loader))
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == random_state
    assert len({batch.images_BHWC.numpy().tobytes() for batch in batches}) == 7


def test_a_sample_depends_on_seed_epoch_index_and_copy() -> None:
    """Of repeated augmentation; which copies come when is in test_sampling.py."""
    source = SyntheticImages(20, 30, 3, seed=0)
    transform = TrainTransform(Augment(), image_size=16)

    def image(seed: int, key: Key) -> bytes:
        sample = ImageDataset(source, transform, seed=seed, training=True)[key]
        assert sample.index == key[1] % 20
        return sample.image_HWC.tobytes()

    assert image(1, (0, 3)) == image(1, (0, 3))
    assert len({image(1, (1, 3)), image(1, (0, 4)), image(2, (0, 3)), *(image(1, (0, n)) for n in (3, 23, 43))}) == 6


def test_damaged_training_images_are_replaced_by_the_next(damaged_folder: FileImages) -> None:
    dataset = ImageDataset(damaged_folder, TRAIN, seed=5, training=True)
    sample = dataset[(0, 3)]
    names, reasons = zip(*sample.damaged, strict=True)
    assert names == (damaged_folder.name(3), damaged_folder.name(4))
    assert "empty" in reasons[0]
    assert "truncated" in reasons[1].lower()
    assert (sample.index, sample.label) == (5, 0)
    # Its own augmentation, so that the stand-in is not twice the same image in an epoch.
    assert sample.image_HWC is not None
    neighbour_HWC = dataset[(0, 5)].image_HWC
    assert neighbour_HWC is not None
    assert not np.array_equal(sample.image_HWC, neighbour_HWC)
    # After the last comes the first.
    sample = dataset[(0, 19)]
    assert sample.damaged == ((damaged_folder.name(19), "cannot be read: No such file or directory"),)
    assert sample.index == 0
    for batch in train_loader(damaged_folder, 2):
        assert len(batch) == 6


@pytest.mark.parametrize("num_workers", [0, 2])
def test_damaged_evaluation_images_are_left_out(damaged_folder: FileImages, num_workers: int) -> None:
    dataset = ImageDataset(damaged_folder, EVAL, training=False)
    loader = ImageLoader(dataset, EvalSampler(len(dataset), batch_size=3), num_workers=num_workers)
    batches = list(loader)
    assert [len(batch) for batch in batches] == [3, 1, 3, 3, 3, 3, 1]
    seen = [index for batch in batches for index in batch.indices_B.tolist()]
    assert seen == [index for index in range(20) if index not in (3, 4, 19)]
    damaged = [name for batch in batches for name, _ in batch.damaged]
    assert damaged == [damaged_folder.name(index) for index in (3, 4, 19)]
    assert all(batch.erase_B4 is None for batch in batches)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_broken_as_a_whole(tmp_path: Path, num_workers: int) -> None:
    source = scan_classes(write_tree(tmp_path, {"a": 30}))
    for path in (tmp_path / "a").iterdir():
        path.write_bytes(b"")
    with pytest.raises(UserError) as caught:
        list(train_loader(source, num_workers))
    first, *lines = caught.value.lines
    assert first.startswith("17 images in a row are damaged")
    assert len(lines) == 3
    assert all(line.endswith("the file is empty (0 bytes)") for line in lines)


def test_the_machines_own_limits_are_no_damage() -> None:
    def no_more_files(index: int) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with pytest.raises(UserError, match=r"data workers: Too many open files; raise the limit \(ulimit -n\)"):
        list(train_loader(HookedImages(20, no_more_files), 0))


def test_a_worker_that_cannot_send_its_batch_is_an_error_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    """Without a traceback of its thread, and not after the timeout."""

    def no_more_files(index: int) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    with pytest.raises(UserError, match=r"^data workers: Too many open files; raise the limit \(ulimit -n\)"):
        list(train_loader(HookedImages(20, no_more_files), 1))
    assert "Traceback" not in capfd.readouterr().err


def test_a_worker_that_cannot_be_started_leaves_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be waited for at the process's exit, without end."""
    started: list[BaseProcess] = []

    def start(process: BaseProcess) -> None:
        if started:
            raise OSError(errno.EMFILE, "Too many open files")
        started.append(process)
        original(process)

    original = BaseProcess.start
    monkeypatch.setattr(BaseProcess, "start", start)
    with pytest.raises(UserError, match=r"^data workers cannot be started \(Too many open files\); raise the limit"):
        list(train_loader(HookedImages(20, lambda index: None), 2))
    started[0].join(60)
    assert started[0].exitcode == -signal.SIGKILL


def test_workers_are_forked_whatever_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.14's default cannot start one from a program without `if __name__ == "__main__"`."""
    spawn = multiprocessing.get_context("spawn")
    monkeypatch.setattr("multiprocessing.context._default_context._actual_context", spawn)
    assert runpy.run_path(loader.__file__)["_CONTEXT"].get_start_method() == "fork"


def test_an_error_that_passes_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network disk that is away for a moment; it is waited for again once it has answered."""
    away, answers, paused = errno.ESTALE, 0, list[float]()
    failures = [away, errno.EIO, errno.ETIMEDOUT, answers, *3 * [away], errno.ENOENT, *5 * [away], answers, away]

    def look(index: int) -> None:
        number = failures.pop(0) if failures else answers
        if number != answers:
            raise OSError(number, "it is away")

    monkeypatch.setattr(dataset.time, "sleep", paused.append)
    images = ImageDataset(HookedImages(20, look), EVAL, training=False)
    own, whole = images[(0, 2)], ImageDataset(SyntheticImages(20, 20, 3, seed=1), EVAL, training=False)[(0, 2)]
    np.testing.assert_array_equal(own.image_HWC, whole.image_HWC)  # type: ignore[arg-type]
    assert [len(images[(0, index)].damaged) for index in range(5)] == [1, 1, 1, 0, 0]
    assert paused == [*3 * [0.5, 2.0, 8.0], 0.5]


@pytest.mark.slow
def test_a_worker_that_fills_the_shared_memory_is_an_error() -> None:
    def die(index: int) -> None:
        os.kill(os.getpid(), signal.SIGBUS)

    with pytest.raises(UserError, match=r"^a data worker exited unexpectedly: shared memory.*--shm-size"):
        list(train_loader(HookedImages(20, die), 2))


def asked_to_stop() -> None:
    raise LookupError("asked to stop")


def assert_nobody_is_held(loader: ImageLoader) -> None:
    """A batch that never comes is an error, and who waits for it can be stopped."""
    loader.timeout_seconds = 1
    with pytest.raises(UserError, match=r"no batch has come from the data workers for 1 s"):
        list(loader)
    loader.timeout_seconds, loader.while_waiting = 600, asked_to_stop
    with pytest.raises(LookupError, match="asked to stop"):
        list(loader)


@pytest.mark.slow
def test_a_worker_that_stands_still_holds_nobody() -> None:
    assert_nobody_is_held(train_loader(HookedImages(20, lambda index: time.sleep(300)), 1))


def test_a_worker_that_dies_while_the_step_computes_is_an_error_when_its_batch_is_needed() -> None:
    """Not in the middle of the step: there it would be a traceback, and a save would be cut off."""
    batches = iter(train_loader(SyntheticImages(40, 20, 3, seed=1), 1))
    next(batches)
    (worker,) = multiprocessing.active_children()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(10)
    # What an arriving signal would interrupt.
    time.sleep(0.1)
    advice = "usually out of memory .*lower data.num_workers"
    with pytest.raises(UserError, match=rf"^a data worker exited unexpectedly \(killed\); {advice}"):
        list(batches)


# Take the place of what opens the memory of a worker's batch. The worker sends them by their names.
def cut_off(*_: object) -> None:
    multiprocessing.active_children()[0].kill()
    raise ConnectionResetError


def half(*_: object) -> None:
    connection.wait([worker.sentinel for worker in multiprocessing.active_children()])
    raise ConnectionResetError


def test_a_worker_that_dies_while_its_batch_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reductions, "rebuild_storage_fd", cut_off)
    with pytest.raises(UserError, match=r"^a data worker exited unexpectedly \(killed\)"):
        list(train_loader(SyntheticImages(40, 20, 3, seed=1), 1))


def test_a_worker_that_stops_while_its_batch_arrives_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reductions, "rebuild_storage_fd", half)
    monkeypatch.setattr("pycls_fast.data.loader._STUCK_SECONDS", 0.1)
    assert_nobody_is_held(train_loader(SyntheticImages(40, 20, 3, seed=1), 1))


def test_workers_leave_signals_to_the_main_process() -> None:
    """A launcher or Ctrl-C signals the whole group."""
    main = os.getpid()

    def signal_oneself(index: int) -> None:
        assert os.getpid() != main
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(os.getpid(), number)

    expected = list(train_loader(SyntheticImages(20, 20, 3, seed=1), 0))
    assert_same(list(train_loader(HookedImages(20, signal_oneself), 2)), expected)


LEFT_RUNNING = """
import sys
from pycls_fast.data.dataset import ImageDataset
from pycls_fast.data.loader import ImageLoader
from pycls_fast.data.sampling import TrainSampler
from pycls_fast.data.sources.arrays import SyntheticImages
from pycls_fast.data.choices import Augment
from pycls_fast.data.transforms import TrainTransform

dataset = ImageDataset(SyntheticImages(20, 20, 3, seed=1), TrainTransform(Augment(), image_size=16), training=True)
sampler = TrainSampler(20, seed=0, global_batch_size=6, total_steps=1000)
iterator = iter(ImageLoader(dataset, sampler, num_workers=2))
next(iterator)
sys.exit(3)
"""


@pytest.mark.slow
def test_a_program_can_end_while_workers_run() -> None:
    """At exit multiprocessing waits for its children for ever, and ours ignore its SIGTERM."""
    run = subprocess.run([sys.executable, "-c", LEFT_RUNNING], timeout=60, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (3, "")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_pinned_batches(num_workers: int) -> None:
    dataset = ImageDataset(SyntheticImages(20, 20, 3, seed=1), TRAIN, seed=5, training=True)
    sampler = TrainSampler(20, seed=5, global_batch_size=6, total_steps=7)
    batches = list(ImageLoader(dataset, sampler, num_workers=num_workers, pin_memory=True))
    assert all(batch.images_BHWC.is_pinned() and batch.labels_B.is_pinned() for batch in batches)
    assert_same(batches, list(train_loader(SyntheticImages(20, 20, 3, seed=1), 0)))
