"""Checkpoints: saved by any number of ranks, loaded by any other number.

    checkpoints/step_000000123/   what torch.distributed.checkpoint writes: a file per rank, and `.metadata`
                     state.json   everything that is not a tensor: step, configuration, classes, ...
    checkpoints/best              a link to one of them

A checkpoint holds everything that the next step depends on. Pure functions of the step (learning rate, sample order,
augmentation, drop-path) are not stored: the step is. Each tensor is stored under its path (`model/head.weight`) in its
full logical shape: each rank writes a part of them, and a reader with any number of ranks and any placement reads what
it needs.

Everything is written into `.step_*.tmp`, flushed to disk, and renamed when every rank is done. So a name without the
leading dot is a complete checkpoint, whenever the processes are killed. A copy that was cut short is found by the sizes
in `.metadata`; a bit that the disk flipped is not.
"""

from __future__ import annotations

import importlib
import io
import json
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from pycls_fast.errors import UserError, first_line, refuse, refusing
from pycls_fast.files import STATE, checkpoints
from pycls_fast.parallel.world import ALONE, World
from pycls_fast.reading import SavedWeights, check, read_bytes, read_json

FORMAT = 4

State = dict[str, Any]
"""A nested dictionary of tensors, DTensors and plain values."""
Tensors = dict[str, Tensor]
"""Tensors by path."""

# Tensor subclasses made of several tensors: torchao's optimizer state. No other class is rebuilt from a file.
_COMPOSITE = {"OptimState8bit": "torchao.optim.subclass_8bit"}
# What stands for a list with tensors: a dictionary by position under this name.
_LIST = "list"


def split(state: State) -> tuple[Tensors, State]:
    """The tensors of a state by their path, and the state without them; a `UserError` for a kind of tensor that cannot
    be saved."""
    tensors: Tensors = {}

    def walk(values: Mapping[str, Any], prefix: str) -> State:
        plain: State = {}
        for key, value in values.items():
            path = f"{prefix}{key}"
            if isinstance(value, dict):
                plain[key] = walk(value, f"{path}/")
            elif isinstance(value, list | tuple) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
                # A user's optimizer may keep a matrix for each axis of a weight (Shampoo, SOAP).
                each = {str(index): item for index, item in enumerate(value)}
                plain[key] = walk({_LIST: each}, f"{path}/")
            elif not isinstance(value, Tensor):
                plain[key] = value
            elif type(value._local_tensor if isinstance(value, DTensor) else value) in (Tensor, nn.Parameter):
                tensors[path] = value.detach()
            else:
                inner, plain[key] = _take_apart(path, value)
                tensors.update(inner)
        return plain

    return tensors, walk(state, "")


def join(tensors: Tensors, plain: State) -> State:
    """The inverse of `split` (shares the dictionaries of `plain`)."""
    for path, tensor in tensors.items():
        *folders, name = path.split("/")
        place = plain
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = tensor
    return _put_together(plain)


def own_share(tensors: Tensors, rank: int, ranks: int) -> Tensors:
    """What this rank writes: its shards, and its share of the replicated tensors, which are divided among the ranks."""
    if ranks == 1:
        return tensors
    loads = [0] * ranks
    owner: dict[str, int] = {}
    whole = {path: t.nbytes for path, t in tensors.items() if not isinstance(t, DTensor)}
    for path in sorted(whole, key=lambda path: (-whole[path], path)):
        owner[path] = loads.index(min(loads))
        loads[owner[path]] += whole[path]
    return {path: tensor for path, tensor in tensors.items() if owner.get(path, rank) == rank}


def _take_apart(path: str, value: Any) -> tuple[Tensors, State]:
    name = type(value).__name__
    if name not in _COMPOSITE:
        raise UserError(
            f"optim.name: the state {path} of type {name} cannot be saved; use optim=adamw, or parallel=ddp"
        )
    parts, context = value.__tensor_flatten__()
    plain = [str(item) if isinstance(item, torch.dtype) else item for item in context]
    return {f"{path}/{part}": getattr(value, part) for part in parts}, {"composite": name, "context": plain}


def _put_together(values: State) -> State:
    for key, value in values.items():
        if isinstance(value, dict) and value.get("composite") in _COMPOSITE:
            kind = getattr(importlib.import_module(_COMPOSITE[value["composite"]]), value["composite"])
            inner = {name: part for name, part in value.items() if isinstance(part, Tensor)}
            context = [getattr(torch, x.removeprefix("torch.")) if isinstance(x, str) else x for x in value["context"]]
            values[key] = kind.__tensor_unflatten__(inner, context)
        elif isinstance(value, dict):
            _put_together(value)
            if value.keys() == {_LIST}:
                each = value[_LIST]
                values[key] = [each[str(index)] for index in range(len(each))]
    return values


def check_shapes(what: str, there: Mapping[str, Sequence[int]], here: Mapping[str, Sequence[int]]) -> None:
    """Refuse `what` if a name is missing or has another shape on the other side; says how many do, and the first."""
    mine, saved = ({name: tuple(shape) for name, shape in shapes.items()} for shapes in (here, there))
    wrong = sorted(name for name in mine.keys() | saved.keys() if mine.get(name) != saved.get(name))
    if wrong:
        first = wrong[0]
        raise UserError(
            f"{what}: {len(wrong)} tensors differ, the first is {first} with shape {saved.get(first)} there and "
            f"{mine.get(first)} here"
        )


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of a saved tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is complete, open for reading.

    `plain` is everything in it that is not a tensor (`step`, `config`, `classes`, ...), `specs` the shapes and dtypes
    of its tensors by path (`model/head.weight`).
    """

    path: Path
    plain: State
    specs: dict[str, Spec]

    def require(self, schema: type[SavedWeights]) -> Checkpoint:
        """Return this checkpoint; a `UserError` if its plain values lack a field of a schema, or have another type."""
        with refusing(f"{self.path}: the checkpoint is damaged, its {STATE}", ValueError, use="take another one"):
            check(schema, self.plain)
        return self

    def part(self, name: str) -> dict[str, Spec]:
        """The tensors under a name ("model", "ema", "optimizer"), by the rest of their paths."""
        return {path.removeprefix(f"{name}/"): spec for path, spec in self.specs.items() if path.startswith(f"{name}/")}

    def read(self, into: Tensors) -> None:
        """Fill tensors and DTensors in place, by path; each rank reads only the parts that it holds."""
        if not into:
            return
        silence_warning()
        try:
            dcp.load(dict(into), storage_reader=_Reader(self.path), no_dist=True)
        except (OSError, RuntimeError, ValueError, CheckpointException) as error:
            raise UserError(f"{self.path}: the checkpoint cannot be read ({reason_of(error)})") from error

    def check_fits(self, into: Tensors, world: World = ALONE) -> None:
        """Refuse tensors that do not, on all ranks together, have the saved names and shapes; all ranks call this."""
        saved = {path: spec.shape for path, spec in self.specs.items()}
        here = {path: tensor.shape for path, tensor in into.items()}
        if world.pipeline > 1:
            here = {path: shape for each in world.gather(here) for path, shape in each.items()}
        check_shapes(f"{self.path}: does not fit this run", saved, here)

    def empty_optimizer_state(self, model: Tensors, *, on_host: bool = False) -> Tensors:
        """Empty tensors for the optimizer's state, by path. Those with the shape of their parameter are placed like it,
        or on the CPU if the optimizer keeps its state there (`on_host`); all others are unsharded, on the CPU."""
        found: Tensors = {}
        for path, spec in self.specs.items():
            part, name, *_ = path.split("/")
            parameter = model.get(name)
            if part != "optimizer" or parameter is None:
                # Of the network, or of another stage of a pipeline.
                continue
            if tuple(parameter.shape) == spec.shape:
                elsewhere: dict[str, Any] = {"device": "cpu"} if on_host else {}
                found[path] = torch.empty_like(parameter, dtype=spec.dtype, **elsewhere)
            else:
                found[path] = torch.empty(spec.shape, dtype=spec.dtype)
        return found

    def state(self, into: Tensors) -> State:
        """The nested state: tensors that were read, and the plain values."""
        return join(into, json.loads(json.dumps(self.plain)))


def open_checkpoint(path: Path, world: World = ALONE) -> Checkpoint:
    """Check that a checkpoint's files are complete, and read its description. All ranks call this, and get a
    `UserError` if one of them does not see it whole."""
    opened, mistake = None, None
    try:
        opened = _open(path.resolve(), world)
    except UserError as error:
        mistake = error.lines[0]
    # One rank may see a folder that another does not.
    refuse([line for line in world.gather(mistake) if line is not None][:1])
    assert opened is not None
    return opened


def newest(folder: Path, warn: Callable[[str], None], world: World = ALONE) -> Checkpoint | None:
    """The newest intact checkpoint, or None if there are none; `warn` reports damaged ones. A `UserError` if all are
    damaged: `retire` would keep them and remove the new ones of a run started in that folder. All ranks call this."""
    damaged: list[str] = []
    for path in world.from_main(list(checkpoints(folder)) if world.is_main else []):
        try:
            opened = open_checkpoint(path, world)
        except UserError as error:
            damaged += error.lines
            continue
        for line in damaged:
            warn(f"{line}; taking the one before it")
        return opened
    if damaged:
        raise UserError(
            *damaged,
            f"run_dir: none of the checkpoints in {folder} can be resumed from; repair one, or use another run_dir",
        )
    return None


def _open(path: Path, world: World) -> Checkpoint:
    # A name may be too long.
    with refusing(f"{path}: cannot be read"):
        is_checkpoint, is_there = any((path / name).is_file() for name in (".metadata", STATE)), path.exists()
    if not is_checkpoint:
        kind = "not a checkpoint of pycls_fast" if is_there else "no such checkpoint"
        raise UserError(f"{path}: {kind}; give a folder like RUN/checkpoints/step_000000100")
    # A file that torch did not write, or half of one, raises many kinds.
    with refusing(f"{path}: the checkpoint cannot be read", Exception):
        plain = read_json(path / STATE)
        if plain["format"] != FORMAT:
            raise ValueError(f"format {plain['format']}, not {FORMAT}: it is of another version of pycls_fast")
        metadata = _Reader(path).read_metadata()
        specs = {name: _spec(name, entry) for name, entry in metadata.state_dict_metadata.items()}
        _check_sizes(path, metadata, world)
    return Checkpoint(path, plain, specs)


def _spec(name: str, entry: Any) -> Spec:
    if not isinstance(entry, TensorStorageMetadata):
        raise pickle.UnpicklingError(f"{name} is not a tensor")
    return Spec(tuple(entry.size), entry.properties.dtype)


def _check_sizes(path: Path, metadata: Metadata, world: World) -> None:
    """Check that the files of tensors have the sizes that `.metadata` says; each rank checks its share of them."""
    sizes: dict[str, int] = {}
    for stored in metadata.storage_data.values():
        sizes[stored.relative_path] = max(sizes.get(stored.relative_path, 0), stored.offset + stored.length)
    for name in sorted(sizes)[world.rank :: world.size]:
        size = (path / name).stat().st_size
        if size != sizes[name]:
            raise ValueError(f"{name} has {size:,} bytes instead of {sizes[name]:,}")


def reason_of(error: BaseException) -> str:
    """The first line of an error, or the operating system's message if it has one."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return first_line(error)


def silence_warning() -> None:
    # It is intended that a rank reads a file without the others. Set at import, before another thread restores filters
    # that it saved, and again before each use, in case they were changed since.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


silence_warning()


class _Reader(dcp.FileSystemReader):
    """torch's reader, but reading `.metadata` runs no code from it (torch unpickles anything)."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        text = read_bytes(Path(self.path) / ".metadata")
        metadata: Metadata = _Unpickler(io.BytesIO(text)).load()
        assert metadata.storage_meta is not None
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
