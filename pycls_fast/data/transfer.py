"""The copy of batches to the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator

import torch

from pycls_fast.data.batch import Batch
from pycls_fast.errors import UserError

IN_FLIGHT = 2
"""Batches that "prefetch" copies ahead."""


def to_device(batches: Iterable[Batch], device: torch.device | str, *, mode: str) -> Generator[Batch, None, None]:
    """Yield the batches on `device`, in order.

    Args:
        mode: "blocking" copies each batch synchronously when it is requested. "prefetch" (CUDA only) copies on a
            separate stream with two batches in flight, so that copies run beside the computation; give it pinned
            batches, else each copy still waits for the host.

    Raises:
        UserError: "prefetch" to a device that is not CUDA.
        ValueError: an unknown mode.
    """
    device = torch.device(device)
    if mode == "blocking":
        return (batch.to(device) for batch in batches)
    if mode != "prefetch":
        raise ValueError(f"unknown mode {mode!r}")
    if device.type != "cuda":
        raise UserError(f'copying ahead ("prefetch") needs a CUDA device, not {device.type}; use "blocking"')
    return _prefetch(iter(batches), device)


def _prefetch(batches: Iterator[Batch], device: torch.device) -> Generator[Batch, None, None]:
    copy_stream = torch.cuda.Stream(device)
    in_flight: deque[tuple[Batch, torch.cuda.Event]] = deque()

    def start_copy() -> None:
        batch = next(batches, None)
        if batch is None:
            return
        with torch.cuda.stream(copy_stream):
            # The pinned source may be freed at once: its allocator waits for the copy before using the memory
            # again.
            copied = batch.to(device, non_blocking=True)
            in_flight.append((copied, copy_stream.record_event()))

    for _ in range(IN_FLIGHT):
        start_copy()
    while in_flight:
        batch, copied = in_flight.popleft()
        compute_stream = torch.cuda.current_stream(device)
        # Wait for this batch's event, not the whole stream: the next copy may still be running.
        compute_stream.wait_event(copied)
        # Memory that the consumer frees must not be reused by a new copy while the computation still reads it.
        batch.record_stream(compute_stream)
        yield batch
        # After the consumer has queued its work, which the next copy then overlaps.
        del batch
        start_copy()
