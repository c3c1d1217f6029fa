"""Batches on their way to the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pycls_fast.data.batch import Batch
from pycls_fast.data.prepare import _prefetch, to_device
from pycls_fast.errors import UserError

skip_without_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def make_batches(count: int, size: int = 4) -> list[Batch]:
    return [
        Batch(
            images_BHWC=torch.randint(0, 256, (2, size, size, 3), dtype=torch.uint8),
            labels_B=torch.tensor([number, 1]),
            indices_B=torch.tensor([number, 2]),
            erase_B4=torch.tensor([[number, 1, 2, 3], [0, 0, 0, 0]]) if number % 2 else None,
            damaged=((f"image {number}", "reason"),),
        )
        for number in range(count)
    ]


def assert_same(batch: Batch, other: Batch) -> None:
    assert torch.equal(batch.images_BHWC.cpu(), other.images_BHWC)
    assert torch.equal(batch.labels_B.cpu(), other.labels_B)
    assert torch.equal(batch.indices_B.cpu(), other.indices_B)
    assert (batch.erase_B4 is None) == (other.erase_B4 is None)
    if batch.erase_B4 is not None and other.erase_B4 is not None:
        assert torch.equal(batch.erase_B4.cpu(), other.erase_B4)
    assert batch.damaged == other.damaged


def test_blocking_is_lazy_and_in_order() -> None:
    taken: list[int] = []

    def source() -> Iterator[Batch]:
        for number, batch in enumerate(make_batches(3)):
            taken.append(number)
            yield batch

    torch.manual_seed(0)
    iterator = to_device(source(), "cpu", mode="blocking")
    assert taken == []
    torch.manual_seed(0)
    expected = make_batches(3)
    torch.manual_seed(0)
    for number, batch in enumerate(iterator):
        assert taken == list(range(number + 1))
        assert_same(batch, expected[number])


def test_prefetch_needs_cuda() -> None:
    with pytest.raises(UserError, match='needs a CUDA device, not cpu; use "blocking"'):
        to_device(make_batches(1), "cpu", mode="prefetch")


class FakeStream:
    """Writes down what is asked of it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.events = name, log, 0

    def record_event(self) -> str:
        self.events += 1
        self.log.append(f"copied {self.events - 1}")
        return f"event {self.events - 1}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_order_of_copies_and_waits(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Two copies are under way before the first batch is used; each use waits for its own copy alone."""
    log: list[str] = []
    copy, compute = FakeStream("copy", log), FakeStream("compute", log)
    current = [compute]

    @contextmanager
    def use(stream: FakeStream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: copy)
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(Batch, "record_stream", lambda batch, stream: log.append(f"kept for {stream.name}"))
    plain_to = Batch.to

    def to(batch: Batch, *args: Any, **kwargs: Any) -> Batch:
        assert current[-1] is copy, "copied on the computation's stream"
        assert kwargs["non_blocking"]
        return plain_to(batch, *args, **kwargs)

    monkeypatch.setattr(Batch, "to", to)
    expected_log = [f"copied {number}" for number in range(min(count, 2))]
    batches = make_batches(count)
    seen = 0
    for number, batch in enumerate(_prefetch(iter(batches), torch.device("cpu"))):
        assert current == [compute]
        assert_same(batch, batches[number])
        if number > 0 and number + 1 < count:
            expected_log.append(f"copied {number + 1}")
        expected_log += [f"compute waits for event {number}", "kept for compute"]
        assert log == expected_log
        seen += 1
    assert seen == count


@pytest.mark.cuda
@skip_without_cuda
@pytest.mark.parametrize("mode", ["blocking", "prefetch"])
def test_on_the_device_under_load(mode: Any) -> None:
    """Large batches, freed at once, while the device is busy: memory reused too early would show."""
    device = torch.device("cuda")
    batches = [batch.pin_memory() for batch in make_batches(12, size=512)]
    busy = torch.randn(2048, 2048, device=device)
    sums = []
    for batch in to_device(batches, device, mode=mode):
        for _ in range(5):
            busy = (busy @ busy).clamp(-1, 1)
        sums.append(batch.images_BHWC.long().sum() + batch.labels_B.sum())
    expected = [int(batch.images_BHWC.long().sum() + batch.labels_B.sum()) for batch in batches]
    assert torch.stack(sums).tolist() == expected


@pytest.mark.cuda
@skip_without_cuda
def test_prefetch_does_not_make_the_host_wait() -> None:
    batches = [batch.pin_memory() for batch in make_batches(6, size=64)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        copies = list(to_device(batches, "cuda", mode="prefetch"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for copied, batch in zip(copies, batches, strict=True):
        assert_same(copied, batch)
