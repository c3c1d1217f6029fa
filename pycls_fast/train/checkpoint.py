"""Checkpoints: saved by any number of ranks, loaded by any other number.

A checkpoint holds everything that the next step depends on. Pure functions of the step (learning rate, sample order,
augmentation, drop-path) are not stored: the step is. The layout on disk is described in `checkpoint_files.py`, how
tensors get there in `checkpoint_tensors.py`, and asynchronous writing in `saving.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from pycls_fast.errors import UserError, first_line
from pycls_fast.files import STATE, checkpoints, step_of
from pycls_fast.parallel import ALONE, World
from pycls_fast.train import checkpoint_files as files
from pycls_fast.train import checkpoint_tensors as tensors
from pycls_fast.train.checkpoint_files import keep_as_best, retire, set_aside
from pycls_fast.train.checkpoint_tensors import Spec, State, Tensors, split

__all__ = [
    "Checkpoint",
    "State",
    "checkpoints",
    "keep_as_best",
    "newest",
    "open_checkpoint",
    "retire",
    "set_aside",
    "split",
    "step_of",
    "write",
]

# Failures of a disk, a folder or another rank; anything else is a bug.
_EXPECTED = (OSError, RuntimeError, CheckpointException, UserError)


def write(found: Tensors, plain: State, folder: Path, step: int, *, keep: int, world: World) -> Path:
    """Write `step_N`, then remove the oldest beyond `keep`; all ranks call this and wait for one another.

    Args:
        found: this rank's share of the tensors, by path.
        plain: everything else, which rank 0 writes.
        folder: the run's checkpoint folder.
        step: steps done.
        keep: how many to keep, besides the best.
        world: its `host_group` carries the ranks' messages.

    Raises:
        UserError: the disk is full or the folder cannot be written to; earlier checkpoints are unchanged.
    """
    is_main = world.is_main
    path = folder / f"step_{step:09d}"

    def together(action: Callable[[], Any]) -> list[Any]:
        """Each rank's result of the action; if one rank fails, all raise, so that none waits forever."""
        failure: BaseException | None = None
        result = None
        try:
            result = action()
        except (Exception, CheckpointException) as error:  # noqa: BLE001  # raised below, after the others know
            failure = error
        reasons = world.gather(None if failure is None else _reason(failure))
        reason = next((reason for reason in reasons if reason is not None), None)
        if failure is not None and not isinstance(failure, _EXPECTED):
            raise failure
        if reason is not None:
            raise UserError(
                f"{path}: the checkpoint could not be written ({reason}); those before it are kept"
            ) from failure
        return world.gather(result)

    temporary: Path = together(lambda: files.begin(folder, step) if is_main else None)[0]
    try:
        together(lambda: tensors.write(found, temporary, world.host_group))
        # The files that torch wrote for this rank: it has flushed their contents, but not their names.
        own = f"__{world.rank}_*"
        listings = together(lambda: files.list_checksums(list(temporary.glob(own))))

        def finish() -> None:
            listing = files.list_checksums([temporary / ".metadata"])
            for part in listings:
                listing |= part
            files.publish(temporary, {"format": files.FORMAT, **plain}, listing)
            # The checkpoint is complete, and the next one removes what is left now.
            with suppress(OSError):
                files.retire(folder, keep)

        together(lambda: finish() if is_main else None)
    except UserError:
        if is_main:
            files.discard(temporary)
        raise
    return path


class Checkpoint:
    """A checkpoint whose files were verified, open for reading.

    `plain` is everything in it that is not a tensor (`step`, `config`, `classes`, ...), `specs` the shapes and dtypes
    of its tensors by path (`model/head.weight`).
    """

    def __init__(self, path: Path, plain: State, specs: dict[str, Spec]) -> None:
        self.path = path
        self.plain = plain
        self.specs = specs

    def part(self, name: str) -> dict[str, Spec]:
        """The tensors under a name ("model", "ema", "optimizer"), by the rest of their paths."""
        return {path.removeprefix(f"{name}/"): spec for path, spec in self.specs.items() if path.startswith(f"{name}/")}

    def read(self, into: Tensors) -> None:
        """Fill tensors and DTensors in place, by path; their shapes must be those in `specs`.

        Raises:
            UserError: the files cannot be read.
        """
        try:
            tensors.read(into, self.path)
        except (OSError, RuntimeError, ValueError, CheckpointException) as error:
            raise UserError(f"{self.path}: the checkpoint cannot be read ({_reason(error)})") from error

    def check_fits(self, into: Tensors) -> None:
        """Check that tensors have the names and shapes of the saved ones.

        Raises:
            UserError: they differ; names the first difference.
        """
        saved = {path: spec.shape for path, spec in self.specs.items()}
        wrong = tensors.differing_shapes(saved, {path: tensor.shape for path, tensor in into.items()})
        if wrong is not None:
            raise UserError(f"{self.path}: does not fit this run: {wrong} here")

    def like(self, model: Tensors, *, host_optimizer: bool = False) -> Tensors:
        """Empty tensors, by path, for the state saved per parameter (optimizer, compression).

        A tensor of the parameter's shape gets the parameter's placement, except on the CPU if it is of an optimizer
        that keeps its state there (`host_optimizer`); any other is unsharded, on the CPU.
        """
        found: Tensors = {}
        for path, spec in self.specs.items():
            part, name, *_ = path.split("/")
            if part not in ("optimizer", "compression"):
                continue
            parameter = model.get(name)
            if parameter is not None and tuple(parameter.shape) == spec.shape:
                elsewhere: dict[str, Any] = {"device": "cpu"} if host_optimizer and part == "optimizer" else {}
                found[path] = torch.empty_like(parameter, dtype=spec.dtype, requires_grad=False, **elsewhere)
            else:
                found[path] = torch.empty(spec.shape, dtype=spec.dtype)
        return found

    def state(self, into: Tensors) -> State:
        """The nested state: tensors that were read, and the plain values."""
        return tensors.join(into, json.loads(json.dumps(self.plain)))


def open_checkpoint(path: Path, world: World = ALONE) -> Checkpoint:
    """Verify a checkpoint's files, divided among the ranks, and read its description; all ranks call this.

    Raises:
        UserError: no such checkpoint, a damaged one, or not a checkpoint of ours; the same on all ranks.
    """
    opened = _open(path.resolve(), world)
    if isinstance(opened, str):
        raise UserError(opened)
    return opened


def newest(folder: Path, warn: Callable[[str], None], world: World = ALONE) -> Checkpoint | None:
    """The newest intact checkpoint, or None if there are no checkpoints; `warn` reports each damaged one skipped.

    All ranks call this.

    Raises:
        UserError: all are damaged: `retire` would keep them and remove the new ones of a run started in that folder.
    """
    damaged: list[str] = []
    for path in world.from_main(list(checkpoints(folder)) if world.is_main else []):
        opened = _open(path, world)
        if isinstance(opened, Checkpoint):
            for line in damaged:
                warn(f"{line}; taking the one before it")
            return opened
        damaged.append(opened)
    if damaged:
        raise UserError(
            *damaged,
            f"run_dir: none of the checkpoints in {folder} can be resumed from; repair one, or use another run_dir",
        )
    return None


def _open(path: Path, world: World) -> Checkpoint | str:
    """The checkpoint, or what is wrong with it; the same on all ranks."""
    reason = _not_ours(path) or _damage(path, world)
    opened = _describe(path) if reason is None else reason
    # One rank may see a folder that another does not.
    mistakes = [mistake for mistake in world.gather(opened if isinstance(opened, str) else None) if mistake]
    return mistakes[0] if mistakes else opened


def _damage(path: Path, world: World) -> str | None:
    reason = files.damage(path, world.rank, world.size)
    return None if reason is None else f"{path}: the checkpoint is damaged ({reason})"


def _describe(path: Path) -> Checkpoint | str:
    try:
        plain = json.loads((path / STATE).read_text(encoding="utf-8"))
        specs = tensors.specs(path)
    except Exception as error:  # noqa: BLE001  # a file that torch did not write raises many kinds
        return f"{path}: not a checkpoint that can be read ({_reason(error)})"
    if not isinstance(plain, dict) or plain.get("format") != files.FORMAT:
        return f"{path}: not a checkpoint of pycls_fast, or one of a later version"
    return Checkpoint(path, plain, specs)


def _not_ours(path: Path) -> str | None:
    if not path.exists():
        return f"{path}: no such checkpoint"
    if not path.is_dir() or not (path / ".metadata").is_file():
        return f"{path}: not a checkpoint of pycls_fast; give a folder like RUN/checkpoints/step_000000100"
    return None


def _reason(error: BaseException) -> str:
    """The first line of an error, or the operating system's message if it has one."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return first_line(error)
