"""Writing checkpoints: training waits only for a copy of its state, a thread writes it to disk.

The old ones go, and the best one has a link. The files are described in `checkpoint.py`.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from pycls_fast.errors import UserError
from pycls_fast.files import BEST, STATE, checkpoints, flush, flush_folder, step_of
from pycls_fast.parallel.world import World
from pycls_fast.train.checkpoint import FORMAT, State, Tensors, own_share, reason_of, silence_warning, split

# Failures of a disk, a folder or another rank; anything else is a bug.
_EXPECTED = (OSError, RuntimeError, CheckpointException, UserError)


def write(tensors: Tensors, plain: State, folder: Path, step: int, *, keep: int, world: World) -> Path:
    """Write `step_N` (this rank's share of the tensors, by path; rank 0 what is plain), then remove the oldest beyond
    `keep`; all ranks call this and wait for one another, by messages of `world.host_group`. A `UserError` if the disk
    is full or the folder cannot be written to; earlier checkpoints are unchanged."""
    path = folder / f"step_{step:09d}"
    begun: Path | None = None
    with _together(path, world):
        if world.is_main:
            begun = _begin(folder, step)
    temporary = world.from_main(begun)
    assert temporary is not None
    try:
        with _together(path, world):
            _write_tensors(tensors, temporary, world)
        with _together(path, world):
            if world.is_main:
                _publish(temporary, {"format": FORMAT, **plain})
                # The checkpoint is complete, and the next one removes what is left now.
                with suppress(OSError):
                    retire(folder, keep)
    except UserError:
        if world.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return path


@contextmanager
def _together(path: Path, world: World) -> Iterator[None]:
    """If one rank fails in the context, all raise at its end, so that none waits forever."""
    failure: BaseException | None = None
    try:
        yield
    except (Exception, CheckpointException) as error:  # noqa: BLE001  # raised below, after the others know
        failure = error
    reasons = world.gather(None if failure is None else reason_of(failure))
    reason = next((reason for reason in reasons if reason is not None), None)
    if failure is not None and not isinstance(failure, _EXPECTED):
        raise failure
    if reason is not None:
        raise UserError(
            f"{path}: the checkpoint could not be written ({reason}); those before it are kept"
        ) from failure


def _begin(folder: Path, step: int) -> Path:
    """Make a new temporary folder for a checkpoint, and remove those that earlier processes left."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".step_*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    # A unique name: an old process of a run that was restarted meanwhile may still be writing.
    temporary = folder / f".step_{step:09d}.{secrets.token_hex(4)}.tmp"
    temporary.mkdir()
    return temporary


def _write_tensors(tensors: Tensors, folder: Path, world: World) -> None:
    """Write into a folder made by `_begin` and flush; all ranks call this."""
    silence_warning()
    dcp.save(
        tensors,
        # With CUDA, torch would copy ahead (host tensors too), and once per 10 MB wait for all work that training has
        # queued.
        storage_writer=dcp.FileSystemWriter(folder, sync_files=True, overwrite=False, per_thread_copy_ahead=0),
        process_group=world.host_group,
        no_dist=world.host_group is None,
    )


def _publish(temporary: Path, values: dict[str, Any]) -> None:
    """Write `state.json`, and give the folder its name. The files of all ranks are in it, flushed."""
    with (temporary / STATE).open("w", encoding="utf-8") as file:
        json.dump(values, file, indent=1)
        flush(file)
    # torch has flushed the files' contents, but not their names.
    flush_folder(temporary)
    path = temporary.with_name(temporary.name.split(".")[1])
    if path.exists():
        # Damaged, or left by a continuation of this run that was abandoned: renamed, never overwritten.
        path.rename(_free_name(path))
    temporary.rename(path)
    flush_folder(path.parent)


def retire(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints and the one that `best` links to."""
    best = (folder / BEST).resolve()
    for old in list(checkpoints(folder))[keep:]:
        if old.resolve() != best:
            # Rename first, so that a partly deleted checkpoint never has a valid name.
            hidden = old.with_name(f".{old.name}.{secrets.token_hex(4)}.tmp")
            old.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)


def set_aside(folder: Path, after_step: int) -> list[Path]:
    """Rename the checkpoints of later steps, which a run that resumes from an earlier one has abandoned."""
    moved = [path.rename(_free_name(path)) for path in list(checkpoints(folder)) if step_of(path) > after_step]
    best = folder / BEST
    if best.is_symlink() and not best.exists():
        best.unlink()
    return moved


def keep_as_best(path: Path) -> None:
    """Make `best` a link to this checkpoint, atomically; an `OSError` where the file system has no links."""
    temporary = path.with_name(f".{BEST}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(path.name, target_is_directory=True)
    best = path.with_name(BEST)
    if not best.is_symlink():
        # `scp -r` and the like write a folder for the link.
        shutil.rmtree(best, ignore_errors=True)
    temporary.replace(best)
    flush_folder(path.parent)


def _free_name(path: Path) -> Path:
    """`set_aside_NAME`, with a number if that is taken."""
    names = (f"set_aside_{path.name}{suffix}" for suffix in ("", *(f"~{number}" for number in range(2, 10_000))))
    return next(free for name in names if not (free := path.with_name(name)).exists())


class Saver:
    """Writes checkpoints of a run, one at a time; all ranks call the same methods in the same order.

    Asynchronous: `save` copies this rank's share of the state into host memory and returns; a thread writes it. The
    memory is not pinned: pinning and releasing 10 GB at every save takes longer than copying them. Training does not
    change the copy, which takes as much memory as the share.
    """

    def __init__(self, folder: Path, world: World, *, keep: int, asynchronous: bool) -> None:
        self._folder = folder
        # A separate group: the thread's messages must not mix with those of training.
        self._world = dataclasses.replace(world, host_group=world.saving_group)
        self._keep = keep
        self._asynchronous = asynchronous
        self._saving: Future[Path] | None = None

    @property
    def idle(self) -> bool:
        return self._saving is None

    @property
    def written(self) -> bool:
        """Whether a save has succeeded for which `finish` has not been called yet."""
        return self._saving is not None and self._saving.done() and self._saving.exception() is None

    def save(self, state: State, step: int) -> None:
        """Start writing; `finish` must have been called for the previous save."""
        assert self._saving is None
        found, plain = split(state)
        # All ranks of a stage have the same tensors.
        ranks = self._world.stage_size
        share = own_share(found, self._world.rank % ranks, ranks)
        self._saving = Future()
        if not self._asynchronous:
            self._write(self._saving, share, plain, step)
            return
        arguments = (self._saving, self._copy(share), plain, step)
        # A daemon: a process that has lost the other ranks must not wait for them when it exits.
        threading.Thread(target=self._write, args=arguments, daemon=True, name="saving").start()

    def finish(self) -> Path | None:
        """Wait for the save in progress, if any: its path. A `UserError` on all ranks if it could not be written."""
        saving, self._saving = self._saving, None
        return None if saving is None else saving.result()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Complete the save in progress, also if the run ends with a `UserError`."""
        saving, self._saving = self._saving, None
        if saving is not None and (error is None or isinstance(error, UserError)):
            wait([saving])

    def _copy(self, share: Tensors) -> Tensors:
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
        # A new one per copy: torch 2.11 closes it after the first, and a kept one would hold its memory between saves.
        with closing(DefaultStager(options)) as stager:
            staged = stager.stage(share)
        assert isinstance(staged, dict)
        return staged

    def _write(self, saving: Future[Path], share: Tensors, plain: State, step: int) -> None:
        try:
            if self._world.device.type == "cuda":
                torch.cuda.set_device(self._world.device)
            saving.set_result(write(share, plain, self._folder, step, keep=self._keep, world=self._world))
        except BaseException as error:  # noqa: BLE001  # raised by `finish`, in the main thread
            saving.set_exception(error)
