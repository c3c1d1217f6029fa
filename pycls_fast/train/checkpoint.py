"""Checkpoints: saved by any number of ranks, loaded by any other number.

    checkpoints/step_000000123/   what torch.distributed.checkpoint writes: a file per rank, and `.metadata`
                     state.json   everything that is not a tensor: step, configuration, classes, ...
    checkpoints/best              a link to one of them

A checkpoint holds everything that the next step depends on. Pure functions of the step (learning rate, sample order,
augmentation, drop-path) are not stored: the step is. Each tensor is stored under its path (see `state.py`) in its full
logical shape: each rank writes a part of them, and a reader with any number of ranks and any placement reads what it
needs.

Everything is written into `.step_*.tmp`, flushed to disk, and renamed when every rank is done. So a name without the
leading dot is a complete checkpoint, whenever the processes are killed. A copy that was cut short is found by the sizes
in `.metadata`; a bit that the disk flipped is not.
"""

from __future__ import annotations

import io
import json
import pickle
import secrets
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from pycls_fast.errors import UserError, first_line
from pycls_fast.files import BEST, STATE, checkpoints, flush, flush_folder, step_of
from pycls_fast.parallel import ALONE, World
from pycls_fast.reading import SavedWeights, check, read_bytes, read_json
from pycls_fast.train.state import State, Tensors, differing_shapes, join

FORMAT = 4

# Failures of a disk, a folder or another rank; anything else is a bug.
_EXPECTED = (OSError, RuntimeError, CheckpointException, UserError)


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of a saved tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


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
    path = folder / f"step_{step:09d}"

    def together(action: Callable[[], Any]) -> Any:
        """Rank 0's result of the action; if one rank fails, all raise, so that none waits forever."""
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
        return world.from_main(result)

    def finish() -> None:
        _publish(temporary, {"format": FORMAT, **plain})
        # The checkpoint is complete, and the next one removes what is left now.
        with suppress(OSError):
            retire(folder, keep)

    temporary: Path = together(lambda: _begin(folder, step) if world.is_main else None)
    try:
        together(lambda: _write_tensors(found, temporary, world))
        together(lambda: finish() if world.is_main else None)
    except UserError:
        if world.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return path


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
    _quiet()
    dcp.save(
        tensors,
        # With CUDA, torch would copy ahead (host tensors too), and once per 10 MB wait for all work that training has
        # queued.
        storage_writer=dcp.FileSystemWriter(folder, sync_files=True, overwrite=False, per_thread_copy_ahead=0),
        planner=dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
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
    """Make `best` a link to this checkpoint, atomically.

    Raises:
        OSError: for example, the file system has no links.
    """
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


class Checkpoint:
    """A checkpoint that is complete, open for reading.

    `plain` is everything in it that is not a tensor (`step`, `config`, `classes`, ...), `specs` the shapes and dtypes
    of its tensors by path (`model/head.weight`).
    """

    def __init__(self, path: Path, plain: State, specs: dict[str, Spec]) -> None:
        self.path = path
        self.plain = plain
        self.specs = specs

    def require(self, schema: type[SavedWeights]) -> Checkpoint:
        """Itself, if its plain values have the fields of a schema.

        Raises:
            UserError: one is missing or of another type.
        """
        try:
            check(schema, self.plain)
        except ValueError as error:
            raise UserError(f"{self.path}: the checkpoint is damaged ({STATE}: {error}); take another one") from error
        return self

    def part(self, name: str) -> dict[str, Spec]:
        """The tensors under a name ("model", "ema", "optimizer"), by the rest of their paths."""
        return {path.removeprefix(f"{name}/"): spec for path, spec in self.specs.items() if path.startswith(f"{name}/")}

    def read(self, into: Tensors) -> None:
        """Fill tensors and DTensors in place, by path; each rank reads only the parts that it holds.

        Raises:
            UserError: the files cannot be read.
        """
        if not into:
            return
        _quiet()
        try:
            dcp.load(
                dict(into),
                storage_reader=_Reader(self.path),
                planner=dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                no_dist=True,
            )
        except (OSError, RuntimeError, ValueError, CheckpointException) as error:
            raise UserError(f"{self.path}: the checkpoint cannot be read ({_reason(error)})") from error

    def check_fits(self, into: Tensors) -> None:
        """Check that tensors have the names and shapes of the saved ones.

        Raises:
            UserError: they differ; names the first difference.
        """
        saved = {path: spec.shape for path, spec in self.specs.items()}
        wrong = differing_shapes(saved, {path: tensor.shape for path, tensor in into.items()})
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
        return join(into, json.loads(json.dumps(self.plain)))


def open_checkpoint(path: Path, world: World = ALONE) -> Checkpoint:
    """See that a checkpoint's files are complete, and read its description; all ranks call this.

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
    opened = _not_ours(path) or _described(path, world)
    # One rank may see a folder that another does not.
    mistakes = [mistake for mistake in world.gather(opened if isinstance(opened, str) else None) if mistake]
    return mistakes[0] if mistakes else opened


def _not_ours(path: Path) -> str | None:
    if not path.exists():
        return f"{path}: no such checkpoint"
    if not path.is_dir() or not ((path / ".metadata").is_file() or (path / STATE).is_file()):
        return f"{path}: not a checkpoint of pycls_fast; give a folder like RUN/checkpoints/step_000000100"
    return None


def _described(path: Path, world: World) -> Checkpoint | str:
    try:
        plain = read_json(path / STATE)
        metadata = _Reader(path).read_metadata()
        specs = {name: _spec(name, entry) for name, entry in metadata.state_dict_metadata.items()}
        _check_sizes(path, metadata, world)
    except Exception as error:  # noqa: BLE001  # a file that torch did not write, or half of one, raises many kinds
        return f"{path}: the checkpoint is damaged ({_reason(error)})"
    if not isinstance(plain, dict) or plain.get("format") != FORMAT:
        return f"{path}: not a checkpoint of this version of pycls_fast"
    return Checkpoint(path, plain, specs)


def _spec(name: str, entry: Any) -> Spec:
    if not isinstance(entry, TensorStorageMetadata):
        raise pickle.UnpicklingError(f"{name} is not a tensor")
    return Spec(tuple(entry.size), entry.properties.dtype)


def _check_sizes(path: Path, metadata: Metadata, world: World) -> None:
    """See that the files of tensors have the bytes that `.metadata` says; each rank looks at its share of them."""
    sizes: dict[str, int] = {}
    for stored in metadata.storage_data.values():
        sizes[stored.relative_path] = max(sizes.get(stored.relative_path, 0), stored.offset + stored.length)
    for name in sorted(sizes)[world.rank :: world.size]:
        size = (path / name).stat().st_size
        if size != sizes[name]:
            raise ValueError(f"{name} has {size:,} bytes instead of {sizes[name]:,}")


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


def _quiet() -> None:
    # Intended: a file is read without the other ranks. Set at import, before another thread restores filters that it
    # saved, and again before each use, in case they were changed since.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


_quiet()


class _Reader(dcp.FileSystemReader):
    """torch's reader, but reading `.metadata` runs no code from it (torch unpickles anything)."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        text = read_bytes(Path(self.path) / ".metadata")
        metadata = _Unpickler(io.BytesIO(text)).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError("not the description of a distributed checkpoint")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    """Allows only the classes of a checkpoint's `.metadata`."""

    _CLASSES: ClassVar = {
        "torch.distributed.checkpoint.metadata": {
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.serialization": {"_get_layout"},
        "torch": {"Size"},
        "pathlib": {"Path", "PosixPath"},
    }

    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":
            # Written by Python 3.13; earlier versions have no such module.
            module = "pathlib"
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in self._CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint")
