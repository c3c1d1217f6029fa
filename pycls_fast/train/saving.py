"""Asynchronous checkpoint writing: training waits only for a copy of its state, a thread writes it to disk."""

from __future__ import annotations

import dataclasses
import threading
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from pycls_fast.errors import UserError
from pycls_fast.parallel import World
from pycls_fast.train import checkpoint
from pycls_fast.train.state import State, Tensors, own_share, split


@dataclass
class CheckpointSave:
    """A checkpoint that is being written; `path` is set when it is published."""

    step: int
    path: Path | None = None
    blocked_seconds: float = 0.0
    """How long training was blocked: for the copy, or for the whole save when it is not asynchronous."""
    seconds: float = 0.0
    failure: BaseException | None = None
    thread: threading.Thread | None = None
    started: float = field(default_factory=time.monotonic)


class Saver:
    """Writes checkpoints of a run, one at a time; all ranks call the same methods in the same order.

    Asynchronous: `save` copies this rank's share of the state into host memory and returns; a thread writes it. The
    memory is not pinned: pinning and releasing 10 GB at every save takes longer than copying them. Training does not
    change the copy, which takes as much memory as the share.

    Args:
        folder: the run's checkpoint folder.
        world: the ranks.
        keep: how many checkpoints to keep.
        asynchronous: write in a thread.
    """

    def __init__(self, folder: Path, world: World, *, keep: int, asynchronous: bool) -> None:
        self._folder = folder
        # A separate group: the thread's messages must not mix with those of training.
        self._world = dataclasses.replace(world, host_group=world.saving_group)
        self._keep = keep
        self._asynchronous = asynchronous
        self._saving: CheckpointSave | None = None

    @property
    def idle(self) -> bool:
        """Whether there is no save for which `finish` has not been called."""
        return self._saving is None

    @property
    def done(self) -> bool:
        """Whether a save has ended for which `finish` has not been called."""
        saving = self._saving
        return saving is not None and (saving.thread is None or not saving.thread.is_alive())

    @property
    def failed(self) -> bool:
        """Whether a save has failed; `finish` raises its error."""
        return self.done and self._saving is not None and self._saving.failure is not None

    def save(self, state: State, step: int) -> None:
        """Start writing; `finish` must have been called for the previous save."""
        assert self._saving is None
        saving = CheckpointSave(step)
        self._saving = saving
        found, plain = split(state)
        share = own_share(found, self._world.rank, self._world.size)
        if not self._asynchronous:
            self._write(saving, share, plain)
            saving.blocked_seconds = saving.seconds
            return
        share = self._copy(share)
        saving.blocked_seconds = time.monotonic() - saving.started
        # A daemon: a process that has lost the other ranks must not wait for them when it exits.
        saving.thread = threading.Thread(target=self._write, args=(saving, share, plain), daemon=True, name="saving")
        saving.thread.start()

    def finish(self) -> CheckpointSave | None:
        """Wait for the save in progress, if any.

        Raises:
            UserError: it could not be written; the same on all ranks.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return None
        if saving.thread is not None:
            saving.thread.join()
        if saving.failure is not None:
            raise saving.failure
        return saving

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Complete the save in progress, also if the run ends with a `UserError`."""
        saving, self._saving = self._saving, None
        if saving is not None and saving.thread is not None and (error is None or isinstance(error, UserError)):
            saving.thread.join()

    def _copy(self, share: Tensors) -> Tensors:
        options = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        # A new one per copy: torch 2.11 closes it after the first, and a kept one would hold its memory between saves.
        with closing(DefaultStager(options)) as stager:
            staged = stager.stage(share)
        assert isinstance(staged, dict)
        return staged

    def _write(self, saving: CheckpointSave, share: Tensors, plain: State) -> None:
        try:
            if self._world.device.type == "cuda":
                torch.cuda.set_device(self._world.device)
            saving.path = checkpoint.write(share, plain, self._folder, saving.step, keep=self._keep, world=self._world)
        except BaseException as error:  # noqa: BLE001  # raised by `finish`, in the main thread
            saving.failure = error
        saving.seconds = time.monotonic() - saving.started
